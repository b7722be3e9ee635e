"""Several drafters as one: each round goes to the one that promises most tokens for its time, or to none.

    quick thread                                     slow thread
    Cascade.propose                                  Slower.propose
      quick members guess (microseconds)               the slow member with the best prospects guesses
      rate of each guess, of the slower half,          what it guessed is held against what was committed later
      of drafting nothing: the highest wins              |
      the slower half wins: Pass                         v
      <------------------- Record of each slow member: acceptance by position, seconds

A member's rate is (1 + expected accepted guesses) / (time of a round with so many guesses + time of drafting them).
Expectations come from the member itself where it weighs its guesses (suffix drafting), else from how its guesses at each
position fared so far, in this sequence and before. Times are measured. A slow member that never wins would never be
measured again, so now and then it gets a round that would have had no guesses: the more rarely, the longer it loses.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from draft_service.drafters.base import (
    Drafter,
    DraftRequest,
    Outcome,
    Pass,
    Sampled,
    Weighing,
    prompt_tokens,
    skipped,
    tidy,
)
from draft_service.drafters.prospects import Record, RoundTime, Track, bucket_of
from paceline.errors import ConfigError
from paceline.lookup import Weighed, cascade_version

PROBE_EVERY, PROBE_RARELY = 16, 512
"""Of the rounds in which nothing looked better than the slower half, every so many goes to it all the same; the number
doubles with each that changes nothing."""
_NEARLY_READ = 64
"""A probe goes to a sequence in which the slower half has so few tokens to catch up on; another waits four times as long."""


@dataclass(slots=True)
class _Member:
    """A drafter of the cascade and what is known of it. On its own thread, but for reading ``record``."""

    drafter: Drafter
    record: Record = field(default_factory=Record)
    tracks: dict[int, Track] = field(default_factory=dict)

    def track(self, request: DraftRequest) -> Track:
        """The member's own thread only."""
        track = self.tracks.get(request.handle)
        if track is None:
            track = self.tracks[request.handle] = Track(self.record, request.sampling.temperature)
        return track

    def close(self, handle: int) -> None:
        self.tracks.pop(handle, None)
        self.drafter.close(handle)

    def survival(self, request: DraftRequest) -> list[float]:
        """Probability of each of k guesses that it and all before it are right, from experience. From any thread."""
        track = self.tracks.get(request.handle) or Track(self.record, request.sampling.temperature)
        return track.survival(request.k)

    def num_unread(self, request: DraftRequest) -> int:
        """Tokens of the sequence that it has yet to read. From any thread."""
        track = self.tracks.get(request.handle)
        num_read = track.num_read if track is not None else 0
        return len(request.token_ids) - max(num_read, skipped(self.drafter, request.prompt_len))


def _open_all(members: Sequence[_Member], handle: int) -> None:
    """Open with every member or with none."""
    for at, member in enumerate(members):
        try:
            member.drafter.open(handle)
        except Exception:
            for opened in members[:at]:
                opened.close(handle)
            raise


@dataclass(slots=True)
class _Round:
    """What the quick half did last for a sequence."""

    base_len: int
    num_guesses: int
    at: float
    passed: bool


@dataclass(slots=True)
class _Probe:
    """When the slower half is tried again, for one range of temperatures."""

    idle: int = 0
    every: int = PROBE_EVERY

    def due(self, num_unread: int) -> bool:
        """One more round without guesses; whether it goes to the slower half."""
        self.idle += 1
        if self.idle < self.every * (1 if num_unread <= _NEARLY_READ else 4):
            return False
        self.idle, self.every = 0, min(2 * self.every, PROBE_RARELY)
        return True

    def won(self) -> None:
        """The slower half had the best prospects: no need to probe, and soon again once it has not."""
        self.idle, self.every = 0, PROBE_EVERY


class Slower:
    """The slow members, on the slow drafters' thread: the one with the best prospects answers."""

    slow = True

    def __init__(
        self,
        name: str,
        version: str,
        members: Sequence[_Member],
        rounds: RoundTime,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.version = version
        limits = [member.drafter.max_context for member in members if member.drafter.max_context]
        self.max_context = min(limits, default=0)
        self.members = members
        self._rounds = rounds  # the quick half measures it
        self._clock = clock
        self._chosen: dict[int, _Member] = {}  # by sequences whose question is not answered yet
        self.took_s: dict[int, float] = {}
        """Time of each sequence's last answer, or of the one that is being made."""
        self._turn = 0

    def open(self, handle: int) -> None:
        """Make room with every member. Raises CapacityError."""
        _open_all(self.members, handle)

    def close(self, handle: int) -> None:
        """Free it."""
        self._chosen.pop(handle, None)
        self.took_s.pop(handle, None)
        for member in self.members:
            member.close(handle)

    def tidy(self) -> bool:
        """See Tidying."""
        return any(tidy(member.drafter) for member in self.members)

    def propose(self, batch: Sequence[DraftRequest]) -> list[Outcome]:
        """Each sequence's best member, all sequences of a member together."""
        by_member: dict[int, list[DraftRequest]] = {}
        for request in batch:
            for member in self.members:
                member.track(request).committed(request.token_ids)
            if request.handle not in self._chosen:
                self._chosen[request.handle] = self._best(request)
                self.took_s[request.handle] = 0.0
            by_member.setdefault(id(self._chosen[request.handle]), []).append(request)
        outcomes: dict[int, Outcome] = {}
        for member in self.members:
            requests = by_member.get(id(member), [])
            if requests:
                outcomes.update(self._ask(member, requests))
        return [outcomes[request.handle] for request in batch]

    def prospect(self, request: DraftRequest) -> tuple[float, int]:
        """The best member's expected tokens a second for this sequence, with so many guesses. From any thread."""
        return max(self._prospect(member, request) for member in self.members)

    def num_unread(self, request: DraftRequest) -> int:
        """Tokens that some member has to catch up on. From any thread."""
        return max(member.num_unread(request) for member in self.members)

    def _prospect(self, member: _Member, request: DraftRequest) -> tuple[float, int]:
        expected, best = 0.0, (0.0, 1)
        num_unread = member.num_unread(request)
        for length, alive in enumerate(member.survival(request), start=1):
            expected += alive
            seconds = self._rounds.of(length) + member.record.cost_s(length, num_unread)
            best = max(best, ((1.0 + expected) / seconds, length))
        return best

    def _best(self, request: DraftRequest) -> _Member:
        if len(self.members) == 1:
            return self.members[0]
        self._turn += 1
        if self._turn % PROBE_EVERY == 0:
            return self.members[self._turn // PROBE_EVERY % len(self.members)]
        return max(self.members, key=lambda member: self._prospect(member, request))

    def _ask(self, member: _Member, requests: Sequence[DraftRequest]) -> dict[int, Outcome]:
        began = self._clock()
        answers = list(member.drafter.propose(requests))
        took_s = self._clock() - began
        outcomes: dict[int, Outcome] = {}
        for request, answer in zip(requests, answers, strict=True):
            outcomes[request.handle] = answer
            self.took_s[request.handle] += took_s
            if isinstance(answer, list | Sampled):
                guesses = answer.token_ids if isinstance(answer, Sampled) else answer
                member.record.took(request.k, member.num_unread(request), self.took_s[request.handle])
                member.track(request).guessed(len(request.token_ids), guesses)
                del self._chosen[request.handle]
        return outcomes


class Cascade:
    """See the module: the quick half. ``slower`` is the other one, None where all members are quick."""

    slow = False
    max_context = 0

    def __init__(
        self,
        name: str,
        members: Sequence[Drafter],
        *,
        beside: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError without a member. Members may serve other sequences under their own names too.

        ``beside``: members that the verify tier asks itself; here there are only questions on which they had no guess.
        """
        if not members:
            raise ConfigError(f"draft.drafters.{name}: members is empty; name drafters of draft.drafters")
        self.name = name
        self.version = cascade_version([(member.name, member.version) for member in members])
        here = [member for member in members if member.name not in beside]
        self._quick = [_Member(member) for member in here if not member.slow]
        slow = [_Member(member) for member in here if member.slow]
        read = [prompt_tokens(member.drafter) for member in slow]
        self.prompt_tokens = max(read) if read and all(read) else 0
        """Of a prompt no slow member reads more than the last so many tokens; 0: one reads all."""
        self._clock = clock
        self._rounds = RoundTime()
        self.slower = Slower(name, self.version, slow, self._rounds, clock) if slow else None
        self._last: dict[int, _Round] = {}
        self._probes: dict[int, _Probe] = {}

    def open(self, handle: int) -> None:
        """Make room with every quick member."""
        _open_all(self._quick, handle)

    def close(self, handle: int) -> None:
        """Free it."""
        self._last.pop(handle, None)
        for member in self._quick:
            member.close(handle)

    def tidy(self) -> bool:
        """See Tidying."""
        return any(tidy(member.drafter) for member in self._quick)

    def propose(self, batch: Sequence[DraftRequest]) -> list[Outcome]:
        """The best of the quick guesses, none, or Pass."""
        now = self._clock()
        for request in batch:
            self._measure(request, now)
        offers = [self._offers(member, batch) for member in self._quick]
        outcomes: list[Outcome] = []
        for at, request in enumerate(batch):
            best: Weighed = max(
                (offer[at] for offer in offers),
                key=lambda weighed: self._best_length(weighed)[1],
                default=Weighed([], []),
            )
            outcomes.append(self._decide(request, best))
        return outcomes

    # --- inside -----------------------------------------------------------------------------------------------

    def _offers(self, member: _Member, batch: Sequence[DraftRequest]) -> list[Weighed]:
        """A quick member's guesses, weighed by itself or by experience."""
        drafter = member.drafter
        if isinstance(drafter, Weighing):
            return list(drafter.weigh(batch))
        offers = []
        for request, answer in zip(batch, drafter.propose(batch), strict=True):
            guesses = answer if isinstance(answer, list) else []
            track = member.track(request)
            track.committed(request.token_ids)
            track.guessed(len(request.token_ids), guesses)
            offers.append(Weighed(guesses, track.survival(len(guesses))))
        return offers

    def _best_length(self, weighed: Weighed) -> tuple[int, float]:
        """How many of the guesses are worth their rows, and the tokens a second with them."""
        length, best = 0, 1.0 / self._rounds.of(0)
        expected = 0.0
        for at, probability in enumerate(weighed.probabilities, start=1):
            expected += probability
            rate = (1.0 + expected) / self._rounds.of(at)
            if rate > best:
                length, best = at, rate
        return length, best

    def _decide(self, request: DraftRequest, offer: Weighed) -> Outcome:
        length, rate = self._best_length(offer)
        passed = 0
        if self.slower is not None and not request.alone:
            probe = self._probes.setdefault(bucket_of(request.sampling.temperature), _Probe())
            slower_rate, slower_length = self.slower.prospect(request)
            if slower_rate > rate:
                passed = slower_length
                probe.won()
            elif not length and probe.due(self.slower.num_unread(request)):
                passed = slower_length
        self._last[request.handle] = _Round(
            len(request.token_ids), passed or length, self._clock(), passed=passed > 0
        )
        return Pass(passed) if passed else offer.token_ids[:length]

    def _measure(self, request: DraftRequest, now: float) -> None:
        """The round that ends with this question."""
        last = self._last.get(request.handle)
        if last is None:
            return
        committed = len(request.token_ids) - last.base_len
        if not 1 <= committed <= last.num_guesses + 1:
            return  # there were rounds without a question in between
        draft_s = self.slower.took_s.get(request.handle, 0.0) if last.passed and self.slower else 0.0
        self._rounds.took(last.num_guesses, max(now - last.at - draft_s, 0.0))
