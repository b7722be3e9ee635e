"""The plan and its reason."""

import pytest

from paceline.config import PlanRule
from paceline.errors import ConfigError
from paceline.types import Law, Mode
from router.plan import STAND_INS, DecodingWish, PlanTable
from router.task_type import TASK_TYPES, UNSURE

HERE = {"ngram": True}
NO_WISH = DecodingWish()


def test_every_type_of_task_has_a_plan_with_a_reason() -> None:
    """The unsure one too."""
    for task_type in (*TASK_TYPES, UNSURE):
        plan = PlanTable({}).decide(task_type, NO_WISH, 100, HERE)
        assert plan.reason
        assert (plan.mode is Mode.SPECULATIVE) == (plan.k_max > 0) == (plan.law is Law.COUPLED)


@pytest.mark.parametrize(
    "task_type", ["summarization", "extraction", "rewriting", "code", "rag", "structured_output"]
)
def test_tasks_that_copy_from_their_prompt_are_drafted_from_it(task_type: str) -> None:
    """Prompt lookup with k from 4 to 8."""
    plan = PlanTable({}).decide(task_type, NO_WISH, 100, HERE)
    assert (plan.mode, plan.drafter) == (Mode.SPECULATIVE, "ngram")
    assert 4 <= plan.k_max <= 8


@pytest.mark.parametrize("task_type", ["creative_writing", "chat", "translation", "qa", UNSURE])
def test_everything_else_is_plain(task_type: str) -> None:
    """Never worse."""
    assert PlanTable({}).decide(task_type, NO_WISH, 100, HERE).mode is Mode.PLAIN


def test_a_wish_wins_over_the_table_and_the_reason_says_so() -> None:
    """Plain and speculative; drafter and k by the request, else by the table."""
    table = PlanTable({})
    assert table.decide("code", DecodingWish(Mode.PLAIN), 100, HERE).mode is Mode.PLAIN
    asked = table.decide(
        "chat", DecodingWish(Mode.SPECULATIVE, "model", 3), 5, {"ngram": True, "model": True}
    )
    assert (asked.drafter, asked.k_max) == ("model", 3)
    assert "asked for by the request" in asked.reason
    default = table.decide("chat", DecodingWish(Mode.SPECULATIVE), 5, HERE)
    assert (default.drafter, default.k_max) == ("ngram", 4)


def test_a_wish_for_a_drafter_that_is_away_stays_and_says_so() -> None:
    """The verify tier takes it up when it is back."""
    plan = PlanTable({}).decide("code", DecodingWish(Mode.SPECULATIVE, "ngram"), 100, {"ngram": False})
    assert plan.mode is Mode.SPECULATIVE
    assert "not available now" in plan.reason


def test_a_wish_without_a_drafter_takes_one_that_is_there() -> None:
    """The table's first, then any that is available, then any that is known."""
    wish = DecodingWish(Mode.SPECULATIVE)
    table = PlanTable({})
    assert table.decide("code", wish, 100, {"a": True, "ngram": True}).drafter == "ngram"
    assert table.decide("code", wish, 100, {"a": True, "ngram": False}).drafter == "a"
    assert table.decide("code", wish, 100, {"a": False, "b": False}).drafter == "a"
    none = table.decide("code", wish, 100, {})
    assert none.mode is Mode.PLAIN
    assert "no drafter" in none.reason


def test_short_outputs_and_missing_drafters_make_the_table_plain() -> None:
    """With the reason in words."""
    table = PlanTable({})
    assert "19 output tokens" in table.decide("code", NO_WISH, 19, HERE).reason
    assert table.decide("code", NO_WISH, 20, HERE).mode is Mode.SPECULATIVE
    assert "'cascade' is not available now" in table.decide("code", NO_WISH, 99, {"cascade": False}).reason
    assert "not known to the verify tier" in table.decide("code", NO_WISH, 99, {}).reason


def test_the_table_takes_the_best_drafter_that_is_there() -> None:
    """The cascade, else the suffix drafter, else prompt lookup: a draft tier need not offer all of them."""
    table, names = PlanTable({}), list(STAND_INS)
    while names:
        offered = dict.fromkeys(names, True) | {"a": True}
        assert table.decide("code", NO_WISH, 99, offered).drafter == names.pop(0)
    rule = PlanRule(mode="speculative", drafter="mine")
    own = PlanTable({"code": rule}).decide("code", NO_WISH, 99, {"cascade": True})
    assert own.mode is Mode.PLAIN, "a rule of the operator is not reinterpreted"


def test_the_operators_rules_stand_above_the_table() -> None:
    """Their reason is shown; a rule for no type of task is a wrong setting."""
    rule = PlanRule(mode="speculative", drafter="model", k=2, reason="we measured it")
    table = PlanTable({"chat": rule, "default": rule})
    for task_type in ("chat", UNSURE):
        plan = table.decide(task_type, NO_WISH, 100, {"model": True})
        assert (plan.drafter, plan.k_max, plan.reason) == ("model", 2, "we measured it")
    with pytest.raises(ConfigError, match="poetry"):
        PlanTable({"poetry": rule})
