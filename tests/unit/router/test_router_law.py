"""Which law a plan names: the request's wish, else the server's setting; coupled where nothing is drawn."""

import pytest

from paceline.types import Law, Mode, Plan, SamplingParams
from router.accept import _lawful
from router.plan import DecodingWish, PlanTable

HERE = {"ngram": True}


@pytest.mark.parametrize("default", list(Law))
@pytest.mark.parametrize("wish", [None, *Law])
def test_the_wish_wins_over_the_setting(default, wish):
    """Of speculative requests; a plain one has no law."""
    table = PlanTable({}, law=default)
    asked = table.as_wished("code", DecodingWish(Mode.SPECULATIVE, "ngram", 4, wish), HERE)
    assert asked.law is (wish or default)
    assert table.as_wished("code", DecodingWish(Mode.PLAIN), HERE).law is None


def test_without_a_draw_the_law_is_the_coupled_one():
    """At temperature 0 the plan says so; elsewhere, and for plain plans, it is left as it is."""
    plan = Plan.speculative("ngram", 4, "asked for", Law.BLOCK)
    greedy = _lawful(plan, SamplingParams(temperature=0.0))
    assert greedy.law is Law.COUPLED
    assert greedy.reason == "asked for; at temperature 0 every law is the coupled one"
    for kept in (plan, Plan.plain("so"), Plan.speculative("ngram", 4, "so")):
        assert _lawful(kept, SamplingParams()) is kept
