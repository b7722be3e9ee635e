"""From a quick drafter's thread to its slower half's: sequences, questions, and what the slower half refuses.

    quick thread            slow thread
    question -> "pass" ---> Open or Extend, with all tokens since the last time
                            answer ---------------------------------> link
    next question, answered quickly: nothing goes over (or the old question is taken back)

The slower half hears only of questions that are for it and catches up then, in one go. Everything but ``_delivered``
happens on the quick thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from draft_service.news import Alone, Answer, Close, Deliver, Event, Extend, Open, Question, Refused

Post = Callable[[Sequence[Event]], None]


@dataclass(slots=True)
class _Passed:
    num_sent: int
    asked: bool


class Relay:
    """See the module. ``post`` takes news for the slow thread, ``tell`` news for the quick one."""

    def __init__(self, post: Post, tell: Post) -> None:
        self._post = post
        self._tell = tell
        self._passed: dict[int, _Passed] = {}
        self._alone: set[int] = set()
        self._wrapped: dict[Deliver, Deliver] = {}

    def is_alone(self, handle: int) -> bool:
        """Whether the slower half has refused this sequence."""
        return handle in self._alone

    def ask(self, opening: Open, token_ids: Sequence[int], question: Question) -> None:
        """The question is the slower half's; its answer goes to the link without passing here again."""
        handle = opening.handle
        passed = self._passed.get(handle)
        if passed is None:
            self._passed[handle] = _Passed(len(token_ids), asked=True)
            news: Event = replace(
                opening,
                token_ids=[*token_ids],
                question=question,
                deliver=self._delivery(opening.deliver),
                origin=None,  # one text, however many threads see it
            )
        else:
            news = Extend(handle, [*token_ids[passed.num_sent :]], question)
            passed.num_sent, passed.asked = len(token_ids), True
        self._post([news])

    def answered(self, handle: int, token_ids: Sequence[int]) -> None:
        """The quick half answers this time: an older question over there is void."""
        passed = self._passed.get(handle)
        if passed is not None and passed.asked:
            self._post([Extend(handle, [*token_ids[passed.num_sent :]], None)])
            passed.num_sent, passed.asked = len(token_ids), False

    def refused(self, handle: int) -> None:
        """The slower half has dropped the sequence."""
        if self._passed.pop(handle, None) is not None:
            self._alone.add(handle)

    def close(self, handle: int) -> None:
        """The sequence is over."""
        self._alone.discard(handle)
        if self._passed.pop(handle, None) is not None:
            self._post([Close(handle)])

    def _delivery(self, deliver: Deliver) -> Deliver:
        """The same function for the same link: answers of one link stay one message."""
        if deliver not in self._wrapped:
            if len(self._wrapped) >= 64:  # links come and go
                self._wrapped.clear()
            self._wrapped[deliver] = lambda answers: self._delivered(deliver, answers)
        return self._wrapped[deliver]

    def _delivered(self, deliver: Deliver, answers: list[Answer]) -> None:
        """On the slow thread. A refusal is no matter of the link: the quick half goes on alone."""
        refusals = [answer for answer in answers if isinstance(answer, Refused)]
        if refusals:
            self._tell([Alone(answer.handle) for answer in refusals])
        given: list[Answer] = [answer for answer in answers if not isinstance(answer, Refused)]
        if given:
            deliver(given)
