"""What `warmroute index` says: each answer as lines for people, and as one JSON object for machines."""

import dataclasses
import datetime
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cache_index.checking import ReplicaCheck
from cache_index.store import ReplicaStats, StoreStats, TenantStats

__all__ = ["check_json", "check_lines", "stats_json", "stats_lines", "tenants_json", "tenants_lines"]

Json = dict[str, Any]

# As much of a fingerprint as tells a few identities apart.
_FINGERPRINT_CHARS = 8


def stats_lines(where: str, stats: StoreStats, now_s: float) -> Iterator[str]:
    """What is registered, and what it all amounts to. now_s: since 1970, as replicas count their epochs from."""
    yield f"{where}: {stats.description}"
    if stats.replicas:
        yield ""
        yield from _table(
            ("replica", "epoch began", "age", "blocks", "batch", "lease left", "identity"),
            [
                (
                    replica.registration.replica_id,
                    f"{_began(replica):%Y-%m-%d %H:%M:%S}",
                    _duration(now_s - _began(replica).timestamp()),
                    f"{replica.num_blocks:,}",
                    f"{replica.seq:,}",
                    f"{replica.lease_left_s:.1f} s",
                    _fingerprint(replica)[:_FINGERPRINT_CHARS],
                )
                for replica in stats.replicas
            ],
            left=("replica", "epoch began", "identity"),
        )
    totals = _totals(stats)
    memory = totals["memory_bytes"]
    per_block = totals["bytes_per_block"]
    yield ""
    yield (
        f"{_count(len(stats.replicas), 'replica')}, {_count(len(stats.tenants), 'tenant')}, "
        f"{_count(totals['num_blocks'], 'block')} in {_count(totals['num_copies'], 'copy', 'copies')}"
        + ("" if memory is None else f", {memory:,} bytes of memory")
        + ("" if per_block is None else f" ({per_block:.0f} a block)")
    )
    yield f"{_count(stats.log_items, 'item')} in the log, up to version {stats.version}"


def stats_json(where: str, stats: StoreStats, now_s: float) -> Json:
    return {
        "store": where,
        "description": stats.description,
        "version": stats.version,
        "log_items": stats.log_items,
        **_totals(stats),
        "replicas": [
            {
                "replica_id": replica.registration.replica_id,
                "epoch": replica.registration.epoch,
                "age_s": now_s - _began(replica).timestamp(),
                "num_blocks": replica.num_blocks,
                "seq": replica.seq,
                "lease_left_s": replica.lease_left_s,
                "fingerprint": _fingerprint(replica),
                "identity": dataclasses.asdict(replica.registration.identity),
            }
            for replica in stats.replicas
        ],
    }


def tenants_lines(tenants: Sequence[TenantStats], names: Mapping[bytes, str]) -> Iterator[str]:
    """One line per tenant, those with most blocks first. names: by key, of those tenants whose name is known."""
    if not tenants:
        yield "no tenant has a block in the index"
        return
    yield from _table(
        ("key", "blocks", "copies", "bytes", "name"),
        [
            (
                tenant.tenant.hex(),
                f"{tenant.num_blocks:,}",
                f"{tenant.num_copies:,}",
                "" if tenant.memory_bytes is None else f"{tenant.memory_bytes:,}",
                names.get(tenant.tenant, ""),
            )
            for tenant in _by_size(tenants)
        ],
        left=("key", "name"),
    )


def tenants_json(tenants: Sequence[TenantStats], names: Mapping[bytes, str]) -> Json:
    return {
        "tenants": [
            {
                "key": tenant.tenant.hex(),
                "name": names.get(tenant.tenant),
                "num_blocks": tenant.num_blocks,
                "num_copies": tenant.num_copies,
                "memory_bytes": tenant.memory_bytes,
            }
            for tenant in _by_size(tenants)
        ]
    }


def check_lines(checks: Sequence[ReplicaCheck]) -> Iterator[str]:
    """What the store has of each replica, beside what that says it holds."""
    if not checks:
        yield "no replica is registered, so there is nothing to compare"
        return
    yield from _table(
        ("replica", "blocks stored", "blocks held", ""),
        [
            (
                check.replica_id,
                f"{check.num_blocks_stored:,}",
                "" if check.num_blocks_held is None else f"{check.num_blocks_held:,}",
                {True: "agrees", False: "DRIFT", None: "silent"}[check.agrees],
            )
            for check in checks
        ],
        left=("replica", ""),
    )
    yield ""
    num_drifted = sum(check.agrees is False for check in checks)
    num_silent = sum(check.agrees is None for check in checks)
    if num_drifted or num_silent:
        yield f"of {_count(len(checks), 'replica')}, {num_drifted} drifted and {num_silent} said nothing"
    else:
        yield f"no drift: the store has what {_count(len(checks), 'replica')} said to hold"


def check_json(checks: Sequence[ReplicaCheck]) -> Json:
    return {"replicas": [dataclasses.asdict(check) for check in checks]}


def _totals(stats: StoreStats) -> Json:
    """Sums over tenants; memory only where the store knows each tenant's."""
    num_blocks = sum(tenant.num_blocks for tenant in stats.tenants)
    known = [tenant.memory_bytes for tenant in stats.tenants if tenant.memory_bytes is not None]
    memory_bytes = sum(known) if len(known) == len(stats.tenants) else None
    return {
        "num_tenants": len(stats.tenants),
        "num_blocks": num_blocks,
        "num_copies": sum(tenant.num_copies for tenant in stats.tenants),
        "memory_bytes": memory_bytes,
        "bytes_per_block": memory_bytes / num_blocks if memory_bytes is not None and num_blocks else None,
    }


def _by_size(tenants: Sequence[TenantStats]) -> list[TenantStats]:
    return sorted(tenants, key=lambda tenant: (-tenant.num_blocks, tenant.tenant))


def _began(replica: ReplicaStats) -> datetime.datetime:
    """When its epoch began, in local time: replicas number epochs by the clock, in nanoseconds."""
    return datetime.datetime.fromtimestamp(replica.registration.epoch / 1e9).astimezone()


def _fingerprint(replica: ReplicaStats) -> str:
    return replica.registration.identity.fingerprint().hex()


def _duration(duration_s: float) -> str:
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if duration_s >= 2 * length_s:
            return f"{duration_s / length_s:.0f} {unit}"
    return f"{duration_s:.0f} s"


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> Iterator[str]:
    """Columns as wide as their longest cell; numbers stand on the right, the columns of `left` on the left."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for cells in (names, *rows):
        padded = (
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(names, cells, widths, strict=True)
        )
        yield "  ".join(padded).rstrip()
