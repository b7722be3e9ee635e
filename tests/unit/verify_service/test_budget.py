"""How much prompt runs beside streams."""

import pytest

from verify_service.budget import MAX_STRETCH, MOST_CROWD, PrefillBudget


def test_alone_a_prompt_gets_the_largest_chunk() -> None:
    """Nobody to disturb."""
    assert PrefillBudget(256).tokens(decoding=0, waiting=1) == 256


def test_beside_streams_the_step_is_stretched_to_the_bound_at_most() -> None:
    """Learned from steps of 60 ms and 1.5 ms a prompt token."""
    budget = PrefillBudget(256)
    budget.observe(0.060, 0, decodes=True)
    beside(budget, 34, 0.060, 0.0015)
    tokens = budget.tokens(decoding=4, waiting=1)
    assert 0.060 + 0.0015 * tokens == pytest.approx(MAX_STRETCH * 0.060, rel=0.05)


def test_a_prompt_is_never_starved_nor_above_the_setting() -> None:
    """Bounds at both ends."""
    slow, fast = PrefillBudget(256), PrefillBudget(256)
    for _ in range(30):
        slow.observe(0.001, 0, decodes=True)
        slow.observe(1.0, 16, decodes=True)
        fast.observe(1.0, 0, decodes=True)
        fast.observe(1.001, 256, decodes=True)
    assert slow.tokens(decoding=4, waiting=1) == 1
    assert fast.tokens(decoding=4, waiting=1) <= 256
    assert PrefillBudget(8).tokens(decoding=4, waiting=1) == 8


def beside(budget: PrefillBudget, steps: int, decode_s: float, token_s: float) -> list[int]:
    """Prompt tokens of so many steps beside streams, at these costs."""
    found = []
    for _ in range(steps):
        found.append(budget.tokens(decoding=4, waiting=1))
        budget.observe(decode_s + found[-1] * token_s, found[-1], decodes=True)
    return found


def test_a_prompt_that_gets_dearer_with_its_length_does_not_stretch_steps() -> None:
    """As measured with four streams on one thread: a token costs 0.7 ms at first and 3.6 ms behind 4,096 others."""
    budget = PrefillBudget(256)
    beside(budget, 1, 0.0088, 0.0007)
    done, stretches, prompt_s, alone_s = 0, [], 0.0, 0.0
    while done < 4096:
        tokens = min(budget.tokens(decoding=4, waiting=1), 4096 - done)
        added_s = sum(0.0007 + 0.0029 * (done + i) / 4096 for i in range(tokens))
        budget.observe(0.0088 + added_s, tokens, decodes=True)
        stretches.append((0.0088 + added_s) / 0.0088)
        prompt_s += 0.0088 + added_s
        alone_s += added_s
        done += tokens
    assert max(stretches) <= 2.5
    assert prompt_s <= 2.8 * alone_s, "nor is the prompt starved"


def test_a_machine_that_slows_down_under_a_prompt_does_not_starve_it() -> None:
    """All steps take four times as long from now on, those without prompt tokens too: the chunks stay what they were."""
    budget = PrefillBudget(256)
    usual = beside(budget, 200, 0.010, 0.001)[-20:]
    slowed = beside(budget, 600, 0.040, 0.004)[-20:]
    assert sum(slowed) == pytest.approx(sum(usual), rel=0.2)


def test_an_unknown_cost_starts_small() -> None:
    """The first prompt beside streams does not make them wait for a whole chunk."""
    assert PrefillBudget(256).tokens(decoding=4, waiting=1) <= 16


def test_many_who_wait_may_stretch_a_step_further() -> None:
    """As much again for each stream's worth of them, up to a bound; a few who wait change nothing."""
    budget = PrefillBudget(256)
    budget.observe(0.060, 0, decodes=True)
    beside(budget, 34, 0.060, 0.0015)
    few, as_many, twice, crowd, more = (
        budget.tokens(decoding=4, waiting=waiting) for waiting in (1, 4, 8, 32, 3200)
    )
    assert few == as_many
    assert twice == pytest.approx(2 * few, abs=1)
    assert crowd == more == pytest.approx(MOST_CROWD * few, rel=0.05)
