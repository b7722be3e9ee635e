"""One sequence as its caller sees it: from the request to its one answer, with its spans and its record."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline import codec
from paceline.engine import Runner
from paceline.records import RecordWriter
from paceline.telemetry.context import TraceContext
from paceline.telemetry.spans import Telemetry
from paceline.v1 import verify_pb2
from verify_service.decode_spec import decode_spec
from verify_service.engine import Engine
from verify_service.recording import Recording
from verify_service.sequence import Admitted, Event, Failed, Finished, Run, Sequence
from verify_service.spans import DecodeSpans


@dataclass(frozen=True, slots=True)
class Records:
    """Where requests are recorded, see ``recording``."""

    writer: RecordWriter
    verify_id: str
    token_ids: bool


@dataclass(frozen=True, slots=True)
class Calls:
    """What all calls share, and where they begin."""

    engine: Engine
    runner: Runner
    telemetry: Telemetry
    records: Records | None = None

    def begin(
        self,
        request: verify_pb2.DecodeRequest,
        caller: TraceContext | None,
        timeout_s: float | None,
        emit: Callable[[Event], None],
    ) -> "Call":
        """Hand the sequence to the engine, whose events ``emit`` takes on the event loop. ``end`` the call whatever happens.

        ``caller`` is the span that asks; ``timeout_s``: for so long somebody waits (None: for ever). Raises InvalidRequestError,
        PeerLostError (for another model) or CapacityError.
        """
        traced = caller is not None and caller.sampled and self.telemetry.enabled
        trace = self.telemetry.child(caller) if caller is not None and traced else None
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        spec = decode_spec(request, self.runner, trace, deadline=deadline)
        sequence = self.engine.submit(spec, emit)
        spans = DecodeSpans(self.telemetry, caller, spec, sequence.arrived)
        return Call(self.engine, sequence, spans, self._recording(sequence), caller)

    def _recording(self, sequence: Sequence) -> Recording | None:
        records = self.records
        if records is None:
            return None
        version, _ = self.engine.state().drafters.get(sequence.spec.plan.drafter, ("", False))
        return Recording(
            records.writer,
            records.verify_id,
            sequence,
            token_ids=records.token_ids,
            drafter_version=version,
        )


class Call:
    """See the module. Lives on the event loop."""

    def __init__(
        self,
        engine: Engine,
        sequence: Sequence,
        spans: DecodeSpans,
        recording: Recording | None,
        caller: TraceContext | None,
    ) -> None:
        self.over = False
        """The last response was given."""
        self.caller = caller
        self._engine = engine
        self._sequence = sequence
        self._spans = spans
        self._recording = recording

    def response(self, event: Event) -> verify_pb2.DecodeResponse:
        """What the caller is told of ``event``. Raises the error of a sequence that failed."""
        self._spans.see(event)
        if self._recording is not None:
            self._recording.see(event)
        self.over = isinstance(event, Finished | Failed)
        match event:
            case Admitted():
                return verify_pb2.DecodeResponse(
                    admitted=verify_pb2.DecodeAdmitted(
                        queue_s=event.queue_s, cached_tokens=event.cached_tokens
                    )
                )
            case Run():
                return verify_pb2.DecodeResponse(
                    run=verify_pb2.DecodeRun(
                        position=event.position,
                        token_ids=event.token_ids,
                        round=codec.round_to_pb(event.record) if event.record else None,
                    )
                )
            case Finished():
                return verify_pb2.DecodeResponse(
                    finished=verify_pb2.DecodeFinished(
                        finish_reason=codec.finish_to_pb(event.reason),
                        timings=codec.timings_to_pb(event.timings),
                        speculative=codec.stats_to_pb(event.stats),
                    )
                )
            case Failed(error):
                raise error

    def end(self) -> None:
        """Nobody waits any more: a sequence that is not over is given up."""
        now = time.monotonic()
        self._engine.cancel(self._sequence)
        self._spans.end(now)
        if self._recording is not None:
            self._recording.end(now)
