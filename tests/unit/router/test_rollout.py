"""Rollouts on simulated traffic through the real policy: a good task reaches all, a tail-breaking one none, over a restart."""

import json
import random
import time
from dataclasses import dataclass, field

import pytest

from paceline.config import RolloutConfig, RouterConfig, load_config
from paceline.types import Mode
from router.guard import Guard
from router.ledger.book import Book
from router.ledger.group import Arm, Group
from router.ledger.keeper import Keeper
from router.ledger.memory import Memory, OwnKeeper
from router.ledger.store import Store
from router.ledger.sums import AT, add_speed, no_sums
from router.ledger_set_up import open_keeper
from router.plan import DecodingWish, PlanTable
from router.policy import Ask, Policy
from router.quantiles import bin_of
from router.rollout import ORDERS, Order, Rollout, Said, Stage, orders_from, standings_from, with_orders

PLAIN_S, TOKENS = 0.02, 60


def good(rng):
    """Seconds a token: 0.65 of plain, every request."""
    return 0.65 * PLAIN_S * rng.uniform(0.9, 1.1)


def tail_breaking(rng):
    """0.6 of plain, but one request in twelve takes twice as long as plain: faster on the mean."""
    return PLAIN_S * (2.0 if rng.random() < 1 / 12 else 0.6) * rng.uniform(0.9, 1.1)


def slow(rng):
    """1.2 of plain, every request."""
    return 1.2 * PLAIN_S * rng.uniform(0.9, 1.1)


def ask(name: str, task: str) -> Ask:
    """An automatic request, with the one drafter at hand."""
    wish, versions, available = DecodingWish(), {"ngram": "1@t"}, {"ngram": True}
    return Ask(name, task, "", 0.0, 50, 100, wish, versions, available, has_room=True)


@dataclass
class Traffic:
    """Requests of one task through the policy; what they did goes to the judge, as router and ledger do it."""

    seed: int
    task: str = "code"
    kind: object = good
    gate: str = "on"
    judge: Rollout = field(default_factory=Rollout)

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.sent, self.now, self.moves = 0, 0.0, []
        self.restart()

    def restart(self):
        """A new router and a new writer, from the document that the last one wrote."""
        document = self.judge.document()
        self.judge = Rollout()
        self.judge.restore(json.loads(json.dumps(document)))
        config = RouterConfig(holdout=0.03, rollout=RolloutConfig(gate=self.gate))
        self.policy = Policy(config, PlanTable({}), Memory(OwnKeeper(Keeper(""))))
        self.policy.learn({"rollout": document})

    def say(self, said, **order):
        self.judge.heard(
            ORDERS, with_orders("[]", [Order(0, said, self.task, "ngram", **order)] * (1 + self.sent))
        )
        self.look()

    def look(self):
        decided = self.judge.step(Book(), self.now)
        if decided:
            self.moves += [(self.sent, audit.words) for audit in decided[1]]
            self.policy.learn({"rollout": decided[0]})

    def run(self, requests):
        for _ in range(requests):
            self.sent += 1
            self.now += 0.2
            name = f"{self.seed}/{self.sent}"
            decision = self.policy.decide(ask(name, self.task))
            speculative = decision.plan.mode is Mode.SPECULATIVE
            gap = self.kind(self.rng) if speculative else PLAIN_S * self.rng.uniform(0.9, 1.1)
            row = no_sums()
            row[AT["requests"]] = 1
            add_speed(row, TOKENS, TOKENS * gap)
            bins = {("gap", bin_of(gap)): 1, ("ttft", bin_of(0.1 * self.rng.uniform(0.95, 1.05))): 1}
            drafter = "ngram" if speculative else ""
            self.judge.observe(
                Group(self.task, "", drafter, "1@t", "", "0", "1", decision.arm.value), row, bins
            )
            if self.sent % 5 == 0:
                self.look()

    @property
    def standing(self):
        return self.judge.standings()[self.task, "ngram"]


@pytest.mark.parametrize("seed", range(3))
def test_a_good_task_reaches_all_requests_over_a_restart(seed):
    """From a passed check to 100 % within 900 requests, with the router restarted after 350 and after 700."""
    traffic = Traffic(seed)
    traffic.say(Said.PASSED, note="check of 280 requests")
    assert traffic.standing.share == 0.1
    traffic.run(350)
    before = traffic.standing
    traffic.restart()
    assert traffic.standing == before
    traffic.run(350)
    traffic.restart()
    traffic.run(200)
    assert (traffic.standing.stage, traffic.standing.share) == (Stage.FULL, 1.0)
    traffic.run(2000)
    assert traffic.standing.share == 1.0


def test_what_was_cleared_is_called_unchecked():
    """And not something that an operator said."""
    traffic = Traffic(1)
    traffic.say(Said.ALLOW)
    assert traffic.standing.reason == "said by an operator"
    traffic.run(1)
    traffic.say(Said.CLEAR)
    assert (traffic.standing.stage, traffic.standing.share) == (Stage.UNCHECKED, 0.0)
    assert traffic.standing.reason == "not checked since it was cleared by an operator"


@pytest.mark.parametrize("seed", range(4))
def test_a_task_whose_tail_breaks_returns_to_nothing_over_a_restart(seed):
    """Faster on the mean, one request in twelve twice as slow: back at 0 % within 1,500 requests, and it stays there."""
    traffic = Traffic(seed, kind=tail_breaking)
    traffic.say(Said.PASSED)
    traffic.run(300)
    traffic.restart()
    traffic.run(1200)
    assert (traffic.standing.stage, traffic.standing.share) == (Stage.STOPPED, 0.0)
    assert "the tail is broken" in traffic.standing.reason
    traffic.restart()
    traffic.run(300)
    assert traffic.standing.share == 0.0
    traffic.say(Said.PASSED)
    assert traffic.standing.share == 0.1


def test_a_tail_that_breaks_at_full_share_is_seen_too():
    """Then only the holdout and what was kept of the canary's plain requests are left to compare with: within 800 requests."""
    traffic = Traffic(5)
    traffic.say(Said.PASSED)
    traffic.run(1200)
    assert traffic.standing.share == 1.0
    traffic.kind = tail_breaking
    traffic.run(800)
    assert traffic.standing.share == 0.0


def test_a_slow_task_shrinks_step_by_step_and_stops():
    """Set at a half by an operator: 25 %, 10 %, nothing."""
    traffic = Traffic(6, kind=slow)
    traffic.say(Said.SET, share=0.5)
    traffic.run(1500)
    assert traffic.standing.share == 0.0
    shares = [words for _, words in traffic.moves]
    assert any("50% -> 25%" in words for words in shares) or "the tail is broken" in traffic.standing.reason


def test_good_tasks_are_rarely_stopped():
    """20 rollouts of 2,500 requests each whose tail is no heavier: none stops (odds of a false stop under 1 in 20 each)."""
    stopped = 0
    for seed in range(100, 120):
        traffic = Traffic(seed)
        traffic.say(Said.PASSED)
        traffic.run(1000)
        stopped += traffic.standing.share == 0.0
    assert stopped <= 1


def test_with_the_gate_in_force_nothing_speculates_unchecked():
    """Not even the few that try; a wish and an operator's word still count. Reasons are in words."""
    traffic = Traffic(7, task="chat")
    arms = []
    for i in range(500):
        found = traffic.policy.decide(ask(str(i), "chat"))
        arms.append(found.arm)
    assert set(arms) == {Arm.OFF}
    assert "not rolled out for chat: unchecked" in found.plan.reason
    traffic.say(Said.ALLOW)
    traffic.run(400)
    assert traffic.standing.stage is Stage.OVERRIDE
    assert traffic.policy.decide(
        Ask("x9", "chat", "", 0.0, 50, 100, DecodingWish(), {"ngram": "1@t"}, {"ngram": True}, has_room=True)
    ).plan.mode is Mode.SPECULATIVE  # fmt: skip


def test_an_override_is_not_moved_by_windows():
    """The operator's share stands though every window fails."""
    traffic = Traffic(8, kind=slow)
    traffic.say(Said.ALLOW, share=0.5, note="incident 9")
    traffic.run(800)
    assert (traffic.standing.stage, traffic.standing.share) == (Stage.OVERRIDE, 0.5)


def test_without_the_gate_nothing_changes():
    """The default: copying tasks speculate at once, whatever a rollout says."""
    traffic = Traffic(9, gate="off")
    traffic.say(Said.STOP)
    found = traffic.policy.decide(
        Ask("a", "code", "", 0.0, 50, 100, DecodingWish(), {"ngram": "1@t"}, {"ngram": True}, has_room=True)
    )
    assert found.plan.mode is Mode.SPECULATIVE
    assert RouterConfig().rollout.gate == "off"


def test_orders_and_state_outlive_the_writer(tmp_path):
    """On disk beside the sums; an order is carried out once, also when the writer died before it could."""
    path = str(tmp_path / "ledger.sqlite")
    first = Keeper(path, judges=[Guard(), Rollout()])
    first.start()
    document = with_orders("", [Order(0, Said.PASSED, "code", "ngram", note="n")])
    first.put_document(ORDERS, document).result(10)
    deadline = time.monotonic() + 20
    while "rollout" not in first.news().result(10).documents and time.monotonic() < deadline:
        time.sleep(0.05)
    first.stop()
    judge = Rollout()
    second = Keeper(path, judges=[Guard(), judge])
    second.start()
    told = standings_from(second.news().result(10).documents["rollout"])
    assert told["code", "ngram"].share == 0.1
    second.stop()
    assert judge.standings()["code", "ngram"].stage is Stage.CANARY
    assert [
        order.number for order in orders_from(with_orders(document, [Order(0, Said.STOP, "a", "b")]))
    ] == [1, 2]


def test_an_order_is_carried_out_where_those_before_it_cannot_be_read(tmp_path, monkeypatch):
    """Their numbers are not given again: neither while their outcome is known, nor where nothing is."""
    monkeypatch.setattr("router.ledger.keeper.STEP_S", 0.01)
    path = str(tmp_path / "ledger.sqlite")
    config = load_config(None, [f"router.ledger.path='{path}'"]).router

    def say(said: Said) -> int:
        """Through a writer that opens the file; the order's number."""
        keeper = open_keeper(config)
        keeper.start()
        before = keeper.news().result(10).documents.get(ORDERS, "")
        document = with_orders(before, [Order(0, said, "qa", "ngram", at=time.time())])
        keeper.put_document(ORDERS, document).result(10)
        number = orders_from(document)[-1].number
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            told = keeper.news().result(10).documents.get("rollout", "")
            if told and json.loads(told)["applied"] >= number:
                break
            time.sleep(0.05)
        keeper.stop()
        return number

    def standing() -> Stage:
        store = Store.to_read(path)
        told = standings_from(store.documents()["rollout"])["qa", "ngram"]
        store.close()
        return told.stage

    numbers = [say(Said.ALLOW), say(Said.CLEAR)]
    for lost, said, stage in (
        ([ORDERS], Said.ALLOW, Stage.OVERRIDE),
        ([ORDERS, "rollout"], Said.STOP, Stage.STOPPED),
    ):
        store = Store(path)
        store.write([], documents=dict.fromkeys(lost, "[5"))
        store.close()
        numbers.append(say(said))
        assert standing() is stage
        assert numbers == sorted(set(numbers))


def test_an_order_that_was_not_carried_out_yet_is_after_a_restart(tmp_path):
    """Written, then killed: the next writer hears it from the disk."""
    path = str(tmp_path / "ledger.sqlite")
    first = Keeper(path)  # a writer without judges: nobody carries it out
    first.start()
    first.put_document(ORDERS, with_orders("", [Order(0, Said.ALLOW, "qa", "ngram", 0.3)])).result(10)
    first.stop()
    judge = Rollout()
    second = Keeper(path, judges=[judge])
    second.start()
    deadline = time.monotonic() + 20
    while "rollout" not in second.news().result(10).documents and time.monotonic() < deadline:
        time.sleep(0.05)
    second.stop()
    assert judge.standings()["qa", "ngram"].share == 0.3
