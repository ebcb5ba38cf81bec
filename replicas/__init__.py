"""A model replica: the engine with its KV blocks, and the Ray Serve deployment around it.

Knows the model, KV tensors, scheduling and eviction. Knows no HTTP, no other replica and no routing.
"""
