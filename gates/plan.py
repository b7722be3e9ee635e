"""What a pair would give: speed by k, the best k, break-even, draft-ahead, capacity and cost. Pure arithmetic.

A scenario holds what one would otherwise have to measure. A round of k draft tokens for B sequences takes the drafter k
forwards over B rows (one forward for a block drafter), the target one forward over B (k + 1) rows, and a round trip.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gates.capacity import Memory
from paceline import economics
from paceline.link import NO_LOOKAHEAD, Lookahead
from paceline.simulation import DeviceCost
from paceline.step_costs import CostTable

LOOKAHEADS = (Lookahead(1), Lookahead(2, 1), Lookahead(2, 2), Lookahead(2, 3))
ROUND_TRIPS_S = (0.0, 0.001, 0.005, 0.025)
_ROUNDING = 1e-9
"""What is faster by no more than this share is so by the rounding of sums only."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A pair, its costs and its load. ``acceptance`` by position; the last one holds for all behind it."""

    acceptance: tuple[float, ...]
    verify: DeviceCost | CostTable
    """A formula, or what a verify replica has measured."""
    draft: DeviceCost
    one_pass: bool = False
    rtt_s: float = 0.0
    overhead_s: float = 0.0
    """Of every step, plain ones too: what is neither forward nor draft."""
    sequences: int = 1
    context: int = 0
    max_k: int = 8
    shared: bool = False
    """Drafter and target on one device: drafting ahead hides nothing there."""
    memory: Memory | None = None
    price_per_hour: float = 0.0

    def step_s(self, rows: int) -> float:
        """One forward of the target, with what comes on top of every step."""
        if isinstance(self.verify, CostTable):
            return self.verify.step_s(rows, self.sequences, self.context or None) + self.overhead_s
        return self.verify.seconds(rows, self.sequences * self.context) + self.overhead_s

    def draft_s(self, k: int, rows: int) -> float:
        """A block of ``k`` guesses over ``rows`` rows."""
        return self.draft.seconds(rows) * (1 if self.one_pass else k)

    @property
    def plain_s(self) -> float:
        """A plain step of all sequences."""
        return self.step_s(self.sequences)


@dataclass(frozen=True, slots=True)
class Depth:
    """What k draft tokens a round give. Speeds are over plain decoding at the same load."""

    k: int
    tokens: float
    round_s: float
    token_s: float
    speed: float
    gain: float
    """Of this k over the one before, as a share of plain speed."""
    break_even: float | None
    """Acceptance at which the round is as fast as plain decoding; None: at none."""
    ahead_speed: float
    ahead_level: int
    ahead_fan: int


@dataclass(frozen=True, slots=True)
class Distance:
    """The best that can be had with a round trip between the tiers."""

    rtt_s: float
    k: int
    speed: float
    ahead_k: int
    ahead_speed: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """A full device without and with the drafter. ``tokens_s``: of all sequences; cost of 1,000 tokens where a price is known."""

    tokens: int
    sequences_before: int
    sequences_after: int
    tokens_s_before: float
    tokens_s_after: float
    k_after: int
    cost_before: float | None
    cost_after: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a scenario."""

    scenario: Scenario
    depths: tuple[Depth, ...]
    best_k: int
    best_ahead_k: int
    distances: tuple[Distance, ...]
    capacity: Capacity | None
    cost_plain: float | None
    cost_speculative: float | None
    """Of 1,000 tokens at this load, with the best k."""

    @property
    def best(self) -> Depth:
        """The fastest depth without drafting ahead; k = 0 is plain decoding."""
        return self.depths[self.best_k]


def plan(scenario: Scenario) -> Plan:
    """Everything at once."""
    depths = tuple(_depths(scenario))
    best_k = economics.best_k([depth.speed for depth in depths])
    speed = depths[best_k].speed
    plain_tokens_s = scenario.sequences / scenario.plain_s
    return Plan(
        scenario=scenario,
        depths=depths,
        best_k=best_k,
        best_ahead_k=economics.best_k([depth.ahead_speed for depth in depths]),
        distances=tuple(_distance(replace(scenario, rtt_s=rtt_s)) for rtt_s in _round_trips(scenario)),
        capacity=_capacity(scenario, scenario.memory) if scenario.memory is not None else None,
        cost_plain=cost(scenario.price_per_hour, plain_tokens_s),
        cost_speculative=cost(scenario.price_per_hour, plain_tokens_s * speed),
    )


def cost(price_per_hour: float, tokens_a_second: float) -> float | None:
    """Of 1,000 tokens; None without a price."""
    if not price_per_hour or not tokens_a_second:
        return None
    return price_per_hour / 3600 / tokens_a_second * 1000


def _depths(scenario: Scenario) -> Iterator[Depth]:
    plain_s, before = scenario.plain_s, 1.0
    reached = economics.survival(scenario.acceptance, scenario.max_k + 1)
    yield Depth(0, 1.0, plain_s, plain_s, 1.0, 0.0, 0.0, 1.0, 0, 0)
    for k in range(1, scenario.max_k + 1):
        tokens = 1.0 + sum(reached[:k])
        step_s = scenario.step_s(scenario.sequences * (k + 1))
        draft_s = scenario.draft_s(k, scenario.sequences)
        round_s = economics.waiting_round_s(step_s, scenario.rtt_s, draft_s)
        speed = tokens * plain_s / round_s
        ahead, ahead_s = _ahead(scenario, k, step_s, draft_s, reached)
        yield Depth(
            k=k,
            tokens=tokens,
            round_s=round_s,
            token_s=round_s / tokens,
            speed=speed,
            gain=speed - before,
            break_even=economics.break_even_acceptance(round_s, plain_s, k),
            ahead_speed=tokens * plain_s / ahead_s,
            ahead_level=ahead.level,
            ahead_fan=ahead.fan,
        )
        before = speed


def _ahead(
    scenario: Scenario, k: int, step_s: float, draft_s: float, reached: Sequence[float]
) -> tuple[Lookahead, float]:
    """The fastest way to draft ahead, and the round with it; waiting for the verdict is one of them."""
    best = NO_LOOKAHEAD, economics.waiting_round_s(step_s, scenario.rtt_s, draft_s)
    for lookahead in () if scenario.shared else LOOKAHEADS:
        branches = scenario.sequences * (1 if lookahead.level == 1 else (k + 1) * lookahead.fan)
        pass_s = scenario.draft.seconds(branches)
        if lookahead.level == 2 and (1 if scenario.one_pass else k) * pass_s > step_s + scenario.rtt_s:
            continue  # DESIGN section 5: enumerate only what hides behind the step
        passes = lookahead.level if scenario.one_pass else k + 1
        round_s = economics.ahead_round_s(
            step_s,
            scenario.rtt_s,
            draft_s,
            ahead_s=passes * pass_s,
            ahead_pass_s=pass_s,
            hit_rate=economics.expected_hit_rate(reached, k, level=lookahead.level, fan=lookahead.fan),
        )
        if round_s < best[1] * (1 - _ROUNDING):
            best = lookahead, round_s
    return best


def _round_trips(scenario: Scenario) -> list[float]:
    return sorted({*ROUND_TRIPS_S, scenario.rtt_s})


def _distance(scenario: Scenario) -> Distance:
    depths = tuple(_depths(scenario))
    k = economics.best_k([depth.speed for depth in depths])
    ahead_k = economics.best_k([depth.ahead_speed for depth in depths])
    return Distance(scenario.rtt_s, k, depths[k].speed, ahead_k, depths[ahead_k].ahead_speed)


def _capacity(scenario: Scenario, memory: Memory) -> Capacity:
    """Both ways with the device full: sequences lost to the drafter are load that the speed has to make up for."""
    tokens = max(1, scenario.context)
    before, after = (memory.sequences(tokens, drafter=drafter) for drafter in (False, True))
    plain = replace(scenario, sequences=max(1, before))
    full = replace(scenario, sequences=max(1, after))
    depths = tuple(_depths(full))
    k = economics.best_k([depth.speed for depth in depths])
    tokens_s_before = before / plain.plain_s
    tokens_s_after = after / full.plain_s * depths[k].speed
    return Capacity(
        tokens,
        before,
        after,
        tokens_s_before,
        tokens_s_after,
        k,
        cost(scenario.price_per_hour, tokens_s_before),
        cost(scenario.price_per_hour, tokens_s_after),
    )
