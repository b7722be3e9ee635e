"""The decision: what comes before what, and a reason in words for each."""

import asyncio
import time
from dataclasses import replace

import pytest

from paceline.config import PlanRule, RouterConfig, TaskRule
from paceline.errors import ConfigError
from paceline.types import Mode
from router.guard import Guard
from router.ledger.group import Arm, Group
from router.ledger.keeper import Keeper
from router.ledger.memory import Memory, OwnKeeper
from router.ledger.sums import AT, add_speed, no_sums
from router.plan import DecodingWish, PlanTable
from router.policy import Ask, Policy, prior_from
from router.rules import Action, Rule, Rules
from router.task_rules import TaskNamer

VERSION = "1@target"


def ask(**changes) -> Ask:
    plain = Ask("r1", "code", "", 0.0, 50, 100, DecodingWish(), {"ngram": VERSION, "model": VERSION}, {"ngram": True}, True)  # fmt: skip
    return replace(plain, **changes)


def policy(**settings) -> Policy:
    config = RouterConfig(**{"holdout": 0.0, **settings})
    memory = Memory(OwnKeeper(Keeper("")))
    return Policy(config, PlanTable(config.plans, config.task_types), memory)


def row(**values: int):
    result = no_sums()
    for name, value in values.items():
        result[AT[name]] = value
    return result


def group(task="code", drafter="ngram", arm="auto") -> Group:
    return Group(task, "", drafter, VERSION, "coupled", "0", "1", arm)


def test_what_the_table_believes_holds_until_something_is_measured():
    """Copying tasks are drafted, others while they are cool; what begins plainly is tried by a few."""
    found = policy().decide(ask())
    assert (found.plan.mode, found.plan.drafter, found.arm) == (Mode.SPECULATIVE, "ngram", Arm.AUTO)
    few = policy()
    assert few.decide(ask(task="chat")).arm is Arm.AUTO
    hot = few.decide(ask(task="chat", temperature=1.0))
    assert (hot.plan.mode, hot.arm) == (Mode.PLAIN, Arm.INELIGIBLE)
    assert "at temperature 1" in hot.plan.reason
    arms = [few.decide(ask(task="classification", request_id=str(i))).arm for i in range(2000)]
    assert set(arms) == {Arm.OFF, Arm.PROBE}
    assert 20 < arms.count(Arm.PROBE) < 120


def test_a_wish_comes_before_everything():
    """Plain or a drafter, also where a rule and the guard say otherwise; never in the holdout."""
    decider = policy(holdout=0.5)
    decider.learn({"rules": Rules([Rule(Action.PLAIN)]).document()})
    for i in range(20):
        wished = decider.decide(ask(request_id=str(i), wish=DecodingWish(Mode.SPECULATIVE, "ngram", 3)))
        assert (wished.plan.drafter, wished.plan.k_max, wished.arm) == ("ngram", 3, Arm.ASKED)
        plain = decider.decide(ask(request_id=str(i), wish=DecodingWish(Mode.PLAIN)))
        assert (plain.plan.mode, plain.arm) == (Mode.PLAIN, Arm.ASKED)


def test_rules_of_operators_pin_and_forbid():
    """The narrowest pin holds and is never drawn for the holdout; a forbidden drafter is not chosen."""
    decider = policy(holdout=0.5)
    rules = Rules([Rule(Action.PLAIN, task="code", note="incident 7"), Rule(Action.SPECULATIVE, task="code", tenant="acme", k=6)])  # fmt: skip
    decider.learn({"rules": rules.document()})
    plain = decider.decide(ask())
    assert (plain.plan.mode, plain.arm) == (Mode.PLAIN, Arm.PINNED)
    assert "incident 7" in plain.plan.reason
    for i in range(20):
        pinned = decider.decide(ask(tenant="acme", request_id=str(i)))
        assert (pinned.plan.mode, pinned.plan.k_max, pinned.arm) == (Mode.SPECULATIVE, 6, Arm.PINNED)
    decider.learn({"rules": Rules([Rule(Action.FORBID, drafter="ngram")]).document()})
    found = decider.decide(ask())
    assert found.plan.mode is Mode.PLAIN
    assert "forbidden by an operator's rule" in found.plan.reason


def test_a_forbidden_drafter_is_taken_only_where_it_is_named():
    """Neither for a request that wants any, nor under a rule that says speculative; with all forbidden, plain."""
    decider = policy()
    here = {"ngram": True, "model": True}
    anything, named = DecodingWish(Mode.SPECULATIVE), DecodingWish(Mode.SPECULATIVE, "ngram")
    forbid = Rule(Action.FORBID, drafter="ngram")
    decider.learn({"rules": Rules([forbid, Rule(Action.SPECULATIVE, task="qa")]).document()})
    assert decider.decide(ask(wish=anything, available=here)).plan.drafter == "model"
    assert decider.decide(ask(task="qa", available=here)).plan.drafter == "model"
    assert decider.decide(ask(wish=named, available=here)).plan.drafter == "ngram"
    decider.learn({"rules": Rules([Rule(Action.FORBID), Rule(Action.SPECULATIVE, task="qa")]).document()})
    for found in (decider.decide(ask(wish=anything)), decider.decide(ask(task="qa"))):
        assert found.plan.mode is Mode.PLAIN
        assert "no drafter to choose" in found.plan.reason


def test_rules_of_one_scope_replace_each_other():
    """And are taken away by it."""
    rules = Rules().plus(Rule(Action.PLAIN, task="qa")).plus(Rule(Action.SPECULATIVE, task="qa", drafter="x"))
    assert [rule.action for rule in rules] == [Action.SPECULATIVE]
    assert list(Rules.parse(rules.document())) == list(rules)
    assert not list(rules.without("qa", "", "x"))


def test_short_outputs_missing_drafters_and_full_memory_go_plain():
    """Each with its reason."""
    decider = policy()
    assert "19 output tokens" in decider.decide(ask(max_tokens=19)).plan.reason
    assert decider.decide(ask(max_tokens=20)).plan.mode is Mode.SPECULATIVE
    assert "'ngram' is not available now" in decider.decide(ask(available={"ngram": False})).plan.reason
    assert "not known to the verify tier" in decider.decide(ask(available={})).plan.reason
    assert (
        "which knows phrase (draft.drafters)" in decider.decide(ask(available={"phrase": True})).plan.reason
    )
    assert "memory" in decider.decide(ask(has_room=False)).plan.reason
    assert decider.decide(ask(has_room=False)).arm is Arm.INELIGIBLE


def test_a_task_whose_outputs_are_short_goes_plain():
    """As measured, whatever max_tokens allows."""
    decider = policy()
    decider._memory.add(group(), row(requests=40, output_tokens=40 * 9))
    found = decider.decide(ask(max_tokens=500))
    assert (found.plan.mode, found.arm) == (Mode.PLAIN, Arm.INELIGIBLE)
    assert "9 output tokens expected" in found.plan.reason


def test_settings_that_say_plain_are_final():
    """A row of router.plans is an operator's word, not a belief: no probes."""
    decider = policy(plans={"code": PlanRule(mode="plain", reason="ours")})
    assert {decider.decide(ask(request_id=str(i))).arm for i in range(500)} == {Arm.PINNED}


def test_the_holdout_is_drawn_from_those_that_could_speculate():
    """Three in a hundred, the same ones every time, with the reason."""
    decider = policy(holdout=0.03)
    arms = {str(i): decider.decide(ask(request_id=str(i))).arm for i in range(3000)}
    drawn = [name for name, arm in arms.items() if arm is Arm.HOLDOUT]
    assert 50 < len(drawn) < 140
    again = decider.decide(ask(request_id=drawn[0]))
    assert (again.arm, again.plan.mode) == (Arm.HOLDOUT, Mode.PLAIN)
    assert "by lot" in again.plan.reason


def test_the_guard_is_obeyed_and_quoted():
    """Off: plain, with the guard's reason; half-open: a share tries."""
    guard = Guard()
    guard._line(("code", "ngram")).switches = 1
    guard._line(("code", "ngram")).reason = "acceptance 0.20"
    for state, arms in (("off", {Arm.OFF}), ("half-open", {Arm.OFF, Arm.PROBE}), ("on", {Arm.AUTO})):
        decider = policy()
        document = guard.document().replace('"state": "on"', f'"state": "{state}"')
        decider.learn({"guard": document})
        found = [decider.decide(ask(request_id=str(i))) for i in range(300)]
        assert {one.arm for one in found} == arms
        if state == "off":
            assert "acceptance 0.20" in found[0].plan.reason


def test_the_fastest_of_the_listed_drafters_is_taken():
    """By measured time per token; one that is unknown is tried by lot."""
    decider = policy(drafters=("model",))
    both = {"ngram": True, "model": True}
    found = [decider.decide(ask(available=both, request_id=str(i))).plan.drafter for i in range(400)]
    assert 2 < found.count("model") < 60
    for drafter, seconds in (("ngram", 1.0), ("model", 0.5)):
        for _ in range(40):
            one = row(requests=1, output_tokens=51)
            add_speed(one, 50, seconds)
            decider._memory.add(group(drafter=drafter), one)
    decider._figures.clear()
    found = [decider.decide(ask(available=both, request_id=str(i))) for i in range(50)]
    assert {one.plan.drafter for one in found} == {"model"}
    assert "ngram 20.0 ms, model 10.0 ms" in " ".join(found[0].considered)


def test_the_controller_gets_what_the_ledger_knows():
    """Acceptance by position of the same task, drafter, version and temperature; nothing where little is known."""
    decider = policy()
    assert decider.decide(ask()).plan.prior is None
    decider._memory.add(group(), row(requests=90, output_tokens=9000, drafted_0=1000, drafted_1=1000, accepted_0=800, accepted_1=400))  # fmt: skip
    decider._figures.clear()
    prior = decider.decide(ask()).plan.prior
    assert prior is not None
    assert prior.by_position == pytest.approx((0.8, 0.5), abs=0.01)
    assert prior.mean == pytest.approx(1200 / 1800)
    assert decider.decide(ask(temperature=1.0)).plan.prior is None
    assert prior_from(row(drafted_0=5, accepted_0=5)) is None


def test_a_decision_takes_microseconds():
    """It stands before every request: under a millisecond of processor time, with a week of other groups known."""
    decider = policy()
    for i in range(200):
        decider._memory.add(replace(group(), task=f"t{i}"), row(requests=1))
    started = time.process_time()
    for i in range(200):
        decider.decide(ask(request_id=str(i)))
    assert time.process_time() - started < 0.2


def namer(*rules: TaskRule, types=("invoices",)) -> TaskNamer:
    return TaskNamer(rules, types, 0.5)


def test_the_task_is_named_by_the_request_then_by_rules_then_by_the_classifier():
    """And the origin is said."""
    one = namer(
        TaskRule(task="invoices", tenant="acme", metadata={"app": "billing"}),
        TaskRule(task="summarization", contains=("wrap up",)),
    )

    def words() -> str:
        return "Translate to German: good morning"

    assert one.name("qa", "acme", {"app": "billing"}, words).name == "qa"
    assert one.name("", "acme", {"app": "billing"}, words).name == "invoices"
    assert one.name("", "acme", {"app": "other"}, words).name == "translation"
    ruled = one.name("", "", {}, lambda: "Please WRAP UP this meeting")
    assert (ruled.name, ruled.origin, ruled.confidence) == (
        "summarization",
        "rule 2 of router.task_rules",
        None,
    )
    assert "sure" in one.name("", "", {}, words).origin


def test_wrong_rules_are_wrong_settings():
    """Unknown types, and types that are there already."""
    with pytest.raises(ConfigError, match="poetry"):
        namer(TaskRule(task="poetry"))
    with pytest.raises(ConfigError, match="code"):
        namer(types=("code",))


def test_two_policies_that_share_a_ledger_agree():
    """What the guard decided and an operator ruled reaches both."""

    async def scenario() -> None:
        keeper = Keeper("", judges=[Guard()])
        keeper.start()
        memories = [Memory(OwnKeeper(keeper)) for _ in range(2)]
        policies = [Policy(RouterConfig(holdout=0.0), PlanTable({}), memory) for memory in memories]
        keeper.put_document("rules", Rules([Rule(Action.PLAIN, task="code")]).document()).result(10)
        for memory in memories:
            await memory.exchange()
        assert [one.decide(ask()).arm for one in policies] == [Arm.PINNED] * 2
        keeper.stop()

    asyncio.run(scenario())
