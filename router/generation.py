"""One request from its arrival to its one answer (I5)."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import grpc
from google.rpc import code_pb2  # type: ignore[import-untyped]

from paceline import codec
from paceline.errors import DeadlineError, PacelineError
from paceline.serving.status import status_from_error
from paceline.telemetry import names
from paceline.telemetry.context import bind_trace, extract
from paceline.types import FinishReason, Mode, Plan, Timings
from paceline.v1 import common_pb2, router_pb2, verify_pb2
from router.accept import Accepted, RouterParts, accept
from router.decode import Event, ResumableDecode
from router.journal import Journal
from router.recent import MAX_ROUNDS
from router.record import record
from router.spans import Outcome, generate_attributes, plan_attributes
from router.tally import Tally
from router.text import OutputText, TextRun

_LAST_WORDS_S = 1.0
"""How long a complete output waits for the verify tier's own account of it."""

Context = grpc.aio.ServicerContext[router_pb2.GenerateRequest, router_pb2.GenerateResponse]


class Generation:
    """State of one request. ``run`` it once, in the task of its handler."""

    def __init__(self, parts: RouterParts, request: router_pb2.GenerateRequest, context: Context) -> None:
        self._parts = parts
        self._request = request
        self._context = context
        self._arrived_at = time.monotonic()
        self._caller = extract(context.invocation_metadata())
        self._trace = parts.telemetry.new_trace(self._caller)
        self._tally = Tally(self._arrived_at, keep_rounds=MAX_ROUNDS)
        self._accepted: Accepted | None = None
        self._decode: ResumableDecode | None = None
        self._delivered = 0
        self._cached = 0
        self._closed = False
        self._waits = False

    async def run(self) -> None:
        """Stream the answer. Raises the typed error that is the answer instead."""
        if self._trace is not None:
            bind_trace(self._trace)
        self._wait(waits=True)
        outcome = Outcome.failed("INTERNAL")
        try:
            accepted = await self._accept()
            reason, matched_stop = await self._stream(accepted)
            # Before the last write: whoever has read it finds the request remembered, and a client that hangs up on
            # reading it has been answered all the same.
            timings = self._close(Outcome(reason.value))
            await self._context.write(self._finished(accepted, reason, matched_stop, timings))
        except DeadlineError as error:
            outcome = Outcome.failed("DEADLINE_EXCEEDED")
            await self._context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except PacelineError as error:
            outcome = Outcome.failed(code_pb2.Code.Name(status_from_error(error).code))
            raise
        except (asyncio.CancelledError, grpc.aio.InternalError):
            # InternalError: a write on a call that is over; the cancel of this task is on its way.
            outcome = Outcome.failed(self._why_cancelled())
            raise
        finally:
            if not self._closed:
                self._close(outcome)

    async def _accept(self) -> Accepted:
        parts = self._parts
        facts = await parts.replicas.facts()
        started_at = time.monotonic()
        self._accepted = accepted = await accept(parts, self._request, facts)
        if self._trace is not None:
            parts.telemetry.record(
                names.SPAN_PLAN,
                parts.telemetry.child(self._trace),
                parent=self._trace,
                start=started_at,
                end=time.monotonic(),
                attributes=plan_attributes(accepted),
            )
        return accepted

    # --- decoding ---

    async def _stream(self, accepted: Accepted) -> tuple[FinishReason, str | None]:
        """Pass on what is committed, as text, up to the end of the output; why it ended, and the stop string."""
        text = OutputText(
            self._parts.tokenizer.decode_stream(),
            stops=self._request.stop,
            stop_token_ids=accepted.stop_token_ids,
            max_tokens=accepted.max_tokens,
        )
        self._decode = decode = self._open(accepted)
        end: TextRun | None = None
        async with aclosing(decode.events()) as events:
            async for event in events:
                match event:
                    case verify_pb2.DecodeAdmitted():
                        self._wait(waits=False)
                        self._tally.admitted(event.queue_s, time.monotonic())
                        if decode.resumed == 0:
                            self._cached = event.cached_tokens
                            await self._context.write(self._started(accepted))
                    case verify_pb2.DecodeRun():
                        run = await self._deliver(event, text)
                        if run.end is not None:
                            end = run
                            decode.complete = True
                            break
                    case verify_pb2.DecodeFinished():
                        self._tally.finished(codec.timings_from_pb(event.timings))
                        end = text.finish(codec.finish_from_pb(event.finish_reason))
                        if end.text:
                            await self._context.write(_chunk(end.text, [], self._delivered, None))
            if decode.complete and end is not None and end.matched_stop is None:
                await self._last_words(events)
        assert end is not None, "events end with a finished unless complete is set"
        assert end.end is not None, "only a run that ends the output is kept"
        return end.end, end.matched_stop

    def _open(self, accepted: Accepted) -> ResumableDecode:
        request = verify_pb2.DecodeRequest(
            request_id=accepted.request_id,
            prompt_ids=accepted.prompt_ids,
            sampling=codec.sampling_to_pb(accepted.sampling),
            max_tokens=accepted.max_tokens,
            stop_token_ids=sorted(accepted.stop_token_ids),
            plan=_plan(accepted, accepted.plan),
            tenant=accepted.tenant,
            priority=accepted.priority,
            identity=accepted.facts.identity,
        )
        return ResumableDecode(
            self._parts.replicas,
            request,
            Journal(len(accepted.prompt_ids)),
            identity=accepted.facts.identity,
            resume_s=self._parts.config.resume_s,
            time_remaining=self._context.time_remaining,
            # A router that makes no spans hands its caller's trace on.
            traceparent=span.to_traceparent() if (span := self._trace or self._caller) else "",
        )

    async def _deliver(self, event: verify_pb2.DecodeRun, text: OutputText) -> TextRun:
        run = text.push(event.token_ids)
        record = codec.round_from_pb(event.round) if event.HasField("round") else None
        index = self._tally.run(record, run.num_ids, time.monotonic())
        position = self._delivered
        self._delivered += run.num_ids
        await self._context.write(_chunk(run.text, event.token_ids[: run.num_ids], position, index))
        return run

    async def _last_words(self, events: AsyncGenerator[Event, None]) -> None:
        """The output is complete: take the verify tier's account of its times if it comes at once."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                event = await anext(events, None)
        except TimeoutError:
            return
        if isinstance(event, verify_pb2.DecodeFinished):
            self._tally.finished(codec.timings_from_pb(event.timings))

    # --- what is said ---

    def _started(self, accepted: Accepted) -> router_pb2.GenerateResponse:
        return router_pb2.GenerateResponse(
            started=router_pb2.GenerateStarted(
                request_id=accepted.request_id,
                task_type=accepted.task_type,
                plan=_plan(accepted, accepted.plan),
                prompt_tokens=len(accepted.prompt_ids),
                seed=accepted.sampling.seed,
                trace_id=self._trace_id,
                decision=_decision(accepted),
            )
        )

    def _finished(
        self, accepted: Accepted, reason: FinishReason, matched_stop: str | None, timings: Timings
    ) -> router_pb2.GenerateResponse:
        return router_pb2.GenerateResponse(
            finished=router_pb2.GenerateFinished(
                finish_reason=codec.finish_to_pb(reason),
                matched_stop=matched_stop,
                usage=self._usage(accepted),
                timings=codec.timings_to_pb(timings),
                speculative=codec.stats_to_pb(self._tally.stats),
                plan=_plan(accepted, self._carried_out(accepted.plan)),
                numerics=accepted.facts.info.numerics,
                resumed=self._decode.resumed if self._decode else 0,
            )
        )

    @property
    def _trace_id(self) -> str:
        return self._trace.trace_id_hex if self._trace else ""

    def _usage(self, accepted: Accepted) -> router_pb2.Usage:
        return router_pb2.Usage(
            prompt_tokens=len(accepted.prompt_ids),
            completion_tokens=self._delivered,
            cached_prompt_tokens=self._cached,
        )

    def _carried_out(self, plan: Plan) -> Plan:
        """The plan, with a word where nothing of its speculation came to be."""
        stats = self._tally.stats
        if plan.mode is Mode.SPECULATIVE and stats.num_rounds and not stats.num_spec_steps:
            return replace(plan, reason=f"{plan.reason}; no block was verified, so decoding was plain")
        return plan

    def _wait(self, *, waits: bool) -> None:
        """For the gauge of requests that no verify replica has taken up."""
        if self._parts.meter is not None and waits is not self._waits:
            self._waits = waits
            self._parts.meter.num_waiting += 1 if waits else -1

    def _why_cancelled(self) -> str:
        remaining = self._context.time_remaining()
        return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= 0 else "CANCELLED"

    def _close(self, outcome: Outcome) -> Timings:
        """Record the request's span, and keep its summary if it was ever accepted; gives its times."""
        self._closed = True
        now = time.monotonic()
        timings, stats = self._tally.timings(now), self._tally.stats
        accepted = self._accepted
        self._wait(waits=False)
        if self._parts.meter is not None:
            self._parts.meter.closed(
                accepted,
                outcome,
                self._tally,
                timings,
                output_tokens=self._delivered,
                resumed=self._decode.resumed if self._decode else 0,
                trace_id=self._trace_id,
            )
        if self._trace is not None:
            self._parts.telemetry.record(
                names.SPAN_GENERATE,
                self._trace,
                parent=self._caller,
                start=self._arrived_at,
                end=now,
                attributes=generate_attributes(
                    accepted,
                    outcome,
                    completion_tokens=self._delivered,
                    timings=timings,
                    stats=stats,
                    resumed=self._decode.resumed if self._decode else 0,
                ),
                error=outcome.error,
                kind="server",
            )
        if accepted is not None:
            self._parts.recent.add(
                router_pb2.RequestSummary(
                    request_id=accepted.request_id,
                    trace_id=self._trace_id,
                    task_type=accepted.task_type,
                    plan=_plan(accepted, self._carried_out(accepted.plan)),
                    outcome=outcome.word,
                    usage=self._usage(accepted),
                    timings=codec.timings_to_pb(timings),
                    speculative=codec.stats_to_pb(stats),
                    rounds=[codec.round_to_pb(record) for record in self._tally.rounds],
                    rounds_elided=self._tally.rounds_elided,
                    decision=_decision(accepted),
                    tenant=accepted.tenant,
                )
            )
            record(
                self._parts.memory,
                accepted,
                self._tally,
                timings,
                output_tokens=self._delivered,
                failed=outcome.error is not None,
            )
        return timings


def _plan(accepted: Accepted, plan: Plan) -> common_pb2.Plan:
    """The plan with the version of its drafter, as far as the verify tier has heard of it."""
    drafter = accepted.facts.drafters.get(plan.drafter)
    return codec.plan_to_pb(replace(plan, drafter_version=drafter.version if drafter is not None else ""))


def _decision(accepted: Accepted) -> router_pb2.Decision:
    return router_pb2.Decision(
        arm=accepted.decision.arm.value,
        task_origin=accepted.task.origin,
        task_confidence=accepted.task.confidence,
        considered=accepted.decision.considered,
    )


def _chunk(
    text: str, token_ids: Sequence[int], position: int, round_index: int | None
) -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(
        chunk=router_pb2.GenerateChunk(text=text, token_ids=token_ids, position=position, round=round_index)
    )
