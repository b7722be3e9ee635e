"""The draft tier's part of a trace, as a collector sees it."""

from test_draft_link import FINGERPRINT, Peer, commit, count_up, opening

from draft_service.service import DraftService, serve
from paceline.config import DraftConfig, ServerConfig, TelemetryConfig
from paceline.telemetry import MAX_ROUND_SPANS, Telemetry, TraceContext, names, round_context
from paceline.testing.collector import OtlpCollector
from paceline.testing.scripted_drafter import ScriptedDrafter


async def test_each_round_has_one_draft_span_under_its_round():
    """Sampled rounds below the cap give one span each, child of the derived round span; others give none."""
    async with OtlpCollector() as collector:
        telemetry = Telemetry.setup(
            TelemetryConfig(otlp_endpoint=collector.endpoint),
            service_name=names.SERVICE_DRAFT,
            instance_id="draft-test",
        )
        service = DraftService(
            {"scripted": ScriptedDrafter(count_up)},
            draft_id="draft-test",
            tokenizer_fingerprint=FINGERPRINT,
            telemetry=telemetry,
        )
        server = serve(service, DraftConfig(server=ServerConfig(port=0)))
        await server.start()
        verify = Peer(server.address)
        await verify.hello()
        decode = TraceContext(trace_id=7, span_id=8, sampled=True)
        silent = TraceContext(trace_id=9, span_id=10, sampled=False)
        sampled, unsampled, broken = opening(1), opening(2), opening(3)
        sampled.traceparent, unsampled.traceparent, broken.traceparent = (
            decode.to_traceparent(),
            silent.to_traceparent(),
            "00-zz",
        )
        await verify.send(sampled, unsampled, broken)
        await verify.answers(3)
        await verify.send(commit(1, 3, [4], round_index=1), commit(2, 3, [4], round_index=1))
        await verify.answers(2)
        await verify.send(commit(1, 4, [5], round_index=MAX_ROUND_SPANS))
        await verify.answers(1)
        await verify.cut()
        await server.stop(1.0)  # sends what is left
        spans = collector.spans
    assert [(span["service"], span["name"]) for span in spans] == [("paceline-draft", "draft")] * 2
    assert {span["parent_id"] for span in spans} == {
        f"{round_context(decode, index).span_id:016x}" for index in (0, 1)
    }
    assert {span["trace_id"] for span in spans} == {f"{7:032x}"}
    assert len({span["span_id"] for span in spans}) == 2
    for span in spans:
        attributes = span["attributes"]
        assert attributes[names.ROUND_DRAFTER] == "scripted"
        assert attributes[names.DRAFT_TOKENS] == 2
        spent = attributes[names.DRAFT_QUEUE_S] + attributes[names.DRAFT_S]
        assert spent <= span["end"] - span["start"] + 1e-6
