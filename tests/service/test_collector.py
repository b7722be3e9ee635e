"""Spans over the wire: what a real OTLP collector sees of the tiers."""

import asyncio
import time

from paceline.config import TelemetryConfig
from paceline.telemetry import Telemetry, TraceContext, names, round_context
from paceline.testing.collector import OtlpCollector


def telemetry(collector, service, instance="1"):
    return Telemetry.setup(
        TelemetryConfig(otlp_endpoint=collector.endpoint), service_name=service, instance_id=instance
    )


async def test_spans_arrive_with_their_preset_ids_parents_and_service_names():
    """Three services of one process make one trace; the draft span hangs below a round recorded elsewhere."""
    async with OtlpCollector() as collector:
        router, verify, draft = (
            telemetry(collector, service, f"{service}-0")
            for service in (names.SERVICE_ROUTER, names.SERVICE_VERIFY, names.SERVICE_DRAFT)
        )
        start = time.monotonic()
        root = router.new_trace(None)
        decode = verify.child(root)
        of_round = round_context(decode, 3)
        of_draft = draft.child(of_round)
        of_draft_as_told = round_context(TraceContext.from_traceparent(decode.to_traceparent()), 3)
        draft.record(
            names.SPAN_DRAFT, of_draft, parent=of_draft_as_told, start=start, end=start + 0.01, attributes={}
        )
        verify.record(
            names.SPAN_ROUND,
            of_round,
            parent=decode,
            start=start,
            end=start + 0.02,
            attributes={names.ROUND_INDEX: 3, names.ROUND_DRAFT_S: 0.01, "flag": True, "list": [1, 2]},
        )
        verify.record(names.SPAN_DECODE, decode, parent=root, start=start, end=start + 0.5, attributes={})
        router.record(
            names.SPAN_GENERATE,
            root,
            parent=None,
            start=start,
            end=start + 1,
            attributes={},
            error="no room",
            kind="server",
        )
        spans = await collector.wait_for(lambda spans: len(spans) == 4)
        for service in (router, verify, draft):
            service.shutdown()

    by_name = {span["name"]: span for span in spans}
    generate, decoded, one_round, drafted = (by_name[n] for n in ("Generate", "decode", "round", "draft"))
    assert {span["trace_id"] for span in spans} == {f"{root.trace_id:032x}"}
    assert generate["span_id"] == f"{root.span_id:016x}"
    assert [generate["parent_id"], decoded["parent_id"], one_round["parent_id"], drafted["parent_id"]] == [
        "",
        generate["span_id"],
        decoded["span_id"],
        one_round["span_id"],
    ]
    assert [s["service"] for s in (generate, decoded, drafted)] == [
        "paceline-router",
        "paceline-verify",
        "paceline-draft",
    ]
    assert drafted["instance"] == "paceline-draft-0"
    assert one_round["attributes"] == {
        names.ROUND_INDEX: 3,
        names.ROUND_DRAFT_S: 0.01,
        "flag": True,
        "list": [1, 2],
    }
    assert (generate["error"], decoded["error"]) == ("no room", None)
    assert (generate["kind"], decoded["kind"]) == ("server", "internal")
    assert abs(generate["end"] - generate["start"] - 1) < 1e-5
    assert abs(generate["start"] - time.time()) < 5, "monotonic measurements are shown as wall time"
    assert [s["name"] for s in collector.children(decoded)] == ["round"]


async def test_a_blocking_shutdown_on_the_event_loop_still_delivers():
    """The last spans arrive even when a service holds the loop while it sends them."""
    async with OtlpCollector() as collector:
        service = telemetry(collector, "s")
        service.record("last", service.new_trace(None), parent=None, start=0, end=1, attributes={})
        service.shutdown()
        assert [span["name"] for span in collector.spans] == ["last"]
        await asyncio.sleep(0)
