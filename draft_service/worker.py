"""The thread on which drafters work: takes news of sequences, asks each drafter once for all that wait.

    event loop                              worker thread
    post([Open, Extend, Close ...]) --inbox--> apply to its own copy of the sequences
                                               propose for every sequence with an open question
    deliver(answers) <--------------------- Drafted | Refused, one list per link and batch

Only the newest question of a sequence is answered: a commit replaces the question before it. When no question is open,
the thread drafts ahead (``ahead``), one forward at a time. A worker that is stuck
keeps nobody else waiting; its inbox then holds no more than the tokens of the open sequences, because news of one
sequence are kept together and a close drops them.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from draft_service.ahead import Ahead, advance, fits
from draft_service.drafters.base import (
    AheadDrafter,
    Drafter,
    DraftRequest,
    Outcome,
    Pass,
    Sampled,
    tidy,
)
from draft_service.held import Batch, HeldSequence, taken, text_of
from draft_service.news import (
    Alone,
    Close,
    Drafted,
    Event,
    Extend,
    Open,
    Question,
    Refused,
)
from draft_service.outcomes import log_failure, proposed, words
from draft_service.refusal import RefusalReason
from draft_service.relay import Post, Relay
from draft_service.scoring import Text
from draft_service.self_scoring import Scorer
from paceline.errors import CapacityError

log = logging.getLogger(__name__)

# Bounds the memory of drafters without slots of their own (an n-gram index of 2,048 tokens takes about 1 MB).
MAX_SEQUENCES = 1024


class DraftWorker:
    """See the module. ``post``, ``start``, ``stop`` belong to the event loop; all the rest to the thread."""

    def __init__(
        self,
        name: str,
        drafters: Mapping[str, Drafter],
        *,
        slower: Post | None = None,
        scorer: Scorer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``slower`` takes news for the thread on which the slower halves of these drafters work.

        ``scorer`` works whenever ``may_score`` allows it and nobody asks; ``ended`` hears of each text that is over.
        """
        self.name = name
        self.may_score: Callable[[], bool] = lambda: not self._sequences
        self.ended: Callable[[Text | None], None] | None = None
        self._scorer = scorer
        self._relay = Relay(slower, self.post) if slower is not None else None
        self._drafters = dict(drafters)
        self._clock = clock
        self._wake = threading.Condition()
        self._inbox: dict[int, list[Event]] = {}
        self._stopping = False
        self._sequences: dict[int, HeldSequence] = {}
        self._asking: dict[int, None] = {}  # handles with a question, oldest first
        self._untidy: dict[str, None] = {}  # drafters that may have work of their own to do
        self._looking: dict[int, None] = {}  # handles for which there is something to draft ahead
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"draft-{name}", daemon=True)

    # --- event loop side --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, events: Sequence[Event]) -> None:
        """Hand over news; those of one call are seen together."""
        with self._wake:
            for event in events:
                waiting = self._inbox.setdefault(event.handle, [])
                if isinstance(event, Close):
                    unseen = bool(waiting) and isinstance(waiting[0], Open)
                    waiting.clear()
                    if unseen:
                        del self._inbox[event.handle]
                        continue
                waiting.append(event)
            self._wake.notify()

    def nudge(self) -> None:
        """There may be something to score; from any thread."""
        with self._wake:
            self._wake.notify()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current batch; False when it did not end in time (a drafter hangs)."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The drafters that work on this thread."""
        return tuple(self._drafters)

    @property
    def num_sequences(self) -> int:
        """Sequences that the thread holds now."""
        return len(self._sequences)

    def busy_s(self) -> float:
        """For how long the thread has been at its current step; 0 when it waits."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    # --- worker side ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            news = self._take()
            if news is None:
                return
            self._busy_since = self._clock()
            try:
                self._apply(news)
                for name in self._drafters:
                    self._draft(name)
                if not self._asking:
                    self._draft_ahead()
            except Exception as error:  # against every contract; the thread must live on
                self._refuse_all(news, error)
            self._busy_since = None

    def _refuse_all(self, news: Sequence[Event], error: Exception) -> None:
        """Where a turn broke off is not known: all sequences lose their drafter here, none of them its request."""
        log.error("a turn of the drafters' thread %s failed: %s", self.name, words(error))
        log.debug("where it failed", exc_info=error)
        deliver = {event.handle: event.deliver for event in news if isinstance(event, Open)}
        deliver |= {handle: sequence.opening.deliver for handle, sequence in self._sequences.items()}
        batch = Batch()
        for handle, send in deliver.items():
            self._forget(handle)
            batch.add(send, Refused(handle, RefusalReason.INTERNAL, words(error)))
        self._asking.clear()
        self._looking.clear()
        batch.send()

    def _take(self) -> list[Event] | None:
        """All news since the last time, closes first so that their room is there for the opens; None to end.

        While there are none the drafters tidy up, and texts are scored, a piece at a time, so that a question never waits for
        more than one.
        """
        with self._wake:
            while not (self._inbox or self._asking or self._looking or self._stopping):
                idle_work = self._idle_work()
                if idle_work is None:
                    self._wake.wait()
                    continue
                self._wake.release()
                try:
                    idle_work()
                finally:
                    self._wake.acquire()
            if self._stopping:
                return None
            inbox, self._inbox = self._inbox, {}
        events = [event for waiting in inbox.values() for event in waiting]
        return sorted(events, key=lambda event: not isinstance(event, Close))

    def _idle_work(self) -> Callable[[], None] | None:
        if self._untidy:
            return self._tidy
        if self._scorer is not None and self._scorer.pending and self.may_score():
            return self._score
        return None

    def _score(self) -> None:
        """One piece of one text; a drafter that hangs in it is seen like any other."""
        assert self._scorer is not None, "somebody has texts"
        self._busy_since = self._clock()
        self._scorer.piece()
        self._busy_since = None

    def _tidy(self) -> None:
        """One piece of one drafter's own work."""
        name = next(iter(self._untidy))
        try:
            more = tidy(self._drafters[name])
        except Exception as error:
            log.error("drafter %s failed to tidy up: %s", name, words(error))
            log.debug("where it failed", exc_info=error)
            more = False
        if not more:
            del self._untidy[name]

    def _apply(self, news: Sequence[Event]) -> None:
        batch = Batch()
        for event in news:
            match event:
                case Open():
                    self._open(event, batch)
                case Extend(handle, token_ids, question):
                    sequence = self._sequences.get(handle)
                    if sequence is None:  # refused a moment ago; the news were on their way
                        continue
                    self._settle_verdict(handle, sequence, token_ids, question, batch)
                case Close(handle):
                    self._forget(handle)
                case Alone(handle):
                    self._go_on_alone(handle)
        batch.send()

    def _open(self, opening: Open, batch: Batch) -> None:
        handle, drafter = opening.handle, self._drafters[opening.drafter]
        try:
            if len(self._sequences) >= MAX_SEQUENCES:
                raise CapacityError(f"{MAX_SEQUENCES} sequences are mirrored here, no more fit", 1.0)
            self._make_room(drafter, handle)
        except CapacityError as error:
            batch.add(opening.deliver, Refused(handle, RefusalReason.CAPACITY, str(error)))
            return
        except Exception as error:
            log_failure(opening.drafter, len(opening.token_ids), error)
            batch.add(opening.deliver, Refused(handle, RefusalReason.INTERNAL, words(error)))
            return
        self._sequences[handle] = sequence = HeldSequence(opening, opening.token_ids)
        self._ask(handle, sequence, opening.question)

    def _make_room(self, drafter: Drafter, handle: int) -> None:
        """Scoring gives way to a sequence. Raises CapacityError."""
        try:
            drafter.open(handle)
        except CapacityError:
            if self._scorer is None or not self._scorer.give_way():
                raise
            drafter.open(handle)

    def _go_on_alone(self, handle: int) -> None:
        """Without its slower half the drafter is asked again what it had passed on."""
        assert self._relay is not None
        self._relay.refused(handle)
        sequence = self._sequences.get(handle)
        if sequence is not None and sequence.question is not None:
            self._asking[handle] = None

    def _settle_verdict(
        self,
        handle: int,
        sequence: HeldSequence,
        committed: Sequence[int],
        question: Question | None,
        batch: Batch,
    ) -> None:
        """The verdict on the last block: what was drafted ahead for it is the answer, a part of it, or for nothing."""
        ahead = sequence.ahead
        branch = ahead.foreseen(committed) if ahead is not None else None
        self._end_ahead(handle, sequence)
        sequence.token_ids += committed
        if question is None or ahead is None or branch is None:
            self._ask(handle, sequence, question)
            return
        if ahead.pushed:  # the verifier takes it without a word
            batch.add(sequence.opening.deliver, taken(handle, ahead, branch, question))
            self._ask(handle, sequence, None)
            self._begin_ahead(handle, sequence, question, branch.guesses[: question.k])
            return
        self._ask(handle, sequence, question)
        sequence.take_over(ahead, branch)
        if branch.ended or len(branch.guesses) >= question.k:
            del sequence.guessed[question.k :]
            sequence.started = self._clock()
            self._answer(handle, sequence, batch)

    def _ask(self, handle: int, sequence: HeldSequence, question: Question | None) -> None:
        sequence.ask(question)
        if question is None:
            self._asking.pop(handle, None)
        else:
            self._asking[handle] = None

    def _forget(self, handle: int) -> None:
        self._asking.pop(handle, None)
        sequence = self._sequences.pop(handle, None)
        if sequence is None:
            return
        if self._relay is not None:
            self._relay.close(handle)
        self._untidy[sequence.opening.drafter] = None
        try:
            self._end_ahead(handle, sequence)
            self._drafters[sequence.opening.drafter].close(handle)
        except Exception as error:  # against the contract; the thread must live on for the others
            log_failure(sequence.opening.drafter, len(sequence.token_ids), error)
        if self.ended is not None:
            self.ended(text_of(sequence))

    def _draft(self, name: str) -> None:
        """One batch of one drafter: every sequence that asks it."""
        drafter, batch = self._drafters[name], Batch()
        requests = self._requests(name, drafter, batch)
        if requests:
            started = self._clock()
            outcomes = proposed(drafter, requests)
            draft_s = self._clock() - started
            for request, outcome in zip(requests, outcomes, strict=True):
                self._settle(request, outcome, started, draft_s, batch)
        batch.send()

    def _requests(self, name: str, drafter: Drafter, batch: Batch) -> list[DraftRequest]:
        """The questions of one drafter, cut to its context; sequences beyond it are refused."""
        requests = []
        for handle in list(self._asking):
            sequence = self._sequences[handle]
            opening, question, length = sequence.opening, sequence.question, len(sequence.token_ids)
            if opening.drafter != name or question is None:
                continue
            k = question.k
            if drafter.max_context:
                # The last guess is never read by the drafter, so it may lie just behind the limit.
                k = min(k, drafter.max_context - length + 1)
            if k < 1:
                self._forget(handle)
                words = f"{length} tokens, drafter {name!r} reads at most {drafter.max_context}"
                batch.add(opening.deliver, Refused(handle, RefusalReason.CONTEXT, words))
                continue
            tokens, guessed = sequence.token_ids, sequence.guessed
            if guessed:
                tokens, k = [*tokens, *guessed], k - len(guessed)
            requests.append(
                DraftRequest(
                    handle,
                    tokens,
                    opening.prompt_len,
                    opening.sampling,
                    k,
                    opening.vocab_size,
                    scope=opening.scope,
                    alone=self._relay is None or self._relay.is_alone(handle),
                    law=opening.law,
                    num_hypothetical=len(sequence.guessed),
                    offset=len(sequence.guessed),
                )
            )
        return requests

    def _settle(
        self,
        request: DraftRequest,
        outcome: "Outcome | Exception",
        started: float,
        draft_s: float,
        batch: Batch,
    ) -> None:
        """Turn one outcome into an answer; the sequence keeps its question where the drafter is not through."""
        handle, sequence = request.handle, self._sequences[request.handle]
        question, deliver = sequence.question, sequence.opening.deliver
        assert question is not None
        sequence.started = started if sequence.started is None else sequence.started
        sequence.draft_s += draft_s
        if outcome is None:
            return
        if isinstance(outcome, Pass):
            assert self._relay is not None, "checked with the outcome"
            self._asking.pop(handle, None)
            self._relay.ask(
                sequence.opening, sequence.token_ids, replace(question, k=min(outcome.k, request.k))
            )
            return
        if isinstance(outcome, Exception):
            self._forget(handle)
            batch.add(deliver, Refused(handle, RefusalReason.INTERNAL, words(outcome)))
            return
        if isinstance(outcome, Sampled):
            self._answer(handle, sequence, batch, outcome)
            return
        sequence.guessed += outcome
        self._answer(handle, sequence, batch)

    def _answer(
        self, handle: int, sequence: HeldSequence, batch: Batch, sampled: Sampled | None = None
    ) -> None:
        """``guessed`` (or what was drawn) is the answer; the next thing is to draft ahead of its verdict."""
        question, block, assumed = sequence.question, sequence.guessed, sequence.assumed
        assert question is not None
        assert sequence.started is not None
        answer = Drafted(
            handle,
            len(sequence.token_ids) - len(assumed),
            block if sampled is None else sampled.token_ids,
            question,
            sequence.started,
            sequence.draft_s,
            () if sampled is None else sampled.distributions,
            assumed,
        )
        self._ask(handle, sequence, None)
        if self._relay is not None:
            self._relay.answered(handle, sequence.token_ids)
        batch.add(sequence.opening.deliver, answer)
        self._begin_ahead(handle, sequence, question, block)

    # --- ahead of the verdict ---------------------------------------------------------------------------------

    def _begin_ahead(
        self, handle: int, sequence: HeldSequence, question: Question, block: Sequence[int]
    ) -> None:
        """The block is with the verifier: there is something to draft ahead of its verdict, if that is wanted."""
        opening, drafter = sequence.opening, self._drafters[sequence.opening.drafter]
        level = question.lookahead.level
        if not (level and block and isinstance(drafter, AheadDrafter) and level <= drafter.max_level):
            return
        request = DraftRequest(
            handle, sequence.token_ids, opening.prompt_len, opening.sampling, question.k, opening.vocab_size
        )
        if fits(drafter, request, len(block)):
            sequence.ahead = Ahead(request, question, [*block], self._clock())
            self._looking[handle] = None

    def _end_ahead(self, handle: int, sequence: HeldSequence) -> None:
        ahead, sequence.ahead = sequence.ahead, None
        self._looking.pop(handle, None)
        drafter = self._drafters[sequence.opening.drafter]
        if ahead is not None and ahead.enumeration is not None and isinstance(drafter, AheadDrafter):
            drafter.abandon(handle)

    def _draft_ahead(self) -> None:
        """One forward of each drafter for what is drafted ahead; complete blocks are pushed."""
        for name, drafter in self._drafters.items():
            of_drafter = [
                sequence.ahead
                for handle in self._looking
                if (sequence := self._sequences[handle]).opening.drafter == name
                and sequence.ahead is not None
            ]
            if not of_drafter or not isinstance(drafter, AheadDrafter):
                continue
            started, batch = self._clock(), Batch()
            try:
                complete = advance(drafter, of_drafter)
            except Exception as error:
                # A guess less: the sequences keep their drafter, whose next answer will tell whether it works.
                log_failure(name, len(of_drafter[0].request.token_ids), error)
                for ahead in of_drafter:
                    self._end_ahead(ahead.request.handle, self._sequences[ahead.request.handle])
                continue
            draft_s = self._clock() - started
            for ahead in of_drafter:
                ahead.draft_s += draft_s
            for ahead in complete:
                self._push(ahead, batch)
            for ahead in of_drafter:
                if not ahead.unfinished:
                    self._looking.pop(ahead.request.handle)
            batch.send()

    def _push(self, ahead: Ahead, batch: Batch) -> None:
        """Every branch as a block of its own, together in one message."""
        ahead.pushed, ahead.pushed_at = True, self._clock()
        handle, question = ahead.request.handle, ahead.question
        own = Question(question.k, question.round_index + 1, ahead.began, question.lookahead)
        deliver = self._sequences[handle].opening.deliver
        for branch in ahead.branches():
            guesses, base_len = branch.guesses, len(ahead.request.token_ids)
            if not guesses:  # an outcome that ends the text, or that there was no room for
                continue
            batch.add(
                deliver,
                Drafted(
                    handle,
                    base_len,
                    guesses,
                    own,
                    ahead.began,
                    ahead.draft_s,
                    assumed_ids=branch.assumed,
                    pushed=True,
                ),
            )
