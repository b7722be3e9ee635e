"""Sums, distributions and quantiles as a scrape shows them."""

import threading

from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from paceline.telemetry.metrics import MOST_KEYS, Histogram, Metrics, Recent, Sums, gauge, histogram, ratio


def test_a_histogram_counts_a_value_at_its_bound_in_that_bucket() -> None:
    """Buckets are cumulative and their upper bounds inclusive, as Prometheus has it."""
    one = Histogram((0.1, 1.0))
    for value in (0.1, 0.5, 7.0):
        one.observe(value)
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in histogram("h", "text", (), {(): one}).samples
    }
    assert samples["h_bucket", "0.1"] == 1
    assert samples["h_bucket", "1.0"] == 2
    assert samples["h_bucket", "+Inf"] == samples["h_count", None] == 3
    assert samples["h_sum", None] == 7.6


def test_an_exemplar_leads_from_a_bucket_to_a_trace_where_openmetrics_is_asked_for() -> None:
    """Plain text has no room for exemplars; OpenMetrics has."""
    one = Histogram((1.0,))
    one.observe(0.5, "ab" * 16)
    metrics = Metrics()
    metrics.add(lambda: [histogram("h", "text", (), {(): one})])
    assert "ab" * 16 in openmetrics.generate_latest(metrics.registry).decode()
    assert "ab" * 16 not in generate_latest(metrics.registry).decode()


def test_label_sets_are_bounded() -> None:
    """Beyond the limit further label sets are one, so that a mistake cannot fill the memory of two machines."""
    sums = Sums()
    for number in range(2 * MOST_KEYS):
        sums.add((str(number), "x"))
    assert len(sums.values) == MOST_KEYS + 1
    assert sum(sums.values.values()) == 2 * MOST_KEYS


def test_what_is_not_known_is_absent() -> None:
    """No requests, no quantile; nothing drafted, no acceptance: never NaN."""
    assert Recent().quantile(0.99) is None
    assert ratio(0, 0) is None
    assert gauge("g", "text", (), {(): None}).samples == []


def test_a_quantile_is_the_smallest_value_that_enough_do_not_exceed() -> None:
    """Of 1 to 100 the P99 is 99; old values are forgotten."""
    recent = Recent(100)
    for value in range(1000, 0, -1):
        recent.add(value)
    assert recent.quantile(0.99) == 99


def test_a_scrape_while_sums_grow_never_fails() -> None:
    """The scraping thread reads what another one adds to."""
    sums, recent, stop = Sums(most=10_000), Recent(), threading.Event()
    metrics = Metrics()
    metrics.add(lambda: [gauge("g", "text", ("n",), dict(sums.values))])
    metrics.add(lambda: [gauge("q", "text", (), {(): recent.quantile(0.5)})])

    def grow() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            sums.add((str(number % 9000),))
            recent.add(number)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(20):
            generate_latest(metrics.registry)
    finally:
        stop.set()
        thread.join()
