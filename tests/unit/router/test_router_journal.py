"""Positions: only the next one is taken."""

import pytest

from paceline.errors import EngineError
from router.journal import Journal, JournalError


def test_runs_are_appended_in_order() -> None:
    """The next position follows from prompt and tokens."""
    journal = Journal(prompt_len=10)
    journal.append(10, [1])
    journal.append(11, [2, 3])
    assert list(journal.token_ids) == [1, 2, 3]
    assert journal.next_position == 13
    assert len(journal) == 3


@pytest.mark.parametrize(
    ("position", "words"), [(10, "repeats"), (11, "repeats"), (13, "gap"), (0, "repeats")]
)
def test_a_gap_or_a_repeat_is_an_error_of_ours_and_changes_nothing(position: int, words: str) -> None:
    """Better one INTERNAL than a client that reads a token twice."""
    journal = Journal(prompt_len=10)
    journal.append(10, [1, 2])
    with pytest.raises(JournalError, match=words) as caught:
        journal.append(position, [9])
    assert isinstance(caught.value, EngineError)
    assert list(journal.token_ids) == [1, 2]


def test_an_empty_run_is_refused() -> None:
    """The protocol has none."""
    with pytest.raises(JournalError, match="empty"):
        Journal(prompt_len=1).append(1, [])
