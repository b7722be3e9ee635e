"""Several drafters as one: each round goes to the one that promises most tokens for its time, or to none.

    quick thread                                     slow thread
    Cascade.propose                                  Slower.propose
      quick members guess (microseconds)               the slow member with the best prospects guesses
      rate of each guess, of the slower half,          what it guessed is held against what was committed later
      of drafting nothing: the highest wins              |
      the slower half wins: PASS                         v
      <------------------- Record of each slow member: acceptance by position, seconds

A member's rate is (1 + expected accepted guesses) / (time of a round with so many guesses + time of drafting them).
Expectations come from the member itself where it weighs its guesses (suffix drafting), else from how its guesses at each
position fared so far, in this sequence and before. Times are measured. A slow member that never wins would never be
measured again, so now and then it gets a round that would have had no guesses.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_service.drafters.base import (
    PASS,
    Drafter,
    DraftRequest,
    Outcome,
    Sampled,
    Weighed,
    Weighing,
    tidy,
)
from draft_service.drafters.prospects import Record, RoundTime, Track
from paceline.errors import ConfigError

PROBE_EVERY = 16
"""Of the rounds in which nothing looked better than the slower half, every so many goes to it all the same."""


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
    draft_s: float
    idle: int = 0  # rounds without guesses since the slower half was asked


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
        self._turn = 0

    def open(self, handle: int) -> None:
        """Make room with every member. Raises CapacityError."""
        _open_all(self.members, handle)

    def close(self, handle: int) -> None:
        """Free it."""
        self._chosen.pop(handle, None)
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
            member = self._chosen.get(request.handle) or self._best(request)
            self._chosen[request.handle] = member
            by_member.setdefault(id(member), []).append(request)
        outcomes: dict[int, Outcome] = {}
        for member in self.members:
            requests = by_member.get(id(member), [])
            if requests:
                outcomes.update(self._ask(member, requests))
        return [outcomes[request.handle] for request in batch]

    def prospect(self, request: DraftRequest) -> tuple[float, float]:
        """The best member's expected tokens a second for this sequence, and seconds of drafting. From any thread."""
        return max((self._rate(member, request), member.record.cost_s(request.k)) for member in self.members)

    def _rate(self, member: _Member, request: DraftRequest) -> float:
        seconds = self._rounds.of(request.k) + member.record.cost_s(request.k)
        return (1.0 + sum(member.survival(request))) / seconds

    def _best(self, request: DraftRequest) -> _Member:
        if len(self.members) == 1:
            return self.members[0]
        self._turn += 1
        if self._turn % PROBE_EVERY == 0:
            return self.members[self._turn // PROBE_EVERY % len(self.members)]
        return max(self.members, key=lambda member: self._rate(member, request))

    def _ask(self, member: _Member, requests: Sequence[DraftRequest]) -> dict[int, Outcome]:
        began = self._clock()
        answers = list(member.drafter.propose(requests))
        took_s = self._clock() - began
        outcomes: dict[int, Outcome] = {}
        for request, answer in zip(requests, answers, strict=True):
            outcomes[request.handle] = answer
            if isinstance(answer, list | Sampled):
                guesses = answer.token_ids if isinstance(answer, Sampled) else answer
                member.track(request).guessed(len(request.token_ids), guesses)
                member.record.took(request.k, took_s)
                del self._chosen[request.handle]
        return outcomes


class Cascade:
    """See the module: the quick half. ``slower`` is the other one, None where all members are quick."""

    slow = False
    max_context = 0

    def __init__(
        self, name: str, members: Sequence[Drafter], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError without a member. Members may serve other sequences under their own names too."""
        if not members:
            raise ConfigError(f"draft.drafters.{name}: members is empty; name drafters of draft.drafters")
        digest = hashlib.sha256("\n".join(f"{m.name} {m.version}" for m in members).encode()).hexdigest()
        self.name = name
        self.version = f"cascade-1-{digest[:12]}"
        self._quick = [_Member(member) for member in members if not member.slow]
        slow = [_Member(member) for member in members if member.slow]
        self._clock = clock
        self._rounds = RoundTime()
        self.slower = Slower(name, self.version, slow, self._rounds, clock) if slow else None
        self._last: dict[int, _Round] = {}

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
        """The best of the quick guesses, none, or PASS."""
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
        last = self._last.get(request.handle)
        idle = last.idle if last is not None else 0
        length, rate = self._best_length(offer)
        passed, draft_s = False, 0.0
        if self.slower is not None and not request.alone:
            slower_rate, draft_s = self.slower.prospect(request)
            passed = slower_rate > rate
            if not passed and not length:
                idle += 1
                passed = idle % PROBE_EVERY == 0
        num_guesses = request.k if passed else length
        self._last[request.handle] = _Round(
            len(request.token_ids),
            num_guesses,
            self._clock(),
            draft_s if passed else 0.0,
            0 if passed else idle,
        )
        return PASS if passed else offer.token_ids[:length]

    def _measure(self, request: DraftRequest, now: float) -> None:
        """The round that ends with this question."""
        last = self._last.get(request.handle)
        if last is None:
            return
        committed = len(request.token_ids) - last.base_len
        if 1 <= committed <= last.num_guesses + 1:  # else there were rounds without a question in between
            self._rounds.took(last.num_guesses, max(now - last.at - last.draft_s, 0.0))
