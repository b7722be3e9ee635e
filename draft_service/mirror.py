"""The sequences of one link as the verifier last confirmed them: which entries count, and what a refusal leaves.

Every entry is judged by the link's rules first and looked at second, so an entry that speaks of something over is
stale however broken it is, and a broken one costs exactly the sequence it names. The tokens themselves lie with the
worker that drafts from them. Event loop only.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from draft_service.news import Close, Deliver, Event, Extend, Open, Origin, Question
from draft_service.refusal import Refusal, RefusalReason
from draft_service.worker import DraftWorker
from paceline.link import MAX_FAN, MAX_LEVEL, NO_LOOKAHEAD, Fate, Lookahead, MirrorState, Stamp
from paceline.ranges import MAX_K
from paceline.telemetry.context import TraceContext
from paceline.types import Law, SamplingParams

MAX_CLOSED = 4096
"""Closed sequences remembered for each link. What is older cannot be on its way any more."""

_EPOCH_FAULT = "epoch is 0, epochs start at 1"


@dataclass(frozen=True, slots=True)
class Opening:
    """What an open entry says of its sequence, as it came."""

    drafter: str
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    decode: TraceContext | None
    scope: str = ""
    law: Law = Law.COUPLED


@dataclass(frozen=True, slots=True)
class Ask:
    """The question that comes with an entry, as it came; ``k`` = 0 asks nothing."""

    k: int
    round_index: int
    lookahead: Lookahead = NO_LOOKAHEAD


@dataclass(slots=True)
class Mirror:
    """One mirrored sequence under one epoch. ``handle`` names it to the worker and is never used again."""

    sequence_id: int
    epoch: int
    handle: int
    drafter: str
    worker: DraftWorker
    state: MirrorState
    decode: TraceContext | None


class LinkMirrors:
    """All sequences of one link. The methods give a refusal to send, or None."""

    def __init__(
        self,
        *,
        vocab_size: int,
        workers: Mapping[str, DraftWorker],
        handles: Iterator[int],
        deliver: Deliver,
        verify_id: str = "",
        fates: Counter[Fate],
    ) -> None:
        self._vocab_size = vocab_size
        self._workers = workers  # by the drafter's name
        self._handles = handles
        self._deliver = deliver
        self._verify_id = verify_id
        self._fates = fates
        self._open: dict[int, Mirror] = {}
        self._closed: OrderedDict[int, MirrorState] = OrderedDict()
        self._by_handle: dict[int, Mirror] = {}
        self._news: dict[DraftWorker, list[Event]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def by_handle(self, handle: int) -> Mirror | None:
        """The sequence that an answer speaks of, while it is mirrored."""
        return self._by_handle.get(handle)

    def open(
        self, sequence_id: int, epoch: int, opening: Opening, ask: Ask, arrived: float
    ) -> Refusal | None:
        """Mirror a sequence from now on; what was mirrored of it under an older epoch is dropped."""
        if epoch < 1:
            self._fates[Fate.MISMATCH] += 1
            return Refusal(sequence_id, epoch, RefusalReason.MALFORMED, _EPOCH_FAULT)
        state = self._state(sequence_id)
        fate = state.open(epoch, len(opening.token_ids))
        if fate is not Fate.APPLY:
            self._fates[fate] += 1
            return None
        self._drop(sequence_id)
        worker = self._workers.get(opening.drafter)
        if worker is None:
            offered = ", ".join(sorted(self._workers))
            words = f"no drafter {opening.drafter!r} here; there are: {offered}"
            return self._refuse(sequence_id, state, RefusalReason.UNKNOWN_DRAFTER, words)
        fault = self._fault(opening.token_ids, ask) or _prompt_fault(opening)
        if fault:
            return self._refuse(sequence_id, state, RefusalReason.MALFORMED, fault)
        self._closed.pop(sequence_id, None)
        mirror = Mirror(
            sequence_id, epoch, next(self._handles), opening.drafter, worker, state, opening.decode
        )
        self._open[sequence_id] = self._by_handle[mirror.handle] = mirror
        self._tell(
            mirror,
            Open(
                mirror.handle,
                opening.drafter,
                opening.token_ids,
                opening.prompt_len,
                opening.sampling,
                self._vocab_size,
                _question(ask, arrived),
                self._deliver,
                opening.scope,
                opening.law,
                Origin(self._verify_id, sequence_id, epoch),
            ),
        )
        return None

    def commit(self, stamp: Stamp, token_ids: list[int], ask: Ask, arrived: float) -> Refusal | None:
        """Move a mirror on. One that has lost touch is dropped: it is opened anew, or not at all."""
        if stamp.epoch < 1:
            self._fates[Fate.MISMATCH] += 1
            return Refusal(stamp.sequence_id, stamp.epoch, RefusalReason.MALFORMED, _EPOCH_FAULT)
        state = self._state(stamp.sequence_id)
        length = state.length
        fate = state.commit(stamp, len(token_ids))
        if fate is Fate.GAP:
            self._fates[fate] += 1
            state.close(stamp.epoch)
            words = f"commit at epoch {stamp.epoch}, base_len {stamp.base_len}; mirrored: {length} tokens"
            return self._refuse(stamp.sequence_id, state, RefusalReason.OUT_OF_SYNC, words)
        if fate is not Fate.APPLY:
            self._fates[fate] += 1
            return None
        fault = self._fault(token_ids, ask)
        if fault:
            return self._refuse(stamp.sequence_id, state, RefusalReason.MALFORMED, fault)
        mirror = self._open[stamp.sequence_id]
        self._tell(mirror, Extend(mirror.handle, token_ids, _question(ask, arrived)))
        return None

    def close(self, sequence_id: int, epoch: int) -> None:
        """Forget a sequence; only that it is closed is remembered, for a while."""
        state = self._state(sequence_id)
        fate = state.close(epoch)
        if fate is not Fate.APPLY:
            self._fates[fate] += 1
            return
        self._drop(sequence_id)
        self._remember_closed(sequence_id, state)

    def refused_by_worker(self, mirror: Mirror, reason: RefusalReason, message: str) -> Refusal:
        """The worker has dropped a sequence; commits on their way to it are stale now."""
        del self._by_handle[mirror.handle]
        del self._open[mirror.sequence_id]
        return self._refuse(mirror.sequence_id, mirror.state, reason, message)

    def flush(self) -> None:
        """Hand the news to the workers: those of one message together, so that they are one batch."""
        news, self._news = self._news, {}
        for worker, events in news.items():
            worker.post(events)

    def release(self) -> None:
        """The link is over: free everything."""
        for sequence_id in list(self._open):
            self._drop(sequence_id)
        self._closed.clear()
        self.flush()

    # --- inside -----------------------------------------------------------------------------------------------

    def _state(self, sequence_id: int) -> MirrorState:
        """What is known of a sequence; of a new one nothing, and nothing is kept until an entry applies."""
        mirror = self._open.get(sequence_id)
        if mirror is not None:
            return mirror.state
        return self._closed.get(sequence_id) or MirrorState()

    def _tell(self, mirror: Mirror, event: Event) -> None:
        self._news.setdefault(mirror.worker, []).append(event)

    def _drop(self, sequence_id: int) -> None:
        mirror = self._open.pop(sequence_id, None)
        if mirror is not None:
            del self._by_handle[mirror.handle]
            self._tell(mirror, Close(mirror.handle))

    def _refuse(self, sequence_id: int, state: MirrorState, reason: RefusalReason, message: str) -> Refusal:
        """Drop the sequence and remember it as closed, so that one fault gives one refusal."""
        self._drop(sequence_id)
        state.close(state.epoch)
        self._remember_closed(sequence_id, state)
        return Refusal(sequence_id, state.epoch, reason, message)

    def _remember_closed(self, sequence_id: int, state: MirrorState) -> None:
        self._closed[sequence_id] = state
        self._closed.move_to_end(sequence_id)
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)

    def _fault(self, token_ids: Sequence[int], ask: Ask) -> str:
        """What is wrong with an entry, in words; empty where nothing is."""
        if not token_ids:
            return "token_ids is empty: at least one token is needed"
        if max(token_ids) >= self._vocab_size:
            return f"token_ids holds {max(token_ids)}, the vocabulary ends at {self._vocab_size - 1}"
        if ask.k > MAX_K:
            return f"k is {ask.k}, at most {MAX_K} guesses may be asked for"
        if ask.lookahead.level > MAX_LEVEL or ask.lookahead.fan > MAX_FAN:
            return f"{ask.lookahead}: level is at most {MAX_LEVEL}, fan at most {MAX_FAN}"
        return ""


def _prompt_fault(opening: Opening) -> str:
    if not 1 <= opening.prompt_len <= len(opening.token_ids):
        return f"prompt_len is {opening.prompt_len}, expected 1 to {len(opening.token_ids)}"
    return ""


def _question(ask: Ask, arrived: float) -> Question | None:
    return Question(ask.k, ask.round_index, arrived, ask.lookahead) if ask.k else None
