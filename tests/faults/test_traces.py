"""One trace a request over three services, seen by a collector over the wire."""

from pathlib import Path

from stack import Stack, running_stack, stack_config

from paceline.telemetry import names
from paceline.telemetry.spans import MAX_ROUND_SPANS
from paceline.testing.collector import OtlpCollector, SeenSpan

PROMPT = "The riders take turns at the front of the line"


def named(spans: list[SeenSpan], name: str) -> list[SeenSpan]:
    return [span for span in spans if span["name"] == name]


async def traced(collector: OtlpCollector, stack: Stack, **request) -> tuple[list[SeenSpan], int]:
    """The spans of one request, complete, and its number of rounds."""
    answer = await stack.generate(text=PROMPT, temperature=0.0, **request)
    trace_id = answer.started.trace_id
    assert len(trace_id) == 32
    rounds = answer.finished.speculative.num_rounds
    shown = min(rounds, MAX_ROUND_SPANS)
    drafted = shown if "drafter" in request else 0

    def complete(spans: list[SeenSpan]) -> bool:
        own = [s for s in spans if s["trace_id"] == trace_id]
        return (
            len(named(own, names.SPAN_GENERATE)) == len(named(own, names.SPAN_DECODE)) == 1
            and len(named(own, names.SPAN_ROUND)) >= shown
            and len(named(own, names.SPAN_DRAFT)) >= drafted - 1
        )

    await collector.wait_for(complete)
    return collector.trace(trace_id), rounds


async def test_each_round_has_one_draft_and_one_verify_span(pair: tuple[Path, Path]) -> None:
    """Generate > decode > round > draft, verify: three services, one trace, parts inside their parents."""
    async with (
        OtlpCollector() as collector,
        running_stack(stack_config(*pair, [f'telemetry.otlp_endpoint="{collector.endpoint}"'])) as stack,
    ):
        spans, num_rounds = await traced(collector, stack, max_tokens=40, drafter="model", k=3)
    assert {s["service"] for s in spans} == {names.SERVICE_ROUTER, names.SERVICE_VERIFY, names.SERVICE_DRAFT}
    (root,) = named(spans, names.SPAN_GENERATE)
    assert root["parent_id"] == ""
    assert root["service"] == names.SERVICE_ROUTER
    (decode,) = named(spans, names.SPAN_DECODE)
    assert decode["parent_id"] == root["span_id"]
    assert decode["service"] == names.SERVICE_VERIFY
    rounds = named(spans, names.SPAN_ROUND)
    assert len(rounds) == num_rounds
    for span in rounds:
        assert span["parent_id"] == decode["span_id"]
        below = [s for s in spans if s["parent_id"] == span["span_id"]]
        by_name = sorted(s["name"] for s in below)
        if span["attributes"][names.ROUND_OUTCOME] == "used":
            assert by_name == [names.SPAN_DRAFT, names.SPAN_VERIFY]
        draft_services = {s["service"] for s in below if s["name"] == names.SPAN_DRAFT}
        assert draft_services <= {names.SERVICE_DRAFT}
    parts = sum(
        s["attributes"][key]
        for s in rounds
        for key in (names.ROUND_DRAFT_S, names.ROUND_NETWORK_S, names.ROUND_WAIT_S, names.ROUND_VERIFY_S)
    )
    decode_s = max(s["end"] for s in rounds) - min(s["start"] for s in rounds)
    assert parts >= 0.95 * decode_s
    assert len({s["span_id"] for s in spans}) == len(spans)
    (plan,) = named(spans, names.SPAN_PLAN)
    assert plan["attributes"][names.PLAN_REASON]


async def test_a_plain_request_has_no_draft_spans_and_long_ones_are_capped(pair: tuple[Path, Path]) -> None:
    """Rounds beyond the cap are counted on the request, not sent."""
    async with (
        OtlpCollector() as collector,
        running_stack(stack_config(*pair, [f'telemetry.otlp_endpoint="{collector.endpoint}"'])) as stack,
    ):
        spans, num_rounds = await traced(collector, stack, max_tokens=MAX_ROUND_SPANS + 20)
    assert num_rounds == MAX_ROUND_SPANS + 19
    assert len(named(spans, names.SPAN_ROUND)) == MAX_ROUND_SPANS
    assert not named(spans, names.SPAN_DRAFT)
    (decode,) = named(spans, names.SPAN_DECODE)
    assert decode["attributes"][names.NUM_ROUND_SPANS_ELIDED] == 19


async def test_a_stop_string_is_no_error_of_the_decode_span(pair: tuple[Path, Path]) -> None:
    """The router has enough and cancels: the verify tier's span says so, and not that something failed."""
    async with (
        OtlpCollector() as collector,
        running_stack(stack_config(*pair, [f'telemetry.otlp_endpoint="{collector.endpoint}"'])) as stack,
    ):
        whole = await stack.generate(text=PROMPT, temperature=0.0, max_tokens=60)
        stop = next(c for c in whole.text[10:] if c.isalnum())
        answer = await stack.generate(text=PROMPT, temperature=0.0, max_tokens=60, stop=[stop])
        assert answer.finished.matched_stop == stop
        trace_id = answer.started.trace_id
        await collector.wait_for(
            lambda spans: any(s["trace_id"] == trace_id and s["name"] == names.SPAN_DECODE for s in spans)
        )
        (decode,) = named(collector.trace(trace_id), names.SPAN_DECODE)
        assert decode["error"] is None
        assert decode["attributes"][names.CANCELLED] is True


async def test_the_callers_trace_is_continued_and_an_unsampled_one_is_left_alone(
    pair: tuple[Path, Path],
) -> None:
    """W3C context from the caller: same trace id, its span is the parent; flag 00 makes no spans."""
    from paceline.client import Finished, Started, generate_request

    async with (
        OtlpCollector() as collector,
        running_stack(stack_config(*pair, [f'telemetry.otlp_endpoint="{collector.endpoint}"'])) as stack,
    ):
        for flag in ("00", "01"):
            parent = f"00-{'ab' * 16}-{'cd' * 8}-{flag}"
            request = generate_request(text=PROMPT, max_tokens=8)
            events = [e async for e in stack.client.generate(request, metadata=[("traceparent", parent)])]
            assert isinstance(events[0], Started)
            assert isinstance(events[-1], Finished)
        await collector.wait_for(lambda spans: bool(named(spans, names.SPAN_GENERATE)))
        (root,) = named(collector.spans, names.SPAN_GENERATE)
        assert root["trace_id"] == "ab" * 16
        assert root["parent_id"] == "cd" * 8
