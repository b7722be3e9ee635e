"""A drafter held against a text that is known: what it would have guessed at every position, and how far it would have been right.

Under the coupled law the committed text does not depend on the drafter, so this is its acceptance at every position of every
block, for any drafter, and no verifier has to work for it. Nothing is censored: a served block ends what is known
at its first wrong guess and skips the positions that it covers, here every position begins a block.

    output     a b c d e          k = 3
    guesses    a b x              behind the prompt: two right, then a wrong one    matches 2, judged 3
                 b c d            behind a: all right                               matches 3, judged 3
                   -              behind a b: no guess                              matches 0, judged 0
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from draft_service.drafters import Drafter, DraftRequest, Pass, Sampled
from draft_service.news import Origin
from paceline.types import SamplingParams

NO_TOKEN = -1
_AT_ONCE = 16
"""Positions in one forward of a drafter that foretells: a question waits for no more than that."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text as it was committed under the coupled law; ``prompt_len`` of its tokens are prompt."""

    token_ids: Sequence[int]
    prompt_len: int
    sampling: SamplingParams
    vocab_size: int
    scope: str = ""
    origin: Origin | None = None

    @property
    def num_output(self) -> int:
        """Positions that there is something to guess for."""
        return len(self.token_ids) - self.prompt_len


@dataclass(slots=True)
class Score:
    """By position of the output, for the block of up to ``k`` guesses that begins there.

    ``matches``: guesses before the first wrong one. ``judged``: guesses whose fate is known, so one more where one was wrong;
    none of those behind the end of the text. ``misses``: the wrong one, else ``NO_TOKEN``.
    """

    k: int
    matches: list[int] = field(default_factory=list)
    judged: list[int] = field(default_factory=list)
    misses: list[int] = field(default_factory=list)

    def add(self, matches: int, miss: int = NO_TOKEN) -> None:
        """The next position."""
        self.matches.append(matches)
        self.judged.append(matches + (miss != NO_TOKEN))
        self.misses.append(miss)

    def by_position(self) -> list[tuple[int, int]]:
        """(right, seen) of the first, second, ... guess of a block, those before it being right."""
        return [
            (sum(one > at for one in self.matches), sum(one > at for one in self.judged))
            for at in range(self.k)
        ]

    def rounds(self, k: int) -> list[int]:
        """Tokens committed in each round, had it been served with ``k`` <= ``self.k`` guesses in every round.

        The first token comes with the prompt. Right for drafters whose shorter blocks are beginnings of their longer ones, and
        that do not change by being asked: all of this house but ``suffix`` and cascades.
        """
        rounds, at = [], 1
        while at < len(self.matches):
            taken = min(min(self.matches[at], k) + 1, len(self.matches) - at)
            rounds.append(taken)
            at += taken
        return rounds


@runtime_checkable
class Foretelling(Drafter, Protocol):
    """A drafter that guesses token by token from the text alone: one forward over a text gives its guess everywhere."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Guesses behind which it stops."""

    def foretell(self, request: DraftRequest, following: Sequence[int]) -> list[int] | None:
        """Its guess for each of ``following``, had all before it been committed; fewer where it cannot read on.

        None: it has got on with reading the prompt but is not through.
        """


class Scoring:
    """One text under one drafter, a piece at a time. ``handle`` is the drafter's name for it: opened here, closed by ``close``."""

    def __init__(self, drafter: Drafter, text: Text, k: int, handle: int, *, scope: str = "") -> None:
        """``scope`` empty: the drafter remembers nothing of the text. Raises CapacityError where it has no room."""
        self.score = Score(k)
        self._drafter = drafter
        self._text = text
        self._handle = handle
        self._scope = scope
        self._foretold: list[int] = []
        drafter.open(handle)

    def piece(self) -> bool:
        """A forward, or a look-up; whether there is more. May raise what the drafter raises."""
        if isinstance(self._drafter, Foretelling):
            return self._foretell(self._drafter)
        return self._ask()

    def close(self) -> None:
        """Free what the drafter holds for it."""
        self._drafter.close(self._handle)

    # --- inside -----------------------------------------------------------------------------------------------

    def _request(self, base: int, k: int) -> DraftRequest:
        text = self._text
        return DraftRequest(
            self._handle,
            text.token_ids[:base],
            text.prompt_len,
            text.sampling,
            k,
            text.vocab_size,
            scope=self._scope,
        )

    def _readable(self, base: int) -> int:
        """How many guesses behind ``base`` tokens the drafter can give: the last one is never read."""
        limit = self._drafter.max_context
        return min(self.score.k, limit - base + 1) if limit else self.score.k

    def _ask(self) -> bool:
        """The next position, by asking for its block."""
        tokens, base = self._text.token_ids, self._text.prompt_len + len(self.score.matches)
        if base >= len(tokens):
            return False
        if (k := self._readable(base)) < 1:
            self._fill()
            return False
        (outcome,) = self._drafter.propose([self._request(base, k)])
        if outcome is None:
            return True
        assert not isinstance(outcome, Pass), "it was told that it is alone"
        guesses = outcome.token_ids if isinstance(outcome, Sampled) else outcome
        known = min(len(guesses), len(tokens) - base)
        matches = next((at for at in range(known) if guesses[at] != tokens[base + at]), known)
        self.score.add(matches, guesses[matches] if matches < known else NO_TOKEN)
        return base + 1 < len(tokens)

    def _foretell(self, drafter: Foretelling) -> bool:
        """Some more positions' first guesses; at the end the blocks follow from them."""
        tokens, base = self._text.token_ids, self._text.prompt_len + len(self._foretold)
        last = min(len(tokens), base + _AT_ONCE)
        if drafter.max_context:
            last = min(last, drafter.max_context + 1)
        if base < last:
            guesses = drafter.foretell(self._request(base, 1), tokens[base:last])
            if guesses is None:
                return True
            self._foretold += guesses
            if len(guesses) == last - base and last < len(tokens):
                return True
        self._blocks(drafter.end_ids)
        return False

    def _blocks(self, end_ids: frozenset[int]) -> None:
        """While guesses are right the text before the next one is the committed text: so its guess is the one foretold."""
        foretold, output = self._foretold, self._text.token_ids[self._text.prompt_len :]
        for start in range(len(foretold)):
            at, most = start, min(start + self._readable(self._text.prompt_len + start), len(foretold))
            while at < most and foretold[at] == output[at]:
                at += 1
                if output[at - 1] in end_ids:
                    most = at
            self.score.add(at - start, foretold[at] if at < most else NO_TOKEN)
        self._fill()

    def _fill(self) -> None:
        """No guesses from here on."""
        while len(self.score.matches) < self._text.num_output:
            self.score.add(0)


def score_text(drafter: Drafter, text: Text, k: int, *, scope: str = "", handle: int = -1) -> Score:
    """The whole of it at once: for whoever has time. What waits in the drafter for a quiet moment is left waiting."""
    scoring = Scoring(drafter, text, k, handle, scope=scope)
    try:
        while scoring.piece():
            pass
    finally:
        scoring.close()
    return scoring.score
