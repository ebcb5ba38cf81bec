"""Exports plain numbers as metrics of Ray, which its dashboard and Prometheus read.

One of two files of this package that import Ray. What is measured keeps its counts as plain attributes and knows
nothing of this; a task reads them once a second. In Prometheus a name gets Ray's prefix and, for a count, a suffix:
`warmroute_index_gaps` is `ray_warmroute_index_gaps_total` (`Counter` in ray/util/metrics.py). Serve adds the labels
deployment, replica and application.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ray.serve.metrics import Counter, Gauge

__all__ = ["MetricsExport"]

_INTERVAL_S = 1.0


@dataclass(slots=True)
class _Count:
    metric: Counter
    read: Callable[[], Mapping[str, int]]
    label: str | None
    exported: dict[str, int] = field(default_factory=dict)


class MetricsExport:
    """Metrics, each with the function that reads its number now."""

    def __init__(self) -> None:
        self._counts: list[_Count] = []
        self._gauges: list[tuple[Gauge, Callable[[], float]]] = []

    def count(self, name: str, description: str, read: Callable[[], int]) -> None:
        """A number that only grows."""
        self._counts.append(_Count(Counter(name, description=description), lambda: {"": read()}, None))

    def counts(self, name: str, description: str, label: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Numbers that only grow, one for each value of a label; the caller bounds how many values there are."""
        self._counts.append(_Count(Counter(name, description=description, tag_keys=(label,)), read, label))

    def gauge(self, name: str, description: str, read: Callable[[], float]) -> None:
        """A number that goes up and down."""
        self._gauges.append((Gauge(name, description=description), read))

    def export(self) -> None:
        """Hand the numbers of this moment to Ray."""
        for count in self._counts:
            for value, total in count.read().items():
                grown_by = total - count.exported.get(value, 0)
                if grown_by > 0:
                    count.metric.inc(grown_by, tags={count.label: value} if count.label else {})
                    count.exported[value] = total
        for gauge, read in self._gauges:
            gauge.set(read())

    async def run(self) -> None:
        """Export once a second until cancelled."""
        while True:
            self.export()
            await asyncio.sleep(_INTERVAL_S)
