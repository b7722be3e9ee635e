"""What a drafter is: something that guesses how sequences go on. Nothing it says can change an output (I1)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from paceline.lookup import Weighed
from paceline.types import DraftDistribution, Law, SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence that awaits guesses.

    ``token_ids`` is prompt and output as the verifier confirmed them, ``prompt_len`` of them are prompt; at least one
    token. Within the life of a ``handle`` it only grows. The guesses are for the absolute positions from
    ``len(token_ids)`` on, at most ``k`` (>= 1) of them, each below ``vocab_size``. ``scope`` stands for the tenant: what
    is remembered of a text may serve texts of the same scope only, and none where it is empty. ``alone``: there is no
    slower half to pass the question on to.

    ``num_hypothetical``: so many tokens at the end of ``token_ids`` are not confirmed but assumed, and may be taken
    back. Only an ``AheadDrafter`` is asked so. ``offset``: how many guesses of the block in question stand among them.
    """

    handle: int
    token_ids: Sequence[int]
    prompt_len: int
    sampling: SamplingParams
    k: int
    vocab_size: int
    scope: str = ""
    alone: bool = True
    law: Law = Law.COUPLED
    num_hypothetical: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """Guesses that were drawn, each with what it was drawn from: what ``ratio`` and ``block`` want.

    The draw takes noise of its own (``paceline.sampling.sample_draft``). How long a block is, and how long it takes, may
    hang on no token that is not in it: leaving one out because of what it is biases the output.
    """

    token_ids: list[int]
    distributions: tuple[DraftDistribution, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """An outcome: the slower half shall answer, with up to ``k`` (>= 1) guesses (see ``TwoSpeed``)."""

    k: int


Outcome: TypeAlias = list[int] | Sampled | Pass | None
"""A drafter's answer. A plain list is right under every law: such guesses count as certain."""


class Drafter(Protocol):
    """Guesses for many sequences at once. All methods are called from one thread, the drafter's own.

    ``max_context`` is the longest sequence, guesses included less one, that it can read; 0: no limit of its own. The
    caller keeps to it. ``slow`` drafters (a forward of a model) share a thread that the others need not wait for.
    """

    @property
    def name(self) -> str:
        """The name it is asked for by."""

    @property
    def version(self) -> str:
        """Hash of its weights, or version of its algorithm: statistics are kept apart by it."""

    @property
    def max_context(self) -> int:
        """See the class."""

    @property
    def slow(self) -> bool:
        """See the class."""

    def open(self, handle: int) -> None:
        """Make room for a sequence. Raises CapacityError where there is none."""

    def propose(self, batch: Sequence[DraftRequest]) -> Sequence[Outcome]:
        """Outcome for each request, empty where it has none; ``Sampled`` ones only where ``request.law`` is a sampled law.

        None: it has got on with reading the sequence but is not through; it is asked again at once. May raise: the
        batch is then retried one by one, and only a sequence on which it raises again loses its drafter.
        """

    def close(self, handle: int) -> None:
        """Free what ``open`` took. Never raises."""


@runtime_checkable
class Weighing(Drafter, Protocol):
    """A drafter that knows how likely its guesses are."""

    def weigh(self, batch: Sequence[DraftRequest]) -> Sequence[Weighed]:
        """What ``propose`` would say, with probabilities. Asked instead of it."""


@runtime_checkable
class TwoSpeed(Protocol):
    """A quick drafter with a slower half that works on the slow drafters' thread.

    ``propose`` may answer ``Pass``: the question, with all that was committed meanwhile, goes over to ``slower``, which
    answers in its stead. Quick answers never wait for it. The two share nothing but what each may read at any time.
    """

    @property
    def slower(self) -> Drafter | None:
        """The slower half; None: there is none, and nothing is passed on."""


@runtime_checkable
class Tidying(Protocol):
    """A drafter with work of its own between questions."""

    def tidy(self) -> bool:
        """Do a piece of it (under 0.1 ms for a quick drafter); whether there is more. Called after a close."""


def prompt_tokens(drafter: Drafter) -> int:
    """Of a prompt the drafter reads only the last so many tokens; 0: all, as where it says nothing."""
    told: int = getattr(drafter, "prompt_tokens", 0)
    return told


def skipped(drafter: Drafter, prompt_len: int) -> int:
    """How many tokens of a prompt the drafter never reads. From any thread."""
    read = prompt_tokens(drafter)
    return max(prompt_len - read, 0) if read else 0


def tidy(drafter: Drafter) -> bool:
    """A piece of the drafter's own work, if it has such; whether there is more."""
    return isinstance(drafter, Tidying) and drafter.tidy()


@dataclass(slots=True)
class Branch:
    """Guesses for the case that the verdict commits just ``assumed``. ``ended``: there will be no more."""

    assumed: tuple[int, ...]
    guesses: list[int] = field(default_factory=list)
    ended: bool = False


@dataclass(slots=True)
class Enumeration:
    """Drafting ahead from several outcomes of the round that verifies ``block`` behind ``request.token_ids``.

    The drafter makes the branches, ``fan`` at each accepted length from 0 to the block's, and lengthens each of them to
    ``request.k`` guesses.
    """

    request: DraftRequest
    block: Sequence[int]
    fan: int
    branches: list[Branch] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every branch is as long as it gets."""
        most = self.request.k
        return bool(self.branches) and all(one.ended or len(one.guesses) >= most for one in self.branches)


@runtime_checkable
class AheadDrafter(Drafter, Protocol):
    """A drafter that can work ahead of the verdict, up to ``max_level`` (see ``paceline.link.Lookahead``)."""

    @property
    def max_level(self) -> int:
        """1: ``propose`` takes hypothetical tokens. 2: ``enumerate`` too."""

    @property
    def one_pass(self) -> bool:
        """Whether a block of any length takes one forward."""

    @property
    def device(self) -> str:
        """What it computes on: cpu, cuda:N, simulated."""

    def enumerate(self, batch: Sequence[Enumeration]) -> None:
        """One forward's worth of progress for each: at first branches, then their guesses. May raise, like ``propose``."""

    def abandon(self, handle: int) -> None:
        """The enumeration of this sequence is over: free what it held. Harmless where there is none."""
