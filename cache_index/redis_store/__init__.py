"""The index store on Redis: one server, one behind Sentinel, or a Cluster. REDIS.md describes the keys.

store       the contract, step by step
registry    who is registered, the log, gateways: one slot, each step one script
partitions  which blocks of a tenant are where: one hash per tenant, in a slot of its own
snapshot    all of it, read page by page
codec       what is in the values
link        connections, time limits, and the translation of Redis's errors
"""

from .store import RedisStore

__all__ = ["RedisStore"]
