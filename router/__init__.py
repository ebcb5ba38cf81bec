"""The OpenAI API in front of the replicas, and the choice of the replica that serves a request.

`router.api` speaks HTTP: wire models, prompts, tenants, streams. `router.routing` picks a replica. It knows no tensors
and nothing of how a replica works: what the two share is declared in `cache_index`.
"""
