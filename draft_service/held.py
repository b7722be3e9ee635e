"""The worker's copy of a sequence, and the answers of one step. Touched by the worker thread only."""

from dataclasses import dataclass, field, replace

from draft_service.ahead import Ahead
from draft_service.drafters.base import Branch
from draft_service.news import Answer, Deliver, Drafted, Open, Question, Taken
from draft_service.scoring import Text


@dataclass(slots=True)
class HeldSequence:
    """The worker's copy of a sequence. Touched by the worker thread only."""

    opening: Open
    token_ids: list[int]
    question: Question | None = None
    started: float | None = None
    draft_s: float = 0.0
    guessed: list[int] = field(default_factory=list)
    """Guesses for the question that were drafted ahead, for the case that ``assumed`` is committed: the rest is missing."""
    assumed: tuple[int, ...] = ()
    ahead: Ahead | None = None

    def ask(self, question: Question | None) -> None:
        self.question, self.started, self.draft_s, self.guessed, self.assumed = question, None, 0.0, [], ()

    def take_over(self, ahead: Ahead, branch: Branch) -> None:
        """What was drafted ahead is the beginning of the answer."""
        self.guessed, self.assumed, self.draft_s = [*branch.guesses], branch.assumed, ahead.draft_s


@dataclass(slots=True)
class Batch:
    """Answers of one step, by the link that gets them."""

    by_link: dict[Deliver, list[Answer]] = field(default_factory=dict)

    def add(self, deliver: Deliver, answer: Answer) -> None:
        self.by_link.setdefault(deliver, []).append(answer)

    def send(self) -> None:
        for deliver, answers in self.by_link.items():
            deliver(answers)


def text_of(sequence: HeldSequence) -> Text | None:
    """What was committed, as far as it was told; None where it is nobody's, or depends on the drafter."""
    opening = sequence.opening
    if opening.origin is None or opening.law.sampled:
        return None
    return Text(
        sequence.token_ids,
        opening.prompt_len,
        opening.sampling,
        opening.vocab_size,
        opening.scope,
        opening.origin,
    )


def taken(handle: int, ahead: Ahead, branch: Branch, question: Question) -> Taken:
    """The block that answers ``question`` before it was asked."""
    asked = replace(question, arrived=ahead.began)
    block = Drafted(
        handle,
        len(ahead.request.token_ids) - len(branch.assumed),  # they are committed by now
        branch.guesses[: question.k],
        asked,
        ahead.began,
        ahead.draft_s,
        assumed_ids=branch.assumed,
        pushed=True,
    )
    return Taken(handle, block, ahead.pushed_at)
