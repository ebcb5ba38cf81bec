"""Block identity, hashes, events, and the index of which replica holds which block.

Knows no models, no tensors, no HTTP and no Ray Serve. The lowest package: it imports none of the others.
"""
