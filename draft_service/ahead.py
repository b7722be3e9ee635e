"""Drafting ahead of the verdict: what to draft while the verifier is at the block just sent (DESIGN section 5).

    level 1    block a b c d sent            draft on: e (the bonus guess), then f g h i
               pushed: "f g h i, if a b c d e is committed"
    level 2    the likeliest outcomes at every accepted length (x and y for a, a x, a y, a b x ... a b c d e, a b c d f),
               all drafted on in one batch, pushed in one message

Work goes on one forward at a time and gives way to any question, because a verdict is news. A verdict that was
foreseen finds its block pushed (then nothing has to be said, the next block is drafted ahead at once) or half drafted
(then only the rest is). Nothing here is ever wrong, at most useless. Worker thread only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from draft_service.drafters.base import AheadDrafter, Branch, DraftRequest, Enumeration, Outcome
from draft_service.news import Question


@dataclass(slots=True)
class Ahead:
    """What is drafted ahead of one verdict, on ``block`` behind ``request.token_ids``.

    ``request.k`` is the length of the blocks to come. ``chain`` (level 1) is the bonus guess and what follows it.
    """

    request: DraftRequest
    question: Question
    block: list[int]
    began: float
    draft_s: float = 0.0
    pushed: bool = False
    pushed_at: float = 0.0
    ended: bool = False  # nothing sensible can follow
    chain: list[int] = field(default_factory=list)
    enumeration: Enumeration | None = None

    def __post_init__(self) -> None:
        """Level 2 works on an enumeration."""
        if self.question.lookahead.level > 1:
            self.enumeration = Enumeration(self.request, self.block, self.question.lookahead.fan)

    @property
    def unfinished(self) -> bool:
        """Whether there is more to draft."""
        return not (self.pushed or self.ended)

    def branches(self) -> Sequence[Branch]:
        """What there is so far, by the outcome assumed."""
        if self.enumeration is not None:
            return self.enumeration.branches
        if not self.chain:
            return ()
        return (Branch((*self.block, self.chain[0]), self.chain[1:]),)

    def foreseen(self, committed: Sequence[int]) -> Branch | None:
        """The branch that assumed just these tokens."""
        wanted = tuple(committed)
        return next((one for one in self.branches() if one.assumed == wanted and one.guesses), None)

    def chain_request(self, *, one_pass: bool) -> DraftRequest:
        """Level 1: the next forward, which is the whole rest for a drafter that needs only one."""
        hypothetical = [*self.block, *self.chain]
        missing = self.request.k + 1 - len(self.chain)
        return replace(
            self.request,
            token_ids=[*self.request.token_ids, *hypothetical],
            k=missing if one_pass else 1,
            num_hypothetical=len(hypothetical),
            offset=max(0, len(self.chain) - 1),
        )

    def lengthen_chain(self, outcome: Outcome) -> None:
        """Level 1: what the drafter said; None while it reads."""
        if isinstance(outcome, list):
            self.chain += outcome
            self.ended = not outcome
        else:
            self.ended = outcome is not None  # passed on, or drawn: nothing to build on


def advance(drafter: AheadDrafter, batch: Sequence[Ahead]) -> list[Ahead]:
    """One forward for all of ``batch`` (of one drafter); those that are complete now, ready to be pushed. May raise."""
    chains = [ahead for ahead in batch if ahead.enumeration is None]
    if chains:
        requests = [ahead.chain_request(one_pass=drafter.one_pass) for ahead in chains]
        for ahead, guesses in zip(chains, drafter.propose(requests), strict=True):
            ahead.lengthen_chain(guesses)
    enumerations = [ahead.enumeration for ahead in batch if ahead.enumeration is not None]
    if enumerations:
        drafter.enumerate(enumerations)
    return [ahead for ahead in batch if _complete(ahead)]


def _complete(ahead: Ahead) -> bool:
    if ahead.enumeration is not None:
        return ahead.enumeration.complete
    return len(ahead.chain) > ahead.request.k


def fits(drafter: AheadDrafter, request: DraftRequest, num_block: int) -> bool:
    """Whether a block behind a block is within what the drafter can read."""
    last_read = len(request.token_ids) + num_block + request.k
    return not drafter.max_context or last_read <= drafter.max_context
