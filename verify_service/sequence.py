"""One sequence being decoded: what was asked, what is committed, where it stands. Owned by the engine thread."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from paceline.telemetry.context import TraceContext
from paceline.types import FinishReason, Law, Plan, RoundRecord, SamplingParams, SpeculativeStats, Timings
from verify_service.facts import UNDECIDED, Decision


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # holds no memory
    PREFILL = "prefill"  # holds a slot; its prompt is being run
    RUNNING = "running"  # has its first token
    ENDED = "ended"  # has had its one answer, or nobody waits for it


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """What the router asked for. ``committed_ids`` were committed elsewhere; ``max_tokens`` counts them."""

    request_id: str
    prompt_ids: tuple[int, ...]
    committed_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    plan: Plan
    trace: TraceContext | None = None
    tenant: str = ""
    priority: int = 0
    deadline: float = math.inf  # monotonic: nobody waits for what comes later


@dataclass(frozen=True, slots=True)
class Admitted:
    """The sequence got its slot at ``at`` (monotonic), with so many of its tokens in memory already."""

    at: float
    queue_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens were committed, by the prefill (``record`` is None) or by a round.

    ``started``, ``stepped`` and ``ended`` are monotonic times: the previous commit, the start of the step, the commit.
    """

    position: int
    token_ids: tuple[int, ...]
    record: RoundRecord | None
    started: float
    stepped: float
    ended: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence's good end."""

    reason: FinishReason
    timings: Timings
    stats: SpeculativeStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence's bad end."""

    error: Exception


Event = Admitted | Run | Finished | Failed


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence in the engine. ``emit`` takes its events on the event loop's side (see ``engine``)."""

    id: int
    spec: DecodeSpec
    emit: Callable[[Event], None]
    arrived: float
    state: State = State.WAITING
    slot: int | None = None
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)
    admitted: float = 0.0
    first_step: float = 0.0
    first_token: float = 0.0
    mark: float = 0.0  # monotonic time of the last commit
    depth: Decision = UNDECIDED  # of the round that comes
    draft_s: float = 0.0
    network_s: float = 0.0
    wait_s: float = 0.0
    verify_s: float = 0.0
    law: Law = Law.COUPLED  # greedy decoding has nothing to sample: there every law is the coupled one

    def __post_init__(self) -> None:
        """Take over prompt and tokens committed elsewhere."""
        self.tokens = [*self.spec.prompt_ids, *self.spec.committed_ids]
        if self.spec.plan.law is not None and not self.spec.sampling.greedy:
            self.law = self.spec.plan.law

    @property
    def num_generated(self) -> int:
        """Output tokens, those committed elsewhere included."""
        return len(self.tokens) - len(self.spec.prompt_ids)

    def room(self, max_context: int) -> int:
        """How many tokens may still be committed."""
        return min(self.spec.max_tokens - self.num_generated, max_context - len(self.tokens))

    def add_round(self, record: RoundRecord) -> None:
        """Count a round."""
        self.stats = self.stats.plus(record)
        self.draft_s += record.draft_s
        self.network_s += record.network_s
        self.wait_s += record.wait_s
        self.verify_s += record.verify_s

    def timings(self) -> Timings:
        """Where the time went up to the last commit. A part that was not over when the sequence ended counts nothing."""
        return Timings(
            queue_s=self.first_step - self.arrived if self.first_step else 0.0,
            prefill_s=self.first_token - self.first_step if self.first_token else 0.0,
            decode_s=self.mark - self.first_token,
            draft_s=self.draft_s,
            network_s=self.network_s,
            wait_s=self.wait_s,
            verify_s=self.verify_s,
        )
