"""How much prompt runs beside streams."""

import pytest

from verify_service.budget import MAX_STRETCH, PrefillBudget


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
    assert slow.tokens(decodes=True) == 1
    assert fast.tokens(decodes=True) <= 256
    assert PrefillBudget(8).tokens(decodes=True) == 8


def test_a_prompt_that_gets_dearer_with_its_length_does_not_stretch_steps() -> None:
    """As measured with four streams on one thread: a token costs 1 ms at first and 7.5 ms behind 4,096 others."""
    budget = PrefillBudget(256)
    for _ in range(20):
        budget.observe(0.015, 0, decodes=True)
    done, stretches, prompt_s = 0, [], 0.0
    while done < 4096:
        tokens = min(budget.tokens(decodes=True), 4096 - done)
        added_s = sum(0.001 + 0.0065 * (done + i) / 4096 for i in range(tokens))
        budget.observe(0.015 + added_s, tokens, decodes=True)
        stretches.append((0.015 + added_s) / 0.015)
        prompt_s += 0.015 + added_s
        done += tokens
    assert max(stretches) <= 2.5
    assert prompt_s <= 2.5 * sum(0.001 + 0.0065 * i / 4096 for i in range(4096)), "nor is the prompt starved"


def test_an_unknown_cost_starts_small() -> None:
    """The first prompt beside streams does not make them wait for a whole chunk."""
    assert PrefillBudget(256).tokens(decodes=True) <= 16
