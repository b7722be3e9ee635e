"""One request's decoding over as many verify replicas as it takes: the client sees no gap and no repeat (I7).

When the stream breaks, the journal's tokens are sent as ``committed_ids`` to another replica, or to the same one once it
is back; by I2 it goes on with exactly the tokens that the lost one would have given.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

from paceline.errors import CapacityError, EngineError, PacelineError, PeerLostError
from paceline.v1 import verify_pb2
from router.journal import Journal
from router.replicas import Replica, Replicas

MAX_FRUITLESS = 3
"""Admissions in a row that end without a token before the request is given up: it may be what kills the replicas."""
_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0

Event = verify_pb2.DecodeAdmitted | verify_pb2.DecodeRun | verify_pb2.DecodeFinished


class ResumableDecode:
    """The events of one request. Owned by it; iterate ``events`` once."""

    def __init__(
        self,
        replicas: Replicas,
        request: verify_pb2.DecodeRequest,
        journal: Journal,
        *,
        identity: tuple[str, ...],
        resume_s: float,
        time_remaining: Callable[[], float | None],
        traceparent: str = "",
    ) -> None:
        """``request`` without committed tokens; ``time_remaining`` gives seconds, None without a deadline."""
        self.resumed = 0
        """Times the request went on elsewhere, or where it had been before."""
        self.complete = False
        """Set by the reader once the output is complete: a break after that is not mended."""
        self._replicas = replicas
        self._request = request
        self._journal = journal
        self._identity = identity
        self._resume_s = resume_s
        self._time_remaining = time_remaining
        self._traceparent = traceparent
        self._admissions = 0
        self._fruitless = 0
        self._tried: set[Replica] = set()
        self._give_up_at = 0.0  # of the current search
        self._pause_s = _PAUSE_S

    async def events(self) -> AsyncGenerator[Event, None]:
        """One admitted for each replica that took the request, runs (journalled already), one finished.

        Ends without a finished only when ``complete`` is set. Raises the typed error that ended the request.
        Closing it cancels the call.
        """
        failure: PacelineError | None = None
        while True:
            replica = await self._next_replica(failure)
            admitted, known = False, len(self._journal)
            with replica.working():
                call = replica.decodes.call(
                    self._continued(), timeout_s=self._time_remaining(), traceparent=self._traceparent
                )
                try:
                    while True:
                        event = _event(await call.read())
                        match event:
                            case verify_pb2.DecodeAdmitted():
                                admitted = True
                                self._note_admission()
                            case verify_pb2.DecodeRun():
                                self._journal.append(event.position, event.token_ids)
                                self._note_progress()
                        yield event
                        if isinstance(event, verify_pb2.DecodeFinished):
                            return
                except PacelineError as error:
                    failure = error
                finally:
                    call.cancel()  # does nothing once the call is over
            if self.complete:
                return
            self._note_failure(replica, failure, fruitless=admitted and len(self._journal) == known)

    def _continued(self) -> verify_pb2.DecodeRequest:
        request = verify_pb2.DecodeRequest()
        request.CopyFrom(self._request)
        request.committed_ids.extend(self._journal.token_ids)
        return request

    async def _next_replica(self, failure: PacelineError | None) -> Replica:
        """Where to try next. Before the first admission every replica is tried once; after it, until time is over."""
        resuming = self._admissions > 0
        if resuming:
            pause_s = failure.retry_after_s if isinstance(failure, CapacityError) else self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            await asyncio.sleep(min(pause_s, max(0.0, self._give_up_at - _now())))
            if _now() >= self._give_up_at and failure is not None:
                raise failure
        request = self._request
        try:
            return await self._replicas.pick(
                self._identity,
                min_context=len(request.prompt_ids) + request.max_tokens,
                excluding=self._tried,
                wait_s=max(0.0, self._give_up_at - _now()) if resuming else 0.0,
            )
        except PeerLostError as nobody:
            raise failure or nobody from nobody

    def _note_admission(self) -> None:
        if self._admissions:
            self.resumed += 1
        self._admissions += 1
        self._tried.clear()

    def _note_progress(self) -> None:
        self._fruitless = 0
        self._give_up_at = 0.0
        self._pause_s = _PAUSE_S

    def _note_failure(self, replica: Replica, failure: PacelineError, *, fruitless: bool) -> None:
        """Decide whether ``failure`` can be mended; raises it where not."""
        if isinstance(failure, PeerLostError):
            self._replicas.lost(replica, str(failure))
        elif not isinstance(failure, CapacityError):
            raise failure
        if not self._admissions:
            self._tried.add(replica)
            return
        if fruitless:
            self._fruitless += 1
            if self._fruitless >= MAX_FRUITLESS:
                raise PeerLostError(
                    f"given up: {self._fruitless} replicas in a row were lost before a token ({failure})"
                )
        self._give_up_at = self._give_up_at or _now() + self._resume_s


def _event(message: verify_pb2.DecodeResponse) -> Event:
    match message.WhichOneof("event"):
        case "admitted":
            return message.admitted
        case "run":
            return message.run
        case "finished":
            return message.finished
    raise EngineError("the verify replica sent an event that this router does not know")


def _now() -> float:
    return asyncio.get_running_loop().time()
