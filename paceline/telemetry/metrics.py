"""Numbers of one process for Prometheus: plain sums that hot paths add to, turned into text only when somebody asks.

A step of the engine lasts a few milliseconds, so what it adds to are numbers and lists of one owner; families, labels and
text are made by the thread that answers a scrape. Nothing is global: tests run three tiers in one process, and each has
its own registry. Sums are read while they grow, so a scrape may see one addition of a step and not yet the next.
"""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from paceline import __version__
from paceline.telemetry.spans import Telemetry

__all__ = [
    "Histogram",
    "Metrics",
    "Recent",
    "Sums",
    "build_info",
    "counter",
    "gauge",
    "histogram",
    "ratio",
    "spans_lost",
]

Source = Callable[[], Iterable[Metric]]
Key = tuple[str, ...]

MOST_KEYS = 512
"""Label sets of one family. Labels come from closed lists, so this is for the day that somebody breaks the rule."""
OTHER = "other"


class Metrics(Collector):
    """One process's registry: what ``add`` was given, and the process itself (memory, CPU time, start time)."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def add(self, source: Source) -> None:
        """Have ``source`` called at every scrape, from the scraping thread."""
        self._sources.append(source)

    def describe(self) -> list[Metric]:
        """Nothing: names are known at a scrape only."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families now."""
        for source in self._sources:
            yield from source()


class Sums:
    """Sums by label values. One owner adds; beyond MOST_KEYS label sets all further ones are counted as ``other``."""

    __slots__ = ("_most", "values")

    def __init__(self, *, most: int = MOST_KEYS) -> None:
        self._most = most
        self.values: dict[Key, float] = {}

    def add(self, key: Key, amount: float = 1) -> None:
        """Add to one of them."""
        values = self.values
        known = values.get(key)
        if known is not None:
            values[key] = known + amount
        elif len(values) < self._most:
            values[key] = amount
        else:
            other = (OTHER,) * len(key)
            values[other] = values.get(other, 0) + amount


class Histogram:
    """One distribution: counts by upper bound, with the last trace seen in each bucket."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._exemplars: list[Exemplar | None] = [None] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, trace_id: str = "") -> None:
        """One value; ``trace_id`` leads from the bucket to an example of it."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if trace_id:
            self._exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    def write(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add this distribution to ``family``."""
        counts, exemplars, total = list(self._counts), list(self._exemplars), 0
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for bound, count, exemplar in zip((*self._bounds, math.inf), counts, exemplars, strict=True):
            total += count
            name = "+Inf" if bound == math.inf else repr(float(bound))
            buckets.append((name, total) if exemplar is None else (name, total, exemplar))
        family.add_metric(labels, buckets, self._sum)


class Recent:
    """The last values of something, for a quantile that a person can read without a query language."""

    __slots__ = ("_values",)

    def __init__(self, most: int = 1000) -> None:
        self._values: deque[float] = deque(maxlen=most)

    def add(self, value: float) -> None:
        """One more; the oldest goes when there are too many."""
        self._values.append(value)

    def quantile(self, share: float) -> float | None:
        """The value that ``share`` of them do not exceed; None without values."""
        while True:
            try:
                ordered = sorted(self._values)
            except RuntimeError:  # grew while it was read
                continue
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def counter(name: str, text: str, labels: Sequence[str], values: Mapping[Key, float]) -> Metric:
    """A family of counters; ``_total`` is added to the name."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in list(values.items()):
        family.add_metric(key, value)
    return family


def gauge(name: str, text: str, labels: Sequence[str], values: Mapping[Key, float | None]) -> Metric:
    """A family of gauges. What is not known (None) is absent, never NaN."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in list(values.items()):
        if value is not None:
            family.add_metric(key, value)
    return family


def histogram(name: str, text: str, labels: Sequence[str], values: Mapping[Key, Histogram]) -> Metric:
    """A family of histograms."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, one in list(values.items()):
        one.write(family, key)
    return family


def ratio(part: float, whole: float) -> float | None:
    """A ratio of sums; None where there is nothing to divide by."""
    return part / whole if whole else None


def build_info(service: str, instance: str) -> Metric:
    """Who is asked: constant 1, the facts are labels."""
    return gauge(
        "paceline_build_info",
        "Which service this is, which version of it, and which process.",
        ("service", "version", "instance_id"),
        {(service, __version__, instance): 1},
    )


def spans_lost(telemetry: Telemetry) -> Metric:
    """Spans that no collector took."""
    return counter("paceline_spans_lost", "Spans that no trace collector took.", (), {(): telemetry.num_lost})
