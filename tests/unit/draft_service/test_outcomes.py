"""What is logged of a drafter that fails: enough to find the fault, and no token of anybody's text."""

import logging
from collections.abc import Sequence

import pytest

from draft_service.drafters.base import DraftRequest
from draft_service.outcomes import proposed
from paceline.types import SamplingParams


class Wrong:
    """Guesses outside the vocabulary, or looks for a token where it is not."""

    name, version, slow, max_context = "wrong", "0", False, 0

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def propose(self, batch: Sequence[DraftRequest]) -> list[list[int]]:
        return [[4321, 5]] if self.fault == "outside" else [[{}[4321, 5]]]


@pytest.mark.parametrize("fault", ["outside", "missing"])
def test_the_error_line_holds_no_token(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its drafter, its length, its kind."""
    request = DraftRequest(1, [77_777] * 3, 1, SamplingParams(), 4, 1000)
    (error,) = proposed(Wrong(fault), [request])
    assert isinstance(error, Exception)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.startswith("drafter wrong failed on a sequence of 3 tokens: ")
    assert "4321" not in line
    assert "77777" not in line
