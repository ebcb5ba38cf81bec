"""Names of the keys, and the scripts. REDIS.md describes what is in them.

Braces are hash tags: in a Cluster all keys of the registry are in one slot, and each tenant's are in one.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["FORMAT", "PARTITION_SCRIPTS", "REGISTRY_SCRIPTS", "Keys", "script"]

# What is in the keys. A version of warmroute that writes something else has another number, and each refuses the
# other's namespace.
FORMAT = "1"

REGISTRY_SCRIPTS = ("begin", "hold", "commit", "batch", "heartbeat", "deregister", "announce", "purge", "tick", "head")
PARTITION_SCRIPTS = ("mark", "clean")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one namespace."""

    namespace: str

    def _of_registry(self, name: str) -> str:
        return f"{self.namespace}:{{{self.namespace}}}:{name}"

    @property
    def meta(self) -> str:
        """The log's last version, and what else there is one of: a hash."""
        return self._of_registry("meta")

    @property
    def log(self) -> str:
        """What happened, for followers: a stream."""
        return self._of_registry("log")

    @property
    def leases(self) -> str:
        """When each replica's lease ends: a sorted set, in ms of the server's clock."""
        return self._of_registry("leases")

    @property
    def replicas(self) -> str:
        """Each replica's record: a hash."""
        return self._of_registry("replicas")

    @property
    def tenants(self) -> str:
        """The tenants that have a partition, in hex: a set."""
        return self._of_registry("tenants")

    @property
    def registry(self) -> tuple[str, ...]:
        """All keys of the registry, in the order in which its scripts take them."""
        names = ("identities", "tenants", "purged", "gateways", "gateway-leases")
        return (self.meta, self.log, self.leases, self.replicas, *map(self._of_registry, names))

    def partition(self, tenant: bytes) -> str:
        """The blocks of one tenant: a hash."""
        return f"{self.namespace}:{{{tenant.hex()}}}:blocks"


@cache
def script(name: str) -> str:
    """Source of a script, with what all of its kind begin with."""
    folder = files(__package__) / "lua"
    begins = {**dict.fromkeys(REGISTRY_SCRIPTS, "registry"), **dict.fromkeys(PARTITION_SCRIPTS, "partition")}
    parts = [begins[name], name] if name in begins else [name]
    return "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in parts)
