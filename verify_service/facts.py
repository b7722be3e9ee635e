"""What the controller reads, remembers and says: values, written to a log and read back to the last bit."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from paceline.types import AcceptancePrior, DepthReason
from verify_service.belief import DrafterTrack, Look, Track, View

COUNT_EDGES = (1, 4, 10, 31)  # sequences
EXTRA_EDGES = (0.0, 1.0, 2.0, 4.0, 8.0)  # further rows a sequence
REGIONS = (len(COUNT_EDGES) + 1) * (len(EXTRA_EDGES) + 1)


class RowFact(NamedTuple):
    """One sequence's part of the step that has just ended."""

    id: int
    drafter: str  # empty: its plan is plain
    k_max: int  # what the plan allows; 0 after its last round
    room: int  # most draft tokens that its next round can use
    fixed: bool
    asked: int  # of this round; 0: nothing was waited for
    proposed: int  # length of the block that came; -1: none came
    drafted: int  # of these were verified
    agreed: int  # of these were the target's own
    look: Look | None
    prior: AcceptancePrior | None
    finished: bool
    found: tuple[float, ...] | None = None
    """For its next round, looked up beside the target: the probability of each guess that all up to it are right."""
    alone: bool = False  # nobody else is asked
    looked: bool = False  # this round had been looked up beside the target
    unread: int = 0  # tokens that the drafter would have to read before it can guess


class StepFacts(NamedTuple):
    """The step that has just ended."""

    step: int
    rows: tuple[RowFact, ...]
    num_sequences: int  # in the forward
    num_rows: int
    prompt_rows: int
    context: float  # mean tokens of context of a sequence
    forward_s: float
    accept_s: float
    gap_s: float  # from the end of the step before to the start of this one; negative: not known
    draft_s: float  # longest stay on a draft replica among the blocks
    running: int  # sequences that decode now, those outside this step included
    running_plain: int  # of these by plan


class Decision(NamedTuple):
    """For one sequence's next round."""

    k: int
    wait: bool  # False with k > 0: ask, but do not wait; the answer is compared with what plain decoding commits
    reason: DepthReason
    expected_tokens: float
    next_worth_s: float
    next_cost_s: float
    rest: bool = False  # the round after that is not looked up beside the target


UNDECIDED = Decision(0, False, DepthReason.UNSAID, 1.0, 0.0, 0.0)
PLAIN_ROUND = Decision(0, False, DepthReason.PLAIN, 1.0, 0.0, 0.0)


class Ready(NamedTuple):
    """A round that is about to run with a block."""

    id: int
    length: int
    fixed: bool
    survival: tuple[float, ...] | None = None  # the drafter's own word on each position, where it gives one


class Remembered(Protocol):
    """A state as others see it: Python's own, or one of compiled code (``native_state``)."""

    @property
    def pace(self) -> float: ...
    @property
    def regions(self) -> tuple[float, ...]: ...
    @property
    def accept_row_s(self) -> float: ...
    @property
    def context(self) -> float: ...

    def num_idle(self, ids: Iterable[int]) -> int:
        """How many of these sequences are suspended, or plain by plan."""

    def without(self, id_: int) -> "Remembered":
        """The state without a sequence; itself where that is not known."""


@dataclass(frozen=True, slots=True)
class State:
    """All that ``decide`` remembers."""

    tracks: Mapping[int, Track] = field(default_factory=dict)
    drafters: Mapping[str, DrafterTrack] = field(default_factory=dict)
    pace: float = 1.0  # steps take so many times what the table says,
    regions: tuple[float, ...] = (1.0,) * REGIONS  # and here so many times that
    accept_row_s: float = 0.0
    quiet_gap_s: float = 0.0  # between two steps when nothing was asked
    context: float = 256.0
    rate: float = 0.0  # tokens per second that the last decision expected, over all sequences
    found_gain: float = 1.0  # over plain decoding, where what is looked up beside the target is all there is
    views: dict[str, View] = field(
        default_factory=dict, compare=False, repr=False
    )  # of ``drafters``, as they are needed

    def view(self, drafter: str) -> View:
        """What follows from a drafter's counts, worked out once."""
        view = self.views.get(drafter)
        if view is None:
            view = self.views[drafter] = View(self.drafters[drafter])
        return view

    def with_rate(self, rate: float, found_gain: float) -> "State":
        """The same with what a decision expects."""
        return State(
            self.tracks, self.drafters, self.pace, self.regions, self.accept_row_s, self.quiet_gap_s, self.context,
            rate, found_gain, self.views,
        )  # fmt: skip

    def num_idle(self, ids: Iterable[int]) -> int:
        """How many of these sequences are suspended, or plain by plan."""
        return sum(id_ not in self.tracks or self.tracks[id_].suspended for id_ in ids)

    def without(self, id_: int) -> "State":
        """The state without a sequence; itself where that is not known."""
        if id_ not in self.tracks:
            return self
        return replace(self, tracks={key: track for key, track in self.tracks.items() if key != id_})
