"""The arithmetic of speculation against figures known beforehand."""

import pytest

from paceline.economics import (
    accepted_share,
    best_k,
    break_even_acceptance,
    break_even_share,
    expected_tokens,
    survival,
)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (2, {0.4: 1.56, 0.5: 1.75, 0.6: 1.96, 0.7: 2.19, 0.8: 2.44, 0.9: 2.71}),
        (4, {0.4: 1.6496, 0.5: 1.9375, 0.6: 2.3056, 0.7: 2.7731, 0.8: 3.3616, 0.9: 4.0951}),
        (8, {0.4: 1.6662, 0.5: 1.9961, 0.6: 2.4748, 0.7: 3.1988, 0.8: 4.3289, 0.9: 6.1258}),
    ],
)
def test_tokens_of_a_round_to_four_digits(k, expected):
    """The closed form, bonus included; figures in circulation for k = 8 (4.66, 3.60, 2.75, 2.13) are wrong, most of them impossible."""
    for acceptance, tokens in expected.items():
        assert expected_tokens(acceptance, k) == pytest.approx(tokens, abs=5e-5)
        assert expected_tokens(acceptance, k) < 1 / (1 - acceptance)  # the limit of k
        assert 1 + sum(survival([acceptance], k)) == pytest.approx(expected_tokens(acceptance, k))
    assert expected_tokens(1.0, k) == k + 1


def test_draft_of_6_ms_before_a_step_of_28():
    """Four tokens drafted: 10.4 ms a token when all are accepted, 26 at one, 52 at none; break-even near 0.475."""
    round_s, plain_s, k = 0.028 + 4 * 0.006, 0.028, 4
    for accepted, token_s, speed in ((4, 0.0104, 2.7), (1, 0.026, 1.08), (0, 0.052, 0.54)):
        assert round_s / (accepted + 1) == pytest.approx(token_s)
        assert plain_s / (round_s / (accepted + 1)) == pytest.approx(speed, abs=0.01)
    assert break_even_acceptance(round_s, plain_s, k) == pytest.approx(0.475, abs=0.001)
    assert break_even_share(round_s, plain_s, k) == pytest.approx(accepted_share(0.4743, k), abs=1e-3)


def test_break_even_at_the_edges():
    """A draft for nothing pays always; a round longer than all its tokens are worth never does."""
    assert break_even_acceptance(0.01, 0.01, 4) == pytest.approx(0.0, abs=1e-6)
    assert break_even_acceptance(0.051, 0.01, 4) is None
    assert break_even_acceptance(0.05, 0.01, 4) == pytest.approx(1.0, abs=1e-6)
    assert break_even_share(0.9, 0.01, 4) == 1.0
    assert break_even_share(0.005, 0.01, 4) == 0.0


def test_share_and_acceptance_are_two_things():
    """The share of a block is the smaller one."""
    assert accepted_share(0.8, 4) == pytest.approx(0.5904)


def test_the_best_k_is_the_smaller_of_equals():
    """0 is plain decoding."""
    assert best_k([1.0, 0.9, 0.8]) == 0
    assert best_k([1.0, 1.5, 1.5]) == 1
