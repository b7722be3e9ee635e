"""Spans over the wire: what a real OTLP collector sees of the tiers."""

import asyncio
import socket
import time

import pytest

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


# --- collectors that are not there ------------------------------------------------------------------------------------


def record_many(service, num=1500):
    for _ in range(num):
        service.record("x", service.new_trace(None), parent=None, start=0, end=1, attributes={})


async def test_a_collector_that_is_away_costs_one_warning(caplog):
    """Recording never blocks or raises, shutdown is quick, and one line says what happens to the spans."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        config = TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}")
        service = Telemetry.setup(config, service_name="s", instance_id="i")
        begin = time.monotonic()
        record_many(service)
        await asyncio.sleep(0.8)
        record_many(service)
        await asyncio.to_thread(service.shutdown)
        assert (
            time.monotonic() - begin < 8
        )  # 2.8 s and what the machine adds; by default OTLP tries for a minute
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.endpoint == config.otlp_endpoint


async def test_a_collector_that_never_answers_holds_a_shutdown_for_two_seconds_at_most(caplog):
    """Connections are accepted and nothing comes back: the worst kind."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        config = TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        service = Telemetry.setup(config, service_name="s", instance_id="i")
        record_many(service)
        begin = time.monotonic()
        await asyncio.to_thread(service.shutdown)
        assert time.monotonic() - begin < 7  # 2 s and what the machine adds
    assert len(caplog.records) == 1


async def test_a_collector_that_comes_back_gets_spans_again(monkeypatch, caplog):
    """The service asks again every few seconds; the spans in between are lost and counted."""
    monkeypatch.setattr("paceline.telemetry.export.AWAY_S", 0.2)
    async with OtlpCollector() as first:
        port = int(first.endpoint.rpartition(":")[2])
        service = telemetry(first, "s")
        record_many(service, 1)
        await first.wait_for(lambda spans: len(spans) == 1)
    record_many(service, 1)
    async with asyncio.timeout(5):
        while not caplog.records:
            await asyncio.sleep(0.05)
    async with OtlpCollector(port) as second:
        async with asyncio.timeout(10):
            while not second.spans:
                record_many(service, 1)
                await asyncio.sleep(0.1)
        await asyncio.to_thread(service.shutdown)
    assert len(caplog.records) == 1


async def test_a_burst_beyond_the_queue_loses_spans_and_nothing_else(caplog):
    """40,000 spans at once: memory stays bounded, the newest arrive, the log stays almost silent."""
    async with OtlpCollector() as collector:
        service = telemetry(collector, "s")
        context = service.new_trace(None)
        for index in range(40_000):
            service.record("x", context, parent=None, start=0, end=1, attributes={"i": index})
        await asyncio.to_thread(service.shutdown)
        indices = [span["attributes"]["i"] for span in collector.spans]
    assert len(indices) == len(set(indices)) >= 10_000
    assert len(caplog.records) <= 2


async def test_wait_for_says_what_it_has_seen():
    """A test that waits in vain fails with the spans that did come."""
    async with OtlpCollector() as collector:
        service = telemetry(collector, "svc")
        record_many(service, 1)
        await asyncio.to_thread(service.shutdown)
        with pytest.raises(AssertionError, match="svc/x"):
            await collector.wait_for(lambda spans: False, timeout_s=0.1)
