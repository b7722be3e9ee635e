"""W3C trace context: parsed strictly, carried faithfully, round ids derived alike on both sides."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.telemetry import Telemetry, TraceContext, extract, round_context

CONTEXTS = st.builds(TraceContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
GOOD = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@given(CONTEXTS)
def test_a_context_survives_the_header(context):
    """Format, extract, parse: the same value."""
    text = context.to_traceparent()
    assert TraceContext.from_traceparent(text) == context
    assert extract((("user-agent", "x"), ("traceparent", text), ("bin-bin", b"\x00"))) == context


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        GOOD.upper(),
        GOOD + "-",
        GOOD + "-extra",
        GOOD + "\n",
        " " + GOOD,
        GOOD.replace("00-4", "ff-4"),
        GOOD.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        GOOD.replace("00f067aa0ba902b7", "0" * 16),
        GOOD.replace("4bf9", "4bg9"),
        GOOD.replace("4bf9", "\u0664bf9"),
        GOOD.replace("-", "_"),
    ],
)
def test_a_broken_traceparent_is_no_context(text):
    """The request is then treated as one that brings none: never an error."""
    assert TraceContext.from_traceparent(text) is None
    assert extract([("traceparent", text)]) is None


def test_later_versions_and_unknown_flags_are_read_as_far_as_known():
    """A future version may be longer; of the flags only the sampled bit counts."""
    assert TraceContext.from_traceparent(GOOD.replace("00-4", "01-4") + "-what-ever").sampled
    assert not TraceContext.from_traceparent(GOOD[:-2] + "02").sampled
    assert TraceContext.from_traceparent(GOOD[:-2] + "ff").sampled


def test_contradicting_parents_are_no_parent():
    """Two equal headers are one; two different ones cannot both be right."""
    other = GOOD.replace("4bf9", "5bf9")
    assert extract([("traceparent", GOOD)] * 2) is not None
    assert extract([("traceparent", GOOD), ("traceparent", other)]) is None
    assert extract([("traceparent", GOOD.encode())]) is None
    assert extract(None) is None


@given(CONTEXTS, st.integers(0, 2**32 - 1))
def test_both_tiers_derive_the_same_round_id(decode, index):
    """The draft tier knows only the traceparent, and gets the id that the verify tier uses."""
    told = TraceContext.from_traceparent(decode.to_traceparent())
    derived = round_context(told, index)
    assert derived == round_context(decode, index)
    assert (derived.trace_id, derived.sampled) == (decode.trace_id, decode.sampled)
    assert 0 < derived.span_id < 2**64


def test_round_ids_do_not_collide():
    """10,000 rounds of two requests of one trace: all ids differ (collision odds about 1e-11)."""
    one, two = TraceContext(5, 6, sampled=True), TraceContext(5, 7, sampled=True)
    ids = {round_context(decode, index).span_id for decode in (one, two) for index in range(5000)}
    assert len(ids | {6, 7}) == 10_002


def test_the_derivation_is_part_of_the_protocol():
    """Verify and draft replicas of different builds must agree, so the value is pinned."""
    assert round_context(TraceContext(1, 2, sampled=True), 3).span_id == 4145572009461555037


# --- sampling decisions ---------------------------------------------------------------------------------------------


class Sink:
    """Remembers spans."""

    def __init__(self):
        self.spans = []
        self.closed = 0

    def add(self, *span):
        self.spans.append(span)

    def close(self):
        self.closed += 1


def test_the_callers_decision_is_honoured():
    """A sampled parent is continued whatever the ratio; an unsampled one is not traced."""
    never, always = Telemetry(Sink(), sample_ratio=0.0), Telemetry(Sink(), sample_ratio=1.0)
    parent = TraceContext(5, 6, sampled=True)
    continued = never.new_trace(parent)
    assert (continued.trace_id, continued.sampled) == (5, True)
    assert continued.span_id != 6
    assert always.new_trace(TraceContext(5, 6, sampled=False)) is None


def test_requests_without_a_decision_are_sampled_by_the_ratio():
    """0 none, 1 all, 0.25 a quarter: 2,000 requests within 5 standard deviations (false alarm 6e-7)."""
    for ratio in (0.0, 0.25, 1.0):
        telemetry = Telemetry(Sink(), sample_ratio=ratio)
        traces = [telemetry.new_trace(None) for _ in range(2000)]
        sampled = [t for t in traces if t is not None]
        assert abs(len(sampled) - 2000 * ratio) <= 5 * (2000 * ratio * (1 - ratio)) ** 0.5
        assert len({t.trace_id for t in sampled}) == len({t.span_id for t in sampled}) == len(sampled)


def test_without_an_exporter_nothing_is_made():
    """Disabled telemetry hands out no traces and drops what is recorded."""
    off = Telemetry()
    assert not off.enabled
    assert off.new_trace(TraceContext(1, 2, sampled=True)) is None
    off.record("x", TraceContext(1, 2, sampled=True), parent=None, start=0, end=1)
    off.shutdown()


def test_unsampled_and_late_spans_are_dropped_and_ends_never_precede_starts():
    """Only sampled spans before the shutdown reach the exporter."""
    sink = Sink()
    telemetry = Telemetry(sink)
    sampled = TraceContext(1, 2, sampled=True)
    telemetry.record("no", TraceContext(1, 2, sampled=False), parent=None, start=0, end=1)
    telemetry.record("yes", sampled, parent=None, start=5.0, end=4.0)
    telemetry.shutdown()
    telemetry.shutdown()
    telemetry.record("late", sampled, parent=None, start=0, end=1)
    (span,) = sink.spans
    assert span[0] == "yes"
    assert span[3] == span[4], "an end before the start is a rounding error, not a negative length"
    assert sink.closed == 1


def test_monotonic_times_become_wall_times():
    """A span measured now is shown as now."""
    sink = Sink()
    telemetry = Telemetry(sink)
    now = time.monotonic()
    telemetry.record("x", TraceContext(1, 2, sampled=True), parent=None, start=now - 1.5, end=now)
    _, _, _, start_ns, end_ns, *_ = sink.spans[0]
    assert abs(end_ns - time.time_ns()) < 1e9
    assert abs(end_ns - start_ns - 1_500_000_000) < 2000


def test_an_unsampled_request_costs_next_to_nothing():
    """Deciding and dropping: under 20 microseconds a call of the thread's own time (about 1 is usual)."""
    telemetry = Telemetry(Sink(), sample_ratio=0.0)
    context = TraceContext(1, 2, sampled=False)
    begin = time.thread_time()
    for _ in range(2000):
        telemetry.new_trace(None)
        telemetry.record("x", context, parent=None, start=0.0, end=1.0)
    assert (time.thread_time() - begin) / 2000 < 20e-6
