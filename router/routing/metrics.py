"""The metrics of a router's mirror. docs: README, "Metrics of the index"."""

from collections.abc import Mapping

from cache_index.metrics import MetricsExport
from cache_index.mirror import IndexMirror

from ..index_link import IndexLink

__all__ = ["mirror_metrics"]


def mirror_metrics(mirror: IndexMirror, blind_lookups: Mapping[str, int], link: IndexLink) -> MetricsExport:
    """What a mirror counts, under names that stay.

    blind_lookups: decisions made without knowing whether a replica holds more, by reason.
    """
    metrics = MetricsExport()
    count, gauge = metrics.count, metrics.gauge
    count("warmroute_index_resyncs", "Snapshots that the mirror took.", lambda: mirror.num_snapshots)
    count("warmroute_index_gaps", "Batches that the mirror missed.", lambda: mirror.num_gaps)
    count("warmroute_index_drifts", "Digests that told of something else than known.", lambda: mirror.num_drifts)
    count("warmroute_index_lookups", "Chains looked up.", lambda: mirror.num_lookups)
    count("warmroute_index_read_throughs", "Chains asked of the store.", lambda: mirror.num_read_throughs)
    count("warmroute_index_evicted_blocks", "Blocks given up for the bound.", lambda: mirror.num_evicted_blocks)
    metrics.counts(
        "warmroute_index_blind_lookups",
        "Lookups that may have missed what replicas hold, by reason.",
        "reason",
        lambda: dict(blind_lookups),
    )
    gauge("warmroute_index_blocks", "Blocks known, on each replica.", lambda: mirror.num_blocks)
    gauge("warmroute_index_lag_items", "Items that the log held beyond the last read.", lambda: mirror.lag_items)
    gauge("warmroute_index_silence_seconds", "Since the store last answered.", lambda: mirror.silence_s)
    gauge("warmroute_index_degraded", "1 while the store is away.", lambda: float(mirror.degraded_reason is not None))
    gauge("warmroute_index_identity_mismatches", "Replicas of another identity.", lambda: len(link.mismatches))
    return metrics
