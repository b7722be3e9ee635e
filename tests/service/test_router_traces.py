"""The router's spans, seen by a collector over the wire, and the context it hands on."""

import asyncio
import re

import pytest
from scripted_verify import Break, Script, ask, pair, tokenizer

from paceline.client import Started, generate_request
from paceline.errors import EngineError, InvalidRequestError
from paceline.telemetry import names
from paceline.testing.collector import OtlpCollector

IDS = tokenizer().encode("one two three four five")
PARENT = "00-" + "1f" * 16 + "-" + "2e" * 8


def generate_spans(spans):
    return [span for span in spans if span["name"] == names.SPAN_GENERATE]


async def one_request(script: Script, *, fails: type[Exception] | None = None, metadata=(), **request):
    """The spans of one request, the verify tier's metadata, and its answer."""
    async with OtlpCollector() as collector:
        settings = [f'telemetry.otlp_endpoint="{collector.endpoint}"']
        async with pair(script, *settings) as (client, verify):
            answer = None
            if fails:
                with pytest.raises(fails):
                    await ask(client, metadata=metadata, **request)
            else:
                answer = await ask(client, metadata=metadata, **request)
        return collector.spans, verify.servicer.metadata, answer


async def test_a_request_is_one_span_with_its_plan_below_and_its_sums_on_it() -> None:
    """No prompt, no text; the verify tier gets the span as its parent."""
    script = Script(output=IDS, run_lengths=(2,), k=1)
    spans, metadata, answer = await one_request(
        script, text="hidden words", max_tokens=5, task_type="qa", request_id="r1", seed=2**64 - 1
    )
    (root,) = generate_spans(spans)
    (plan,) = [span for span in spans if span["name"] == names.SPAN_PLAN]
    assert answer is not None
    assert root["service"] == names.SERVICE_ROUTER
    assert root["kind"] == "server"
    assert root["parent_id"] == ""
    assert root["trace_id"] == answer.started.trace_id
    assert plan["parent_id"] == root["span_id"]
    assert root["start"] <= plan["start"] <= plan["end"] <= root["end"]
    assert metadata[0]["traceparent"] == f"00-{root['trace_id']}-{root['span_id']}-01"
    attributes = root["attributes"]
    assert attributes[names.REQUEST_ID] == "r1"
    assert attributes[names.TASK_TYPE] == plan["attributes"][names.TASK_TYPE] == "qa"
    assert attributes[names.PLAN_REASON] == plan["attributes"][names.PLAN_REASON] != ""
    assert attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] == 5
    assert attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] == ["length"]
    assert attributes[names.NUM_ROUNDS] == 2
    assert attributes[names.DRAFT_S] == 2.0
    assert attributes[names.VERIFY_S] == 8.0
    assert attributes[names.DRAFT_ACCEPTANCE_RATE] == 1.0
    assert attributes[names.GEN_AI_REQUEST_SEED] == str(2**64 - 1)
    assert "hidden" not in repr(spans)
    assert root["error"] is None


async def test_the_callers_trace_is_continued() -> None:
    """Same trace, the caller's span as parent."""
    spans, metadata, answer = await one_request(
        Script(output=IDS), max_tokens=2, metadata=[("traceparent", f"{PARENT}-01")]
    )
    (root,) = generate_spans(spans)
    assert root["trace_id"] == answer.started.trace_id == "1f" * 16
    assert root["parent_id"] == "2e" * 8
    assert metadata[0]["traceparent"].startswith("00-" + "1f" * 16)


async def test_a_caller_that_does_not_sample_is_obeyed_down_the_line() -> None:
    """No span here, and the verify tier hears the decision."""
    spans, metadata, answer = await one_request(
        Script(output=IDS), max_tokens=2, metadata=[("traceparent", f"{PARENT}-00")]
    )
    assert not spans
    assert answer.started.trace_id == ""
    assert metadata[0]["traceparent"] == f"{PARENT}-00"


async def test_a_router_without_an_exporter_hands_the_callers_trace_on() -> None:
    """The verify tier's spans then hang below the caller's."""
    async with pair(Script(output=IDS)) as (client, verify):
        answer = await ask(client, max_tokens=2, metadata=[("traceparent", f"{PARENT}-01")])
        await ask(client, max_tokens=2)
    assert verify.servicer.metadata[0]["traceparent"] == f"{PARENT}-01"
    assert "traceparent" not in verify.servicer.metadata[1]
    assert answer.started.trace_id == ""


@pytest.mark.parametrize(
    ("script", "fails", "code", "request_"),
    [
        (Script(output=IDS), InvalidRequestError, "INVALID_ARGUMENT", {"max_tokens": 0}),
        (Script(output=IDS, breaks=[Break(1, error=EngineError("x"))]), EngineError, "INTERNAL", {"max_tokens": 5}),
    ],
)  # fmt: skip
async def test_a_failed_request_has_a_failed_span(script, fails, code, request_) -> None:
    """With the code of its status."""
    spans, _, _ = await one_request(script, fails=fails, **request_)
    (root,) = generate_spans(spans)
    assert root["error"] == code
    assert root["attributes"][names.ERROR_TYPE] == code


async def test_a_cancelled_request_has_a_span_too() -> None:
    """Recorded when it ends, whoever ended it."""
    async with OtlpCollector() as collector:
        settings = [f'telemetry.otlp_endpoint="{collector.endpoint}"']
        async with pair(Script(output=IDS, delay_s=20), *settings) as (client, verify):
            events = client.generate(generate_request(text="x"))
            started = await anext(events)
            assert isinstance(started, Started)
            assert re.fullmatch("[0-9a-f]{32}", started.trace_id)
            await events.aclose()
            async with asyncio.timeout(5):
                while verify.servicer.active:
                    await asyncio.sleep(0.02)
        (root,) = generate_spans(collector.spans)
    assert root["error"] == "CANCELLED"
