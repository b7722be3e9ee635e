"""One drafter asked without threads: for whoever replays or scores texts rather than serving them.

The calls that reach the drafter are those of a ``DraftWorker``: opened at the first question, asked again while it reads a
prompt, passed on to its slower half where it says so, closed at the end, then left to tidy up.
"""

from collections.abc import Sequence
from dataclasses import replace

from draft_service.drafters import Drafter, DraftRequest, Pass, Sampled, TwoSpeed
from draft_service.drafters.base import tidy
from paceline.errors import CapacityError


class Asking:
    """See the module. Of a drafter of two speeds both halves."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._slower = drafter.slower if isinstance(drafter, TwoSpeed) else None
        self._open: set[int] = set()
        self._passed: set[int] = set()
        self._alone: set[int] = set()

    def ask(self, batch: Sequence[DraftRequest]) -> list[list[int] | None]:
        """Guesses for each, one batch as long as it lasts; None: the sequence is longer than the drafter can read.

        Raises CapacityError where there is no room for one sequence more, and whatever the drafter raises.
        """
        answers: dict[int, list[int] | None] = {}
        waiting = []
        for request in batch:
            cut = _within(self.drafter, request)
            if cut is None:
                answers[request.handle] = None
                continue
            if request.handle not in self._open:
                self.drafter.open(request.handle)
                self._open.add(request.handle)
            waiting.append(cut)
        while waiting:
            asked = [replace(one, alone=self._is_alone(one.handle)) for one in waiting]
            waiting = []
            passed: list[DraftRequest] = []
            for request, outcome in zip(asked, self.drafter.propose(asked), strict=True):
                if outcome is None:
                    waiting.append(request)
                elif isinstance(outcome, Pass):
                    passed.append(replace(request, k=min(outcome.k, request.k), alone=True))
                else:
                    answers[request.handle] = _tokens(outcome)
            if passed:
                answers |= self._ask_slower(passed)
                waiting += [one for one in asked if one.handle in self._alone and one.handle not in answers]
        return [answers[request.handle] for request in batch]

    def close(self, handle: int) -> None:
        """The text is over."""
        self._alone.discard(handle)
        if handle in self._passed:
            assert self._slower is not None, "passed on"
            self._passed.discard(handle)
            self._slower.close(handle)
        if handle in self._open:
            self._open.discard(handle)
            self.drafter.close(handle)

    def tidy(self) -> None:
        """Do all that waits for a quiet moment."""
        for half in (self.drafter, self._slower):
            while half is not None and tidy(half):
                pass

    def _is_alone(self, handle: int) -> bool:
        return self._slower is None or handle in self._alone

    def _ask_slower(self, passed: list[DraftRequest]) -> dict[int, list[int] | None]:
        """The slower half's answers; for whom it has no room, or whose text is too long for it, is alone from now on."""
        slower, answers, waiting = self._slower, dict[int, list[int] | None](), []
        assert slower is not None, "only such drafters pass questions on"
        for request in passed:
            cut = _within(slower, request)
            try:
                if cut is not None and request.handle not in self._passed:
                    slower.open(request.handle)
                    self._passed.add(request.handle)
            except CapacityError:
                cut = None
            if cut is None:
                self._alone.add(request.handle)
            else:
                waiting.append(cut)
        while waiting:
            again = []
            for request, outcome in zip(waiting, slower.propose(waiting), strict=True):
                if outcome is None:
                    again.append(request)
                else:
                    assert not isinstance(outcome, Pass), "there is nobody slower still"
                    answers[request.handle] = _tokens(outcome)
            waiting = again
        return answers


def _within(drafter: Drafter, request: DraftRequest) -> DraftRequest | None:
    """The request, cut to what the drafter can read: the last guess is never read, so it may lie just behind the limit."""
    if not drafter.max_context:
        return request
    k = min(request.k, drafter.max_context - len(request.token_ids) + 1)
    return replace(request, k=k) if k >= 1 else None


def _tokens(outcome: list[int] | Sampled) -> list[int]:
    return outcome.token_ids if isinstance(outcome, Sampled) else outcome
