"""The verdict on a block, as a pure function."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.types import FinishReason
from verify_service.verdict import judge

NO_STOP: frozenset[int] = frozenset()


def test_all_agree_gives_the_bonus_token() -> None:
    """K accepted and the last row's own token on top."""
    verdict = judge([1, 2, 3], [1, 2, 3, 4], stop_ids=NO_STOP, room=10)
    assert verdict.committed == (1, 2, 3, 4)
    assert (verdict.accepted, verdict.ignored, verdict.finish) == (3, 0, None)


def test_first_unequal_target_token_replaces_the_guess() -> None:
    """Nothing behind the first disagreement is looked at, even if it agrees again."""
    verdict = judge([1, 9, 3], [1, 2, 3, 4], stop_ids=NO_STOP, room=10)
    assert verdict.committed == (1, 2)
    assert (verdict.accepted, verdict.ignored) == (1, 0)


def test_plain_round_commits_the_targets_token() -> None:
    """K = 0 is plain decoding."""
    verdict = judge([], [7], stop_ids=NO_STOP, room=5)
    assert verdict.committed == (7,)
    assert (verdict.accepted, verdict.ignored, verdict.finish) == (0, 0, None)


def test_nothing_after_a_stop_token_inside_an_accepted_block() -> None:
    """The stop token is committed, what agreed behind it is ignored."""
    verdict = judge([1, 0, 3, 4], [1, 0, 3, 4, 5], stop_ids=frozenset({0}), room=10)
    assert verdict.committed == (1, 0)
    assert (verdict.accepted, verdict.ignored, verdict.finish) == (2, 2, FinishReason.STOP)


def test_stop_token_as_replacement_finishes() -> None:
    """A stop token that the drafter did not guess ends the output as well."""
    verdict = judge([1, 5], [1, 0, 9], stop_ids=frozenset({0}), room=10)
    assert verdict.committed == (1, 0)
    assert (verdict.accepted, verdict.ignored, verdict.finish) == (1, 0, FinishReason.STOP)


@pytest.mark.parametrize("room", range(1, 6))
def test_room_cuts_exactly(room: int) -> None:
    """Never more than the room; what agreed behind the cut is ignored."""
    verdict = judge([1, 2, 3], [1, 2, 3, 4], stop_ids=NO_STOP, room=room)
    assert len(verdict.committed) == min(room, 4)
    assert verdict.finish is (FinishReason.LENGTH if room <= 4 else None)
    assert verdict.accepted + verdict.ignored == 3


def test_stop_wins_over_length_on_the_last_token() -> None:
    """The last token allowed is a stop token: the model ended by itself."""
    assert judge([], [0], stop_ids=frozenset({0}), room=1).finish is FinishReason.STOP


@given(
    target=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    noise=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    stop=st.sets(st.integers(0, 3), max_size=2),
    room=st.integers(1, 12),
)
def test_committed_is_always_a_prefix_of_the_targets_tokens(
    target: list[int], noise: list[int], stop: set[int], room: int
) -> None:
    """Whatever the drafter says, only target tokens are committed, at least one, and the counts hold."""
    draft = noise[: len(target) - 1]
    verdict = judge(draft, target, stop_ids=stop, room=room)
    assert verdict.committed == tuple(target[: len(verdict.committed)])
    assert 1 <= len(verdict.committed) <= min(room, len(target))
    assert 0 <= verdict.accepted + verdict.ignored <= len(draft)
    assert verdict.accepted <= len(verdict.committed)
    assert all(token not in stop for token in verdict.committed[:-1])
