"""What a drafter on a link costs and how often it looks ahead rightly; from that, how far it should look ahead.

Time of a round with one forward of the drafter taking p, k guesses, the verify step s and the round trip r:

    level 0     s + r + k p                      every time waits for the verdict
    level 1, 2  max(s, D + r)                    the actual outcome was among those drafted, D = (k + 1) p'
                s + r + k p + p' / 2             it was not; the drafter is in the middle of a forward

(p' is a forward over all branches.) The outcomes of level 1 and 2 are right as often as has been seen, which starts
from the drafter's acceptance a: a^(k+1) for level 1. DESIGN section 5.
"""

from collections import deque
from dataclasses import dataclass

from paceline.economics import (
    SECOND_GUESS,
    ahead_round_s,
    expected_hit_rate,
    survival,
    waiting_round_s,
)
from paceline.link import NO_LOOKAHEAD, Lookahead

CANDIDATES = (Lookahead(1), Lookahead(2, 1), Lookahead(2, 2), Lookahead(2, 3))
HYSTERESIS = 0.98
"""Another level must be so much faster than the present one."""
FEWEST_WAITS = 8
"""Answers before their times say something."""
_KEEP = 0.9  # of a running mean, per observation
_FORGET = 0.98  # of counts
_PRIOR = 8.0  # observations that the first guess at a hit rate is worth


@dataclass(slots=True)
class _Count:
    hits: float = 0.0
    trials: float = 0.0

    def add(self, *, hit: bool) -> None:
        self.hits = _FORGET * self.hits + hit
        self.trials = _FORGET * self.trials + 1


class Pace:
    """One drafter on one link. Engine thread; times in seconds."""

    def __init__(self, *, max_level: int, one_pass: bool) -> None:
        self._max_level = max_level
        self._one_pass = one_pass
        self._pass_s: float | None = None
        self._rtt_s: float | None = None
        self._ahead_pass_s: dict[Lookahead, float] = {}
        self._hits: dict[Lookahead, _Count] = {}
        self._accepted, self._tested = 0.0, 0.0
        self._present = NO_LOOKAHEAD
        self._waits: deque[float] = deque(maxlen=64)

    # --- what is seen -----------------------------------------------------------------------------------------

    def drafted(self, num_guesses: int, draft_s: float, network_s: float) -> None:
        """An ordinary answer took so long on the drafter and on the way."""
        if num_guesses:
            self._pass_s = _mean(self._pass_s, draft_s / self._passes(num_guesses))
        self._rtt_s = _mean(self._rtt_s, max(0.0, network_s))

    def waited(self, wait_s: float) -> None:
        """From a question to its answer, or in vain: then somewhat more than that."""
        self._waits.append(wait_s)

    def drafted_ahead(self, lookahead: Lookahead, num_guesses: int, draft_s: float) -> None:
        """A block drafted ahead, with all that were drafted beside it, took so long on the drafter."""
        if num_guesses and lookahead.level:
            forwards = self._ahead_passes(lookahead, num_guesses)
            self._ahead_pass_s[lookahead] = _mean(self._ahead_pass_s.get(lookahead), draft_s / forwards)

    def looked_ahead(self, lookahead: Lookahead, *, hit: bool) -> None:
        """The next block was there for the actual outcome, or was not."""
        self._hits.setdefault(lookahead, _Count()).add(hit=hit)

    def verified(self, drafted: int, accepted: int) -> None:
        """So many of a block's guesses were right before the first wrong one."""
        self._accepted = _FORGET * self._accepted + accepted
        self._tested = _FORGET * self._tested + min(drafted, accepted + 1)

    # --- what follows -----------------------------------------------------------------------------------------

    def usual_wait_s(self) -> float | None:
        """19 of 20 answers came within so long; None while there are few."""
        if len(self._waits) < FEWEST_WAITS:
            return None
        ordered = sorted(self._waits)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    def choose(self, k: int, num_sequences: int, step_s: float) -> Lookahead:
        """The fastest way to get the next ``k`` guesses, level 0 until there is something to reckon with."""
        if not self._max_level or self._pass_s is None or not step_s:
            return NO_LOOKAHEAD
        rounds = {
            lookahead: self.round_s(lookahead, k, step_s)
            for lookahead in (NO_LOOKAHEAD, *CANDIDATES)
            if lookahead.level <= self._max_level and self._affordable(lookahead, k, step_s, num_sequences)
        }
        best = min(rounds, key=lambda lookahead: rounds[lookahead])
        present = rounds.get(self._present)
        if present is None or rounds[best] < HYSTERESIS * present:
            self._present = best
        return self._present

    def round_s(self, lookahead: Lookahead, k: int, step_s: float) -> float:
        """Expected time of a round."""
        pass_s, rtt_s = self._pass_s or 0.0, self._rtt_s or 0.0
        draft_s = self._passes(k) * pass_s
        if not lookahead.level:
            return waiting_round_s(step_s, rtt_s, draft_s)
        ahead_pass_s = self._ahead_pass(lookahead)
        return ahead_round_s(
            step_s,
            rtt_s,
            draft_s,
            ahead_s=self._ahead_passes(lookahead, k) * ahead_pass_s,
            ahead_pass_s=ahead_pass_s,
            hit_rate=self.hit_rate(lookahead, k),
        )

    def hit_rate(self, lookahead: Lookahead, k: int) -> float:
        """Seen, and where little was seen what the acceptance lets expect."""
        seen = self._hits.get(lookahead, _Count())
        return (seen.hits + _PRIOR * self._expected(lookahead, k)) / (seen.trials + _PRIOR)

    def _expected(self, lookahead: Lookahead, k: int) -> float:
        """Before it was tried: from fewer outcomes that were, each further one being right in the same share of the misses."""
        for fan in range(lookahead.fan - 1, 0, -1):
            fewer = Lookahead(2, fan)
            if self._hits.get(fewer, _Count()).trials >= _PRIOR:
                missed = 1 - self.hit_rate(fewer, k)
                return 1 - missed * (1 - SECOND_GUESS) ** (lookahead.fan - fan)
        acceptance = (self._accepted + 3.0) / (self._tested + 5.0)
        reached = survival([acceptance], k + 1)
        return expected_hit_rate(reached, k, level=lookahead.level, fan=lookahead.fan)

    def _affordable(self, lookahead: Lookahead, k: int, step_s: float, num_sequences: int) -> bool:
        """DESIGN section 5: enumerate only while k t_d((k+1) F B) <= t_v + rtt.

        What it really takes is part of ``round_s``, so this keeps from trying what cannot pay; it is no ban on what is known.
        """
        if lookahead.level < 2 or lookahead in self._ahead_pass_s:
            return True
        forwards = self._passes(k)
        # Every sequence beside this one enumerates too; unseen numbers of branches are taken to cost what was seen.
        return forwards * self._ahead_pass(lookahead) <= step_s + (self._rtt_s or 0.0)

    def _ahead_pass(self, lookahead: Lookahead) -> float:
        seen = self._ahead_pass_s.get(lookahead)
        if seen is not None:
            return seen
        nearest = [
            s for other, s in self._ahead_pass_s.items() if other.level == 2 and other.fan <= lookahead.fan
        ]
        return max([self._pass_s or 0.0, *nearest])

    def _passes(self, k: int) -> int:
        return 1 if self._one_pass else k

    def _ahead_passes(self, lookahead: Lookahead, k: int) -> int:
        """One more than for a block, for the bonus guess; a block drafter has that guess in its one pass of level 1."""
        if not self._one_pass:
            return k + 1
        return lookahead.level


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else _KEEP * mean + (1 - _KEEP) * value
