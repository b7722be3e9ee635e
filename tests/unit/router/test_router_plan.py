"""The plan and its reason."""

import pytest

from paceline.config import PlanRule
from paceline.errors import ConfigError
from paceline.types import Mode
from router.plan import STAND_INS, DecodingWish, PlanTable
from router.task_type import TASK_TYPES, UNSURE

HERE = {"ngram": True}


def test_every_type_of_task_has_a_row_with_a_reason() -> None:
    """The unsure one too, and one that the settings added."""
    for task_type in (*TASK_TYPES, UNSURE, "mine"):
        assert PlanTable({}).reason(task_type)
        assert PlanTable({}, ["mine"]).rule(task_type).mode in {"plain", "speculative"}


@pytest.mark.parametrize(
    "task_type", ["summarization", "extraction", "rewriting", "code", "rag", "structured_output"]
)
def test_tasks_that_copy_from_their_prompt_are_drafted_from_it(task_type: str) -> None:
    """Prompt lookup or better with k from 4 to 8."""
    rule = PlanTable({}).rule(task_type)
    assert rule.mode == "speculative"
    assert 4 <= rule.k <= 8


@pytest.mark.parametrize("task_type", ["creative_writing", "chat", "translation", "qa", UNSURE])
def test_everything_else_is_drafted_while_it_is_cool(task_type: str) -> None:
    """Never worse: hot requests of tasks that copy little are decoded plainly."""
    rule = PlanTable({}).rule(task_type)
    assert (rule.mode, rule.max_temperature) == ("speculative", 0.9)
    assert PlanTable({}).rule("classification").mode == "plain"


def test_a_wish_wins_over_the_table_and_the_reason_says_so() -> None:
    """Plain and speculative; drafter and k by the request, else by the table."""
    table = PlanTable({})
    assert table.as_wished("code", DecodingWish(Mode.PLAIN), HERE).mode is Mode.PLAIN
    asked = table.as_wished(
        "chat", DecodingWish(Mode.SPECULATIVE, "model", 3), {"ngram": True, "model": True}
    )
    assert (asked.drafter, asked.k_max) == ("model", 3)
    assert "asked for by the request" in asked.reason
    default = table.as_wished("chat", DecodingWish(Mode.SPECULATIVE), HERE)
    assert (default.drafter, default.k_max) == ("ngram", 4)


def test_a_wish_for_a_drafter_that_is_away_stays_and_says_so() -> None:
    """The verify tier takes it up when it is back."""
    plan = PlanTable({}).as_wished("code", DecodingWish(Mode.SPECULATIVE, "ngram"), {"ngram": False})
    assert plan.mode is Mode.SPECULATIVE
    assert "not available now" in plan.reason


def test_a_wish_without_a_drafter_takes_one_that_is_there() -> None:
    """The table's first, then any that is available, then any that is known."""
    wish = DecodingWish(Mode.SPECULATIVE)
    table = PlanTable({})
    assert table.as_wished("code", wish, {"a": True, "ngram": True}).drafter == "ngram"
    assert table.as_wished("code", wish, {"a": True, "ngram": False}).drafter == "a"
    assert table.as_wished("code", wish, {"a": False, "b": False}).drafter == "a"
    none = table.as_wished("code", wish, {})
    assert none.mode is Mode.PLAIN
    assert "no drafter" in none.reason


def test_the_table_takes_the_best_drafter_that_is_there() -> None:
    """The cascade, else the suffix drafter, else prompt lookup; a rule of the settings is not reinterpreted."""
    assert PlanTable({}).preferred("code") == STAND_INS
    rule = PlanRule(mode="speculative", drafter="mine")
    assert PlanTable({"code": rule}).preferred("code") == ("mine",)


def test_the_settings_stand_above_the_table() -> None:
    """Their reason is shown; a rule for no type of task is a wrong setting."""
    rule = PlanRule(mode="speculative", drafter="model", k=2, reason="we measured it")
    table = PlanTable({"chat": rule, "default": rule, "mine": rule}, ["mine"])
    for task_type in ("chat", UNSURE, "mine"):
        assert (table.rule(task_type), table.reason(task_type)) == (rule, "we measured it")
        assert table.is_set(task_type)
    assert not table.is_set("code")
    with pytest.raises(ConfigError, match="poetry"):
        PlanTable({"poetry": rule})
