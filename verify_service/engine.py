"""The engine thread: takes what arrives, admits, steps, tells. One owner of model, memory, sequences and drafts."""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.config import VerifyConfig
from paceline.engine import Runner
from paceline.errors import CapacityError, DeadlineError, EngineError, PacelineError, PeerLostError
from paceline.link import MAX_LEVEL, Fate, Lookahead
from paceline.sampling import native_contenders
from paceline.types import Mode
from verify_service.beside import Beside
from verify_service.block import Block
from verify_service.costs import CostTable
from verify_service.drafts import Drafts
from verify_service.facts import Decision
from verify_service.handover import Handover
from verify_service.link_port import LinkPort, Offer, Proposal, Refusal
from verify_service.meter import Meter
from verify_service.scheduler import Scheduler, Work
from verify_service.sequence import Admitted, DecodeSpec, Event, Failed, Finished, Sequence, State
from verify_service.steering import Steering
from verify_service.step import Outcome, run_step, take_blocks, tell_drafters

log = logging.getLogger(__name__)

_Command = Callable[[], None]
_LONGEST_SLEEP_S = 60.0  # a queue cannot wait for as long as settings may say


@dataclass(frozen=True, slots=True)
class LinkState:
    """A draft replica that was ever connected, for those who watch."""

    endpoint: str
    up: bool
    breaker_open: bool
    connections: int
    openings: int


@dataclass(frozen=True, slots=True)
class EngineState:
    """A glance at the engine, from any thread."""

    num_running: int
    num_waiting: int
    kv_slots: int
    kv_slots_free: int
    prefix_tokens_asked: int
    prefix_tokens_reused: int
    preemptions: int
    kv_tokens: int
    drafters: dict[str, tuple[str, bool]]  # name -> version, available


class Engine:
    """Runs until ``stop``. Public methods may be called from the event loop's thread; events arrive there too."""

    def __init__(
        self,
        runner: Runner,
        config: VerifyConfig,
        loop: asyncio.AbstractEventLoop,
        costs: CostTable | None = None,
        beside: Beside | None = None,
        meter: Meter | None = None,
    ) -> None:
        """``meter`` counts; None: nothing is counted."""
        native_contenders()  # compiled now, not at the first draw
        self._runner = runner
        self.meter = meter
        self.costs = costs
        self._loop = loop
        self._handover = Handover(loop, _emit)
        self._max_queue = config.max_queue
        self._max_context = runner.info.max_context
        self._drafts = Drafts(
            vocab_size=runner.info.vocab_size,
            wait_s=config.draft_wait_s,
            least_wait_s=config.draft_wait_least_s,
            clock=time.monotonic,
            fixed_lookahead=_fixed_lookahead(config),
            beside=beside,
        )
        self._steering = Steering(costs, adaptive=config.depth == "adaptive", log_dir=config.depth_log)
        self._scheduler = Scheduler(runner.kv, self._drafts, prefill_chunk=config.prefill_chunk)
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self._connections: dict[str, int] = {}  # by endpoint, since the start
        self._openings: dict[str, int] = {}  # of breakers, since the link came up
        self._lock = threading.Lock()
        self._num_posted = 0  # submitted, not yet with the scheduler; under the lock
        self._stopping = False
        self._events: list[tuple[Sequence, Event]] = []
        self._progress_at = time.monotonic()
        self._work: list[Work] = []  # of the last turn: while there is some, the next turn does not sleep
        self._wake_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._handover.open()
        self._thread.start()

    def stop(self) -> None:
        """Fail what is in flight, and end the thread."""
        self._post(self._stop)
        self._thread.join()

    def submit(self, spec: DecodeSpec, emit: Callable[[Event], None]) -> Sequence:
        """Queue a sequence; ``emit`` is called on the event loop. Raises CapacityError when the queue is full."""
        with self._lock:
            free = self._runner.kv.num_slots - self._scheduler.num_running
            queued = self._num_posted + self._scheduler.num_waiting
            if not queued and not self._scheduler.num_running:
                self._progress_at = time.monotonic()  # idle until now: that is no stall
            if queued >= self._max_queue + free:
                raise CapacityError(
                    f"{queued} sequences wait for memory already, at most {self._max_queue} may", 1.0
                )
            self._num_posted += 1
        sequence = Sequence(next(self._ids), spec, emit, arrived=time.monotonic())
        self._post(lambda: self._add(sequence))
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Nobody waits for the sequence any more; harmless when it ended."""
        self._post(lambda: self._cancelled(sequence))

    def link_up(self, port: LinkPort, drafters: dict[str, Offer]) -> None:
        """See ``Drafts.link_up``."""
        self._connections[port.endpoint] = self._connections.get(port.endpoint, 0) + 1
        self._post(lambda: self._drafts.link_up(port, drafters))

    def link_down(self, endpoint: str) -> None:
        """See ``Drafts.link_down``."""
        self._post(lambda: self._drafts.link_down(endpoint))

    def proposed(self, endpoint: str, proposals: list[Proposal], at: float) -> None:
        """See ``Drafts.proposed``."""
        self._post(lambda: self._drafts.proposed(endpoint, proposals, at))

    def refused(self, endpoint: str, sequence_id: int, epoch: int, reason: Refusal) -> None:
        """See ``Drafts.refused``."""
        self._post(lambda: self._drafts.refused(endpoint, sequence_id, epoch, reason))

    def step_s(self, sequences: int, rows: int) -> float:
        """What a step takes now, by all that was seen."""
        return self._steering.now_s(sequences, rows)

    def state(self) -> EngineState:
        """A glance; the numbers may be a step old."""
        available = self._drafts.available()
        return EngineState(
            num_running=self._scheduler.num_running,
            num_waiting=self._num_posted + self._scheduler.num_waiting,
            kv_slots=self._runner.kv.num_slots,
            kv_slots_free=self._runner.kv.num_slots - self._scheduler.num_running,
            prefix_tokens_asked=self._scheduler.slots.tokens_asked,
            prefix_tokens_reused=self._scheduler.slots.tokens_reused,
            preemptions=self._scheduler.num_preempted,
            kv_tokens=self._runner.kv.num_tokens,
            drafters={
                name: (version, name in available)
                for name, version in sorted(dict(self._drafts.known).items())
            },
        )

    def links(self) -> list[LinkState]:
        """Draft replicas that were ever connected."""
        up = self._drafts.connected()
        for endpoint, link in up.items():
            self._openings[endpoint] = link.breaker.times_opened
        return [
            LinkState(
                endpoint,
                endpoint in up,
                endpoint in up and up[endpoint].breaker.is_open,
                connections,
                self._openings.get(endpoint, 0),
            )
            for endpoint, connections in list(self._connections.items())
        ]

    def fates(self) -> dict[Fate, int]:
        """Proposals by what became of them."""
        return dict(self._drafts.fates)

    def stalled_s(self) -> float:
        """For how long work has waited without any step finishing; 0 when idle."""
        if not (self._scheduler.num_running or self._scheduler.num_waiting or self._num_posted):
            return 0.0
        return time.monotonic() - self._progress_at

    # --- engine thread ----------------------------------------------------------------------------------------

    def _post(self, command: _Command) -> None:
        self._inbox.put(command)

    def _run(self) -> None:
        """Turn after turn. A turn that raises is our own fault: all in flight are told so, and the engine goes on."""
        while not self._stopping:
            try:
                self._turn()
                self._drafts.flush()
            except Exception as error:
                log.exception("engine turn failed")
                self._fail_all(EngineError(f"the engine failed: {type(error).__name__}"))
            if not self._work:  # else the next turn's step delivers
                self._deliver()
        self._deliver()
        self._handover.close()

    def _turn(self) -> None:
        self._take_inbox(block=not self._work, until=self._wake_at)
        self._drop_expired()
        self._admit()
        if self.meter is not None and self._scheduler.num_running > self.meter.peak_running:
            self.meter.peak_running = self._scheduler.num_running
        self._work, self._wake_at = self._scheduler.next(time.monotonic())
        if self._work:
            self._step(self._work)

    def _take_inbox(self, *, block: bool, until: float | None) -> None:
        """Run the commands that arrived; when there is no work, sleep for one, until the given time at most."""
        if block:
            while self._inbox.empty() and self._drafts.beside.tidy():
                pass
            try:
                timeout = None if until is None else min(max(0.0, until - time.monotonic()), _LONGEST_SLEEP_S)
                command = self._inbox.get(timeout=timeout)
            except queue.Empty:
                return
            self._command(command)
        while True:
            try:
                self._command(self._inbox.get_nowait())
            except queue.Empty:
                return

    def _command(self, command: _Command) -> None:
        try:
            command()
        except Exception:
            # A command concerns one sequence or one link; the engine lives on whatever a peer has sent.
            log.exception("engine command failed")

    def _add(self, sequence: Sequence) -> None:
        with self._lock:
            self._num_posted -= 1
        self._scheduler.add(sequence)

    def _drop_expired(self) -> None:
        """Before memory or a forward is spent on them; the call's own cancelling may still be on its way."""
        for sequence in self._scheduler.expired(time.monotonic()):
            where = (
                f"after {sequence.num_generated} tokens"
                if sequence.admitted
                else "while it waited for memory"
            )
            self._events.append((sequence, Failed(DeadlineError(f"the caller's deadline passed {where}"))))
            self._count_end("deadline")
            self._end(sequence)

    def _admit(self) -> None:
        for sequence in self._scheduler.admit():
            if sequence.admitted:
                continue  # back after giving way
            sequence.admitted = time.monotonic()
            queue_s = sequence.admitted - sequence.arrived
            self._events.append((sequence, Admitted(sequence.admitted, queue_s, sequence.num_cached)))

    def _step(self, work: list[Work]) -> None:
        started = time.monotonic()
        blocks = take_blocks(work, self._drafts, self._max_context)
        blocks = self._steering.cut(work, blocks, started)
        self._deliver()  # of the step before: messages are written while this one is in its forward
        outcomes = self._try_step(work, blocks)
        if outcomes:
            tell_drafters(outcomes, self._drafts, self._decide(outcomes))
        for outcome in outcomes:
            self._report(outcome)
        self._progress_at = time.monotonic()
        self._scheduler.stepped(work, self._progress_at, self._progress_at - started)
        if not any(item.is_prefill for item in work):
            self._drafts.stepped(self._progress_at - started)
        if self.meter is not None:
            self.meter.stepped(work, outcomes, self._progress_at - started)

    def _decide(self, outcomes: list[Outcome]) -> Mapping[int, Decision]:
        """How many tokens to draft next."""
        decoding, plain = self._scheduler.num_decoding()
        over = [outcome for outcome in outcomes if outcome.verdict.finish is not None]
        plain -= sum(outcome.sequence.spec.plan.mode is Mode.PLAIN for outcome in over)
        return self._steering.decide(outcomes, self._drafts, self._max_context, (decoding - len(over), plain))

    def _try_step(self, work: list[Work], blocks: list[Block | None]) -> list[Outcome]:
        """One step for all; if it fails, one for each, so that only the culprit ends."""
        lengths = [self._runner.kv.length(item.sequence.slot or 0) for item in work]
        try:
            return run_step(self._runner, work, blocks, self._max_context, self._steering.step)
        except Exception as error:
            for item, length in zip(work, lengths, strict=True):
                assert item.sequence.slot is not None
                self._runner.kv.truncate(item.sequence.slot, length)
            if len(work) == 1:
                self._fail(work[0].sequence, error)
                return []
        return [
            outcome
            for item, block in zip(work, blocks, strict=True)
            for outcome in self._try_step([item], [block])
        ]

    def _report(self, outcome: Outcome) -> None:
        sequence = outcome.sequence
        self._events.append((sequence, outcome.run))
        if outcome.verdict.finish is not None:
            finished = Finished(outcome.verdict.finish, sequence.timings(), sequence.stats)
            self._events.append((sequence, finished))
            self._count_end(outcome.verdict.finish.value)
            self._scheduler.remove(sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if not isinstance(error, PacelineError):
            failure = EngineError(f"the step failed: {type(error).__name__}")
            failure.__cause__ = error  # the server's log shows it, the client sees the message above
            error = failure
        self._events.append((sequence, Failed(error)))
        self._count_end("failed")
        self._end(sequence, keep=False)

    def _cancelled(self, sequence: Sequence) -> None:
        if sequence.state is not State.ENDED:
            self._count_end("cancelled")
        self._end(sequence)

    def _count_end(self, how: str) -> None:
        if self.meter is not None:
            self.meter.ended(how)

    def _end(self, sequence: Sequence, *, keep: bool = True) -> None:
        self._steering.forget(sequence)
        self._scheduler.remove(sequence, keep=keep)

    def _stop(self) -> None:
        self._stopping = True
        self._fail_all(PeerLostError("this verify replica is stopping"))
        self._steering.close()
        self._scheduler.slots.clear()

    def _fail_all(self, error: PacelineError) -> None:
        self._work, self._wake_at = [], None
        for sequence in list(self._scheduler.sequences()):
            self._events.append((sequence, Failed(error)))
            self._count_end("failed")
            self._end(sequence, keep=False)

    def _deliver(self) -> None:
        """Hand all events over in one go."""
        if not self._events:
            return
        events, self._events = self._events, []
        self._handover.give(events)


def _fixed_lookahead(config: VerifyConfig) -> Lookahead | None:
    """What the settings fix; None: by cost."""
    if config.draft_level == "auto":
        return None
    level = int(config.draft_level)
    return Lookahead(level, config.draft_fan if level == MAX_LEVEL else 0)


def _emit(events: list[tuple[Sequence, Event]]) -> None:
    for sequence, event in events:
        sequence.emit(event)
