"""The guard on simulated traffic: fast off, back on again, and no flapping at the threshold."""

import random
from dataclasses import dataclass, field

import pytest

from router.guard import Guard, GuardRules, GuardState, verdicts_from
from router.ledger.book import Book
from router.ledger.group import Arm, Group
from router.ledger.sums import AT, Row, add_speed, add_yield, no_sums
from router.lot import drawn

K = 4
PLAIN_S = 0.02


def row(rng: random.Random, rate: float, round_cost: float, rounds: int = 10) -> Row:
    """A speculative request whose share of accepted draft tokens is ``rate`` on average, and differs among requests."""
    # Conditional acceptance whose block of K gives the wanted share, spread over requests.
    low, high = 0.0, 1.0
    for _ in range(30):
        a = (low + high) / 2
        share = sum(a**j for j in range(1, K + 1)) / K
        low, high = (a, high) if share < rate else (low, a)
    a = min(1.0, max(0.0, rng.gauss(low, 0.08)))
    accepted = 0
    for _ in range(rounds):
        depth = 0
        while depth < K and rng.random() < a:
            depth += 1
        accepted += depth
    result = no_sums()
    drafted = rounds * K
    seconds = rounds * PLAIN_S * round_cost * rng.uniform(0.9, 1.1)
    for name, value in {"requests": 1, "rounds": rounds, "spec_rounds": rounds, "drafted": drafted, "accepted": accepted, "emitted": accepted + rounds, "verify_ns": int(seconds * 1e9)}.items():  # fmt: skip
        result[AT[name]] = value
    add_yield(result, accepted, drafted)
    add_speed(result, accepted + rounds, seconds)
    return result


def plain_row(rng: random.Random) -> Row:
    result = no_sums()
    result[AT["requests"]] = 1
    add_speed(result, 50, 50 * PLAIN_S * rng.uniform(0.9, 1.1))
    return result


@dataclass
class Traffic:
    """Requests one after the other through the guard, as router and ledger do it."""

    seed: int
    holdout: float = 0.0
    round_cost: float = 1.8
    rules: GuardRules = field(default_factory=GuardRules)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.guard = Guard(self.rules)
        self.book = Book()
        self.switches: list[tuple[int, str]] = []
        self.now = 0.0
        self.sent = 0

    @property
    def on(self) -> bool:
        verdict = self.guard.verdicts().get(("code", "ngram"))
        return verdict is None or verdict.state is GuardState.ON

    def run(self, requests: int, rate: float) -> None:
        for _ in range(requests):
            self.sent += 1
            self.now += 0.1
            verdict = self.guard.verdicts().get(("code", "ngram"))
            state = verdict.state if verdict else GuardState.ON
            name = f"{self.seed}/{self.sent}"
            if state is GuardState.ON:
                arm = Arm.HOLDOUT if drawn(name, "holdout", self.holdout) else Arm.AUTO
            elif state is GuardState.HALF_OPEN and drawn(name, "probe", self.rules.probe_share):
                arm = Arm.PROBE
            else:
                arm = Arm.OFF
            speculative = arm in {Arm.AUTO, Arm.PROBE}
            group = Group("code", "", "ngram" if speculative else "", "1", "coupled" if speculative else "", "0", "1", arm.value)  # fmt: skip
            self.guard.observe(
                group, row(self.rng, rate, self.round_cost) if speculative else plain_row(self.rng)
            )
            if self.sent % 5:
                continue  # the ledger looks once a second
            decided = self.guard.step(self.book, self.now)
            for audit in decided[1] if decided else ():
                if "-> half-open" not in audit.words:
                    self.switches.append((self.sent, audit.words))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("holdout", [0.0, 0.03])
def test_a_task_that_stops_paying_is_off_soon_and_back_soon_after_it_recovers(seed, holdout):
    """Acceptance falls to 0.3: off within 200 requests; it recovers: on again within 500."""
    traffic = Traffic(seed, holdout=holdout, round_cost=3.2)  # break-even 0.55
    traffic.run(1500, 0.8)
    assert traffic.on
    assert not traffic.switches
    traffic.run(200, 0.3)
    assert not traffic.on
    traffic.run(900, 0.3)
    assert not traffic.on
    traffic.run(500, 0.8)
    assert traffic.on
    assert len(traffic.switches) == 2


@pytest.mark.parametrize("rate", [0.55, 0.575, 0.60])
@pytest.mark.parametrize("holdout", [0.0, 0.03])
def test_a_task_at_the_threshold_does_not_flap(rate, holdout):
    """At most 2 switches in 10,000 requests, with and without measured costs (then the break-even is 0.55)."""
    traffic = Traffic(7, holdout=holdout, round_cost=3.2)
    traffic.run(10_000, rate)
    assert len(traffic.switches) <= 2


def test_measured_costs_decide_where_there_are_some():
    """Acceptance 0.4 is under the golden number; where a round costs 1.4 plain tokens it pays, so it stays on."""
    traffic = Traffic(3, holdout=0.03, round_cost=1.4)
    for _ in range(20):
        traffic.guard.observe(Group("chat", "", "", "1", "", "0", "1", "ineligible"), plain_row(traffic.rng))
    traffic.run(3000, 0.4)
    assert traffic.on
    assert not traffic.switches


def test_a_first_judgement_without_costs_is_corrected_when_there_are_some():
    """Nothing plain was seen before: the golden number switches it off, the plain requests then show that it pays."""
    traffic = Traffic(3, holdout=0.03, round_cost=1.4)
    traffic.run(1500, 0.4)
    assert traffic.on
    assert len(traffic.switches) == 2


def test_good_acceptance_that_does_not_pay_goes_off():
    """A round as dear as five plain tokens gives four."""
    traffic = Traffic(4, holdout=0.03, round_cost=5.0)
    traffic.run(2500, 0.75)
    assert not traffic.on
    assert "plain speed" in traffic.switches[0][1] or "measured break-even" in traffic.switches[0][1]


def test_its_state_outlives_the_process():
    """Off stays off, with its reason and its count."""
    traffic = Traffic(5)
    traffic.run(300, 0.2)
    again = Guard()
    again.restore(traffic.guard.document())
    assert again.verdicts() == traffic.guard.verdicts() == verdicts_from(traffic.guard.document())
    assert again.verdicts()["code", "ngram"].state in {GuardState.OFF, GuardState.HALF_OPEN}


def test_cool_downs_grow_while_it_keeps_failing():
    """Each switch off within a day doubles the next cool-down."""
    traffic = Traffic(6, round_cost=3.2)
    for _ in range(3):
        traffic.run(200, 0.2)
        while not traffic.on:
            traffic.run(50, 0.9)
    gaps = [on - off for (off, _), (on, _) in zip(traffic.switches[::2], traffic.switches[1::2], strict=True)]
    assert gaps[2] > gaps[0] + 100
