"""Look-ups beside the target: guesses that cost microseconds are not worth a message (docs/adr/0008).

A drafter that is a look-up (ngram, suffix) is asked here and nowhere else; a cascade is asked here first, and its other
members in the draft tier where nothing was found. Engine thread only. What is found is a hint like any proposal (I1).
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.config import DraftConfig
from paceline.lookup import Lookup, Weighed, build_lookup, cascade_version
from paceline.types import Mode, ProposalOutcome
from verify_service.block import Block
from verify_service.sequence import Sequence

log = logging.getLogger(__name__)

_NOTHING = Weighed([], [])


@dataclass(frozen=True, slots=True)
class _Found:
    """For the round behind ``base_len`` tokens."""

    base_len: int
    guess: Weighed
    asked_at: float
    answered_at: float


class Beside:
    """The look-ups of a verify replica."""

    def __init__(
        self,
        lookups: Mapping[str, Lookup],
        drafters: Mapping[str, tuple[str, ...]],
        alone: Mapping[str, str],
        *,
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``drafters``: those asked here, and by which look-ups. ``alone``: those asked nowhere else, and their versions.

        ``vocab_size``: guesses at or above it end the block; None: all are taken.
        """
        self._lookups = dict(lookups)
        self._drafters = dict(drafters)
        self.alone = dict(alone)
        self._vocab_size = sys.maxsize if vocab_size is None else vocab_size
        self._clock = clock
        self._open: dict[int, tuple[Lookup, ...]] = {}
        self._found: dict[int, _Found] = {}

    def asks(self, drafter: str) -> bool:
        """Whether a drafter's questions are looked up here first."""
        return drafter in self._drafters

    def look(self, sequence: Sequence, k: int) -> tuple[float, ...] | None:
        """Look up how the sequence goes on, for its next round: probability of each guess that all up to it are right.

        Empty where nothing was found, None where its drafter is not asked here.
        """
        plan = sequence.spec.plan
        if plan.mode is Mode.PLAIN or plan.drafter not in self._drafters:
            return None
        asked_at = self._clock()
        guess = self._guess(sequence, k) if k > 0 else _NOTHING
        self._found[sequence.id] = _Found(len(sequence.tokens), guess, asked_at, self._clock())
        return tuple(guess.probabilities)

    def take(self, sequence: Sequence) -> Block | None:
        """What was found for this round; None where nothing was, and others may know more."""
        found = self._found.get(sequence.id)
        if found is None or found.base_len != len(sequence.tokens):
            return None
        drafter, tokens = sequence.spec.plan.drafter, found.guess.token_ids
        if not tokens and drafter not in self.alone:
            return None
        return Block(
            tokens,
            ProposalOutcome.USED if tokens else ProposalOutcome.EMPTY,
            drafter,
            found.asked_at,
            found.answered_at,
            found.answered_at - found.asked_at,
            beside=True,
            found=len(tokens),
            survival=tuple(found.guess.probabilities),
        )

    def close(self, sequence: Sequence) -> None:
        """The sequence is over: what it said may serve others of its tenant."""
        self._found.pop(sequence.id, None)
        self._close(sequence.id)

    def tidy(self) -> bool:
        """Do a piece of the work that can wait, under 0.1 ms; whether there is more."""
        return any(lookup.tidy() for lookup in self._lookups.values())

    def _guess(self, sequence: Sequence, k: int) -> Weighed:
        """The best of the look-ups. One that fails costs this sequence its guesses and nothing else."""
        spec = sequence.spec
        lookups = self._open.get(sequence.id)
        try:
            if lookups is None:
                lookups = self._opened(sequence)
            best = max(
                (
                    lookup.guess(
                        sequence.id,
                        sequence.tokens,
                        prompt_len=len(spec.prompt_ids),
                        scope=f"tenant {spec.tenant}",
                        k=k,
                    )
                    for lookup in lookups
                ),
                key=lambda weighed: sum(weighed.probabilities),
                default=_NOTHING,
            )
            if best.token_ids and max(best.token_ids) >= self._vocab_size:
                return self._within(best)
            return best
        except Exception:
            log.exception("a look-up failed; this sequence goes on without", extra={"sequence": sequence.id})
            self._close(sequence.id)
            self._open[sequence.id] = ()
            return _NOTHING

    def _opened(self, sequence: Sequence) -> tuple[Lookup, ...]:
        for name in self._drafters[sequence.spec.plan.drafter]:
            self._lookups[name].open(sequence.id)
            self._open[sequence.id] = (*self._open.get(sequence.id, ()), self._lookups[name])
        return self._open.setdefault(sequence.id, ())

    def _close(self, handle: int) -> None:
        for lookup in self._open.pop(handle, ()):
            try:
                lookup.close(handle)
            except Exception:
                log.exception("closing a look-up failed", extra={"sequence": handle})

    def _within(self, guess: Weighed) -> Weighed:
        """Up to the first one that the target could not even read."""
        length = next(i for i, token in enumerate(guess.token_ids) if token >= self._vocab_size)
        return Weighed(guess.token_ids[:length], guess.probabilities[:length])


def build_beside(config: DraftConfig, tokenizer_fingerprint: str, vocab_size: int | None = None) -> Beside:
    """Those that the settings place beside the target. Raises ConfigError. ``vocab_size``: the target's, where known."""
    config.check_members()
    drafters = config.beside()
    names = {member for members in drafters.values() for member in members}
    lookups = {
        name: build_lookup(name, config.drafters[name], tokenizer_fingerprint, vocab_size)
        for name in sorted(names)
    }
    alone: dict[str, str] = {}
    for name, members in drafters.items():
        if name in lookups:
            alone[name] = lookups[name].version
        elif set(config.drafters[name].members) == set(members):
            alone[name] = cascade_version([(member, lookups[member].version) for member in members])
    return Beside(lookups, drafters, alone, vocab_size=vocab_size)
