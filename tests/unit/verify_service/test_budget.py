"""How much prompt runs beside streams."""

import pytest

from verify_service.budget import FEWEST_TOKENS, MAX_STRETCH, PrefillBudget


def test_alone_a_prompt_gets_the_largest_chunk() -> None:
    """Nobody to disturb."""
    assert PrefillBudget(256).tokens(decodes=False) == 256


def test_beside_streams_the_step_is_stretched_to_the_bound_at_most() -> None:
    """Learned from steps of 60 ms and 1.5 ms a prompt token."""
    budget = PrefillBudget(256)
    for _ in range(30):
        budget.observe(0.060, 0, decodes=True)
        tokens = budget.tokens(decodes=True)
        budget.observe(0.060 + 0.0015 * tokens, tokens, decodes=True)
    tokens = budget.tokens(decodes=True)
    assert 0.060 + 0.0015 * tokens == pytest.approx(MAX_STRETCH * 0.060, rel=0.05)


def test_a_prompt_is_never_starved_nor_above_the_setting() -> None:
    """Bounds at both ends."""
    slow, fast = PrefillBudget(256), PrefillBudget(256)
    for _ in range(30):
        slow.observe(0.001, 0, decodes=True)
        slow.observe(1.0, 16, decodes=True)
        fast.observe(1.0, 0, decodes=True)
        fast.observe(1.001, 256, decodes=True)
    assert slow.tokens(decodes=True) == FEWEST_TOKENS
    assert fast.tokens(decodes=True) <= 256
    assert PrefillBudget(8).tokens(decodes=True) == 8


def test_an_unknown_cost_starts_small() -> None:
    """The first prompt beside streams does not make them wait for a whole chunk."""
    assert PrefillBudget(256).tokens(decodes=True) <= 64
