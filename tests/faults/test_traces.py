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


async def test_a_block_that_was_pushed_ahead_has_its_draft_span(pair: tuple[Path, Path]) -> None:
    """Level 2: every round with a block has one draft span, marked where the drafter had finished before the verdict."""
    settings = ['verify.draft_level="2"', "verify.draft_fan=1", 'verify.draft_shares_device="no"']
    async with (
        OtlpCollector() as collector,
        running_stack(
            stack_config(*pair, [f'telemetry.otlp_endpoint="{collector.endpoint}"', *settings])
        ) as stack,
    ):
        ahead = 0
        for _ in range(5):  # who is quicker, drafter or verifier, is a matter of the machine
            spans, _ = await traced(collector, stack, max_tokens=60, drafter="model", k=1)
            for span in named(spans, names.SPAN_ROUND):
                below = [s for s in named(spans, names.SPAN_DRAFT) if s["parent_id"] == span["span_id"]]
                if span["attributes"][names.ROUND_OUTCOME] != "used":
                    continue
                assert len(below) == 1
                if below[0]["attributes"][names.DRAFT_AHEAD]:
                    ahead += 1
                    assert span["attributes"][names.ROUND_AHEAD_HIT]
                    assert below[0]["start"] < span["end"]
            if ahead:
                break
        assert ahead


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


async def test_each_round_says_what_was_asked_why_and_what_came_of_it(pair: tuple[Path, Path]) -> None:
    """k, accepted, level, law, the four parts and the batch stand on every round; empty rounds are marked."""
    async with (
        OtlpCollector() as collector,
        running_stack(stack_config(*pair, [f'telemetry.otlp_endpoint="{collector.endpoint}"'])) as stack,
    ):
        spans, _ = await traced(collector, stack, max_tokens=40, drafter="ngram", k=3)
    rounds = [span["attributes"] for span in named(spans, names.SPAN_ROUND)]
    assert rounds
    for attributes in rounds:
        assert attributes[names.ROUND_LAW] == "coupled"
        assert attributes[names.ROUND_ASKED] <= 3
        assert 0 <= attributes[names.ROUND_ACCEPTED] <= attributes[names.ROUND_DRAFTED] <= 3
        assert attributes[names.ROUND_AHEAD_LEVEL] == 0
        assert attributes[names.BATCH_SEQUENCES] == 1
        assert attributes[names.ROUND_DEPTH_REASON]
        marked = attributes[names.ROUND_OUTCOME] not in {"used", "none"}
        assert marked is bool(set(attributes[names.ROUND_MARKS]) - {"slow"})
    (plan,) = named(spans, names.SPAN_PLAN)
    assert plan["attributes"][names.PLAN_REASON]


async def test_the_parts_of_the_rounds_are_the_decode_time(pair: tuple[Path, Path]) -> None:
    """draft + network + wait + verify of all rounds sums to at least 95 % of the decode time on the request span."""
    async with (
        OtlpCollector() as collector,
        running_stack(stack_config(*pair, [f'telemetry.otlp_endpoint="{collector.endpoint}"'])) as stack,
    ):
        spans, _ = await traced(collector, stack, max_tokens=60, drafter="model", k=3)
    parts = (names.ROUND_DRAFT_S, names.ROUND_NETWORK_S, names.ROUND_WAIT_S, names.ROUND_VERIFY_S)
    summed_s = sum(span["attributes"][part] for span in named(spans, names.SPAN_ROUND) for part in parts)
    (root,) = named(spans, names.SPAN_GENERATE)
    assert 0.95 <= summed_s / root["attributes"][names.DECODE_S] <= 1.0001


def test_a_round_is_slow_against_the_rounds_before_it() -> None:
    """Twice the mean of at least eight earlier rounds of the request, and the decode span counts them."""

    from paceline.telemetry.context import TraceContext
    from paceline.telemetry.spans import Telemetry
    from paceline.types import (
        FinishReason,
        Plan,
        ProposalOutcome,
        RoundRecord,
        SamplingParams,
        SpeculativeStats,
        Timings,
    )
    from verify_service.sequence import DecodeSpec, Finished, Run
    from verify_service.spans import DecodeSpans

    seen = []

    class Sink:
        num_lost = 0

        def add(self, name, context, parent, start_ns, end_ns, attributes, error, kind) -> None:
            seen.append((name, dict(attributes)))

        def close(self) -> None:
            pass

    trace = TraceContext(1, 2, sampled=True)
    spec = DecodeSpec("r", (1,), (), SamplingParams(), 50, frozenset(), Plan.plain("x"), trace=trace)
    spans = DecodeSpans(Telemetry(Sink(), sample_ratio=1.0), trace, spec, 0.0)
    record = RoundRecord(0, 1, 0, 0, 0, 1, ProposalOutcome.NONE, "", 1, 1, 0.0, 0.0, 0.0, 0.01, 0.01, 0.0)
    for index in range(20):
        slow = index in {3, 15}
        one = record._replace(index=index, verify_s=0.05 if slow else 0.01)
        spans.see(Run(index, (1,), one, 0.0, 0.0, 0.0))
    spans.see(Finished(FinishReason.LENGTH, Timings(), SpeculativeStats(num_rounds=20)))
    spans.end(1.0)
    marked = [a[names.ROUND_INDEX] for name, a in seen if name == names.SPAN_ROUND and a[names.ROUND_MARKS]]
    assert marked == [15]
    (decode,) = [attributes for name, attributes in seen if name == names.SPAN_DECODE]
    assert decode[names.NUM_SLOW_ROUNDS] == 1
