"""The values that travel between the parts of Paceline: frozen, without behaviour that could surprise, without torch.

Absolute position t counts from 0 at the first prompt token. Times are seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, Self


class Mode(Enum):
    """Plain decoding or speculative decoding."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"


class Law(Enum):
    """How proposals are accepted (docs/laws.md)."""

    COUPLED = (
        "coupled"  # the target's own draw, whatever the draft is: the output does not depend on the drafter
    )
    RATIO = "ratio"  # sampled, token by token: only the distribution does not depend on it
    BLOCK = "block"  # sampled, the whole block jointly

    @property
    def sampled(self) -> bool:
        """Whether the drafter draws tokens of its own, and says what from."""
        return self is not Law.COUPLED


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """What one draft token was drawn from, under the sampled laws: the drafter's likeliest tokens.

    ``probs`` are float32 numbers, in the order of ``token_ids``; what counts is their share of their sum.
    """

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"


class ProposalOutcome(Enum):
    """What became of the proposal that a round could have used."""

    NONE = "none"  # nothing was asked: plain by plan, or by the controller
    USED = "used"  # a block was verified
    EMPTY = "empty"  # the drafter had no guess
    LATE = "late"  # nothing usable in time
    UNAVAILABLE = "unavailable"  # no drafter could be asked
    CUT = "cut"  # a block was there; verifying it would have cost more than it was worth


class DepthReason(Enum):
    """Why a round drafted as many tokens as it did."""

    UNSAID = "unsaid"
    PLAIN = "plain"  # the plan is plain
    FIXED = "fixed"  # the plan fixes the depth
    ALL = "all"  # all that the plan allows pays
    COST = "cost"  # one more row costs more than it is worth
    TAIL = "tail"  # one more row would make plain rows wait too long
    ASKING = "asking"  # asking costs more than the guesses are worth
    SUSPENDED = "suspended"  # nothing accepted for several rounds
    DWELL = "dwell"  # would pay too little to switch again
    ROOM = "room"  # the request has room for so many only
    LOOKED_UP = "looked_up"  # looked up beside the target, nobody was asked
    NOT_FOUND = "not_found"  # the same, and nothing was found


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn; the meaning and order of the fields stand in ``paceline.sampling``.

    The defaults switch every processor off. ``seed`` is the key of the draw, an unsigned 64-bit integer.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    prepared: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """What a sampler has made of the biases, so that it is made once a request; no part of the value."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without a draw."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether earlier tokens change the distribution (penalties)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class AcceptancePrior:
    """Acceptance as expected before the first round: worth ``strength`` observed draft tokens of that ``mean``.

    ``by_position`` replaces the mean position by position, the first draft token first.
    """

    mean: float
    strength: float
    by_position: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The router's decision for one request. ``drafter`` is empty, ``k_max`` 0 and ``law`` None when plain.

    ``k_fixed``: draft exactly ``k_max`` tokens a round; else the verify tier chooses from 0 to ``k_max``.
    """

    mode: Mode
    reason: str
    drafter: str = ""
    k_max: int = 0
    law: Law | None = None
    k_fixed: bool = False
    prior: AcceptancePrior | None = None
    drafter_version: str = ""

    @classmethod
    def plain(cls, reason: str) -> Self:
        """Plain decoding, because of ``reason``."""
        return cls(Mode.PLAIN, reason)

    @classmethod
    def speculative(
        cls,
        drafter: str,
        k_max: int,
        reason: str,
        law: Law = Law.COUPLED,
        *,
        k_fixed: bool = False,
        prior: AcceptancePrior | None = None,
    ) -> Self:
        """Speculative decoding with up to ``k_max`` draft tokens a round."""
        return cls(Mode.SPECULATIVE, reason, drafter, k_max, law, k_fixed, prior)


class RoundRecord(NamedTuple):
    """One round of one sequence, from the previous commit to its own.

    ``draft_s + network_s + wait_s + verify_s`` is the whole round; ``forward_s`` and ``accept_s`` are parts of
    ``verify_s``. ``accepted + ignored <= drafted``: ``ignored`` draft tokens agreed but lie behind the cut.
    ``asked`` and what follows say why the round drafted so many: see ``paceline.depth``.
    """

    # A tuple: a frozen dataclass takes eight times as long to make, and every round is made in two tiers.
    index: int  # type: ignore[assignment]  # tuples have a method of that name
    base_len: int
    drafted: int
    accepted: int
    ignored: int
    committed: int
    outcome: ProposalOutcome
    drafter: str
    batch_sequences: int
    batch_rows: int
    draft_s: float
    network_s: float
    wait_s: float
    verify_s: float
    forward_s: float
    accept_s: float
    asked: int = 0
    depth_reason: DepthReason = DepthReason.UNSAID
    expected_tokens: float = 0.0
    next_worth_s: float = 0.0
    next_cost_s: float = 0.0
    step: int = 0
    hidden_draft_s: float = 0.0  # spent ahead of the verdict, behind an earlier round: not part of this one
    ahead_level: int = 0  # how the block was asked for, see ``paceline.link.Lookahead``
    ahead_hit: bool = False  # whether it was ready for this very outcome
    beside: bool = False  # looked up beside the target: no message, and ``asked`` tokens at most

    @property
    def total_s(self) -> float:
        """The whole round."""
        return self.draft_s + self.network_s + self.wait_s + self.verify_s


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    """Sums over the rounds of a request (vLLM's per-request names). Ratios are absent, not NaN, without data."""

    num_rounds: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_ignored_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    num_spec_committed: int = 0  # tokens committed in rounds that verified a block
    num_late_rounds: int = 0
    num_unavailable_rounds: int = 0
    num_empty_rounds: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens committed per round with a block, the target's own token included."""
        return self.num_spec_committed / self.num_spec_steps if self.num_spec_steps else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted: a ratio of sums, never a mean of ratios (I6)."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def plus(self, record: RoundRecord) -> "SpeculativeStats":
        """These sums with one more round."""
        outcome = record.outcome
        late = self.num_late_rounds + (outcome is ProposalOutcome.LATE)
        unavailable = self.num_unavailable_rounds + (outcome is ProposalOutcome.UNAVAILABLE)
        empty = self.num_empty_rounds + (outcome is ProposalOutcome.EMPTY)
        if not record.drafted:
            return replace(
                self,
                num_rounds=self.num_rounds + 1,
                num_late_rounds=late,
                num_unavailable_rounds=unavailable,
                num_empty_rounds=empty,
            )
        histogram = list(self.acceptance_histogram)
        histogram += [0] * (record.accepted + 1 - len(histogram))
        histogram[record.accepted] += 1
        return replace(
            self,
            num_rounds=self.num_rounds + 1,
            num_spec_steps=self.num_spec_steps + 1,
            num_draft_tokens=self.num_draft_tokens + record.drafted,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens + record.accepted,
            num_ignored_draft_tokens=self.num_ignored_draft_tokens + record.ignored,
            acceptance_histogram=tuple(histogram),
            num_spec_committed=self.num_spec_committed + record.committed,
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds; the router's two are 0 in the verify tier."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    network_s: float = 0.0
    wait_s: float = 0.0
    verify_s: float = 0.0
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        """Decode time that no part of a round explains."""
        return self.decode_s - self.draft_s - self.network_s - self.wait_s - self.verify_s


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Identity of a tier's model, as loaded. ``numerics`` is ``deterministic`` or ``best-effort``."""

    name: str
    fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context: int
    dtype: str
    device: str
    runner: str
    runner_reason: str
    numerics: str

    @property
    def identity(self) -> tuple[str, ...]:
        """Replicas of one identity continue each other's outputs: same values, same arithmetic."""
        return self.fingerprint, self.dtype, self.device.partition(":")[0], self.runner, self.numerics
