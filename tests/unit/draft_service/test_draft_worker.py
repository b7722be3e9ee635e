"""The drafters' thread: batches, failures, room, and who waits for whom."""

import threading

import pytest

from draft_service.news import Close, Drafted, Extend, Open, Question, Refused, Taken
from draft_service.refusal import RefusalReason
from draft_service.worker import DraftWorker
from paceline.testing.scripted_drafter import ScriptedDrafter
from paceline.types import SamplingParams


class Answers:
    """Collects what the worker delivers."""

    def __init__(self):
        self.batches = []
        self._arrived = threading.Condition()

    def deliver(self, answers):
        with self._arrived:
            self.batches.append(answers)
            self._arrived.notify()

    def wait(self, count):
        """All answers so far, once there are ``count``."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.all()) >= count, timeout=10), self.batches
            return self.all()

    def all(self):
        """All but the news of what was taken, which goes over no link."""
        return [answer for batch in self.batches for answer in batch if not isinstance(answer, Taken)]

    def taken(self):
        return [answer.block for batch in self.batches for answer in batch if isinstance(answer, Taken)]


@pytest.fixture
def answers():
    return Answers()


@pytest.fixture
def run():
    """Starts a worker around drafters; ends it after the test."""
    workers = []

    def start(*drafters):
        worker = DraftWorker("test", {drafter.name: drafter for drafter in drafters})
        worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        assert worker.stop(5)


def ask(k=4, round_index=0):
    return Question(k, round_index, 0.0)


def opening(answers, handle, token_ids=(1, 2, 3), *, drafter="scripted", question=None, vocab_size=100):
    return Open(handle, drafter, list(token_ids), 1, SamplingParams(), vocab_size, question, answers.deliver)


def settle(worker, answers, handle=999):
    """Returns when the worker has seen everything posted before: an extra sequence is asked and answered."""
    seen = len(answers.all())
    worker.post([opening(answers, handle, [7], question=ask(1))])
    answers.wait(seen + 1)
    worker.post([Close(handle)])


def count_up(request):
    return [request.token_ids[-1] + 1 + i for i in range(request.k)]


def test_one_batch_for_the_news_of_one_message(run, answers):
    """All questions of one post reach the drafter together, and their answers come back together."""
    drafter = ScriptedDrafter(count_up)
    worker = run(drafter)
    worker.post([opening(answers, handle, [handle], question=ask(2)) for handle in (1, 2, 3)])
    got = answers.wait(3)
    assert drafter.batches == [(1, 2, 3)]
    assert len(answers.batches) == 1
    assert [(a.handle, a.base_len, a.token_ids) for a in got] == [
        (1, 1, [2, 3]),
        (2, 1, [3, 4]),
        (3, 1, [4, 5]),
    ]


def test_only_the_newest_question_is_answered(run, answers):
    """Several commits that arrive while the drafter is busy are one question: the last."""
    drafter = ScriptedDrafter(count_up)
    worker = run(drafter)
    drafter.hang()
    worker.post([opening(answers, 1, [1], question=ask(1))])
    assert drafter.hanging.wait(5)
    worker.post([Extend(1, [5], ask(1, round_index=1))])
    worker.post([Extend(1, [6, 7], ask(1, round_index=2))])
    drafter.let_go()
    got = answers.wait(2)
    assert [(a.base_len, a.token_ids, a.question.round_index) for a in got] == [(1, [2], 0), (4, [8], 2)]


def test_a_commit_without_question_takes_the_old_one_back(run, answers):
    """k = 0 mirrors only: nothing is drafted for the sequence, and it is up to date when asked next."""
    drafter = ScriptedDrafter(count_up)
    worker = run(drafter)
    drafter.hang()
    worker.post([opening(answers, 1, [1], question=ask(1)), opening(answers, 2, [1])])
    assert drafter.hanging.wait(5)
    worker.post([Extend(2, [5], ask(1)), Extend(2, [6], None)])
    drafter.let_go()
    settle(worker, answers)
    assert not [a for a in answers.all() if a.handle == 2]
    worker.post([Extend(2, [7], ask(1))])
    assert answers.wait(3)[-1].token_ids == [8]


def test_a_prompt_half_read_is_asked_again(run, answers):
    """None from the drafter keeps the question; the time of all its steps is counted."""
    steps = iter([None, None, [42]])
    drafter = ScriptedDrafter(lambda request: next(steps))
    worker = run(drafter)
    worker.post([opening(answers, 1, question=ask())])
    (answer,) = answers.wait(1)
    assert answer.token_ids == [42]
    assert len(drafter.batches) == 3
    assert answer.draft_s > 0


def test_a_failure_harms_only_its_own_sequence(run, answers, caplog):
    """A batch that raises is retried one by one; who raises again is refused, in one log line, and dropped."""

    def script(request):
        if 13 in request.token_ids:
            raise ValueError("unlucky")
        return [1]

    drafter = ScriptedDrafter(script)
    worker = run(drafter)
    worker.post([opening(answers, handle, [handle], question=ask()) for handle in (12, 13, 14)])
    got = {answer.handle: answer for answer in answers.wait(3)}
    assert got[12].token_ids == got[14].token_ids == [1]
    assert got[13] == Refused(13, RefusalReason.INTERNAL, "ValueError: unlucky")
    assert drafter.opened == {12, 14}
    assert [r.levelname for r in caplog.records if r.name == "draft_service.outcomes"] == ["ERROR"]
    worker.post([Extend(13, [1], ask()), Extend(12, [1], ask())])
    assert answers.wait(4)[-1].handle == 12, "a late commit to the dropped sequence is nobody's business"


@pytest.mark.parametrize("guesses", [[1, 2, 3], [100], [-1], "nonsense"])
def test_a_drafter_that_breaks_its_contract_is_refused(run, answers, guesses):
    """Too many guesses and ids outside the vocabulary never leave the draft tier."""
    worker = run(ScriptedDrafter(lambda request: guesses))
    worker.post([opening(answers, 1, question=ask(2))])
    (answer,) = answers.wait(1)
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.INTERNAL


def test_no_room_is_a_refusal_and_a_close_makes_room(run, answers):
    """Capacity is refused in words; a close in the same message comes first."""
    drafter = ScriptedDrafter(count_up, capacity=1)
    worker = run(drafter)
    worker.post([opening(answers, 1, question=ask()), opening(answers, 2, question=ask())])
    got = {answer.handle: answer for answer in answers.wait(2)}
    assert isinstance(got[1], Drafted)
    assert got[2].reason is RefusalReason.CAPACITY
    assert "1 places" in got[2].message
    worker.post([opening(answers, 3, question=ask()), Close(1)])
    assert isinstance(answers.wait(3)[-1], Drafted)


def test_context_limit(run, answers):
    """At the drafter's limit guesses get fewer, behind it the sequence is refused and its room is free."""
    drafter = ScriptedDrafter(count_up, max_context=8)
    worker = run(drafter)
    limits = {5: 4, 6: 3, 7: 2, 8: 1}  # base_len + guesses - 1 <= 8: the last guess is never read
    worker.post([opening(answers, n, range(n), question=ask(4)) for n in (*limits, 9)])
    got = {answer.handle: answer for answer in answers.wait(5)}
    assert {n: len(got[n].token_ids) for n in limits} == limits
    assert got[9] == Refused(9, RefusalReason.CONTEXT, "9 tokens, drafter 'scripted' reads at most 8")
    assert drafter.opened == set(limits)


def test_closed_before_it_was_seen(run, answers):
    """Open and close while the worker is busy: the drafter never hears of the sequence."""
    drafter = ScriptedDrafter(count_up)
    worker = run(drafter)
    drafter.hang()
    worker.post([opening(answers, 1, question=ask())])
    assert drafter.hanging.wait(5)
    worker.post([opening(answers, 2, question=ask())])
    worker.post([Extend(2, [1], ask())])
    worker.post([Close(2)])
    drafter.let_go()
    settle(worker, answers)
    assert all(2 not in batch for batch in drafter.batches)
    assert 2 not in drafter.opened


def test_a_stuck_worker_does_not_pile_up_news(run, answers):
    """While a drafter hangs, sequences that come and go leave nothing in the inbox."""
    drafter = ScriptedDrafter(count_up)
    worker = run(drafter)
    drafter.hang()
    worker.post([opening(answers, 1, question=ask())])
    assert drafter.hanging.wait(5)
    for handle in range(100, 200):
        worker.post([opening(answers, handle, question=ask())])
        worker.post([Extend(handle, [1], ask()), Close(handle)])
    worker.post([Extend(1, [1], ask()), Close(1)])
    assert len(worker._inbox) == 1
    assert worker.busy_s() > 0
    drafter.let_go()
    settle(worker, answers)


def test_two_drafters_of_one_worker(run, answers):
    """Each drafter gets its own batch."""
    one, two = ScriptedDrafter(count_up, name="one"), ScriptedDrafter(lambda r: [], name="two")
    worker = run(one, two)
    worker.post([opening(answers, i, drafter=("one", "two")[i % 2], question=ask(1)) for i in range(4)])
    answers.wait(4)
    assert one.batches == [(0, 2)]
    assert two.batches == [(1, 3)]


def test_stop_says_when_a_drafter_hangs():
    """A thread that does not come back is reported, not waited for."""
    drafter, answers = ScriptedDrafter(count_up), Answers()
    worker = DraftWorker("test", {"scripted": drafter})
    worker.start()
    drafter.hang()
    worker.post([opening(answers, 1, question=ask())])
    assert drafter.hanging.wait(5)
    assert not worker.stop(0.01)
    drafter.let_go()
    assert worker.stop(5)


def test_a_close_that_raises_does_not_end_the_thread(run, answers, caplog):
    """It is against the contract, is logged, and the others go on."""
    drafter = ScriptedDrafter(count_up)
    drafter.close = lambda handle: 1 / 0
    worker = run(drafter)
    worker.post([opening(answers, 1, question=ask())])
    answers.wait(1)
    worker.post([Close(1)])
    worker.post([opening(answers, 2, question=ask())])
    assert answers.wait(2)[-1].handle == 2
    assert "ZeroDivisionError" in caplog.text


def test_a_drafter_tidies_up_between_questions(run, answers):
    """After a close its own work is done piece by piece, until there is none; a question comes in between."""
    drafter = ScriptedDrafter(count_up)
    left, done = [300], threading.Event()

    def tidy():
        left[0] -= 1
        if not left[0]:
            done.set()
        return left[0] > 0

    drafter.tidy = tidy
    worker = run(drafter)
    worker.post([opening(answers, 1, question=ask(1))])
    answers.wait(1)
    assert left == [300], "before a close there is nothing to tidy up"
    worker.post([Close(1)])
    worker.post([opening(answers, 2, question=ask(1))])
    answers.wait(2)
    assert done.wait(5)


def test_tidying_that_fails_is_not_tried_for_ever(run, answers, caplog):
    """It is logged once; the thread goes on with questions."""
    drafter = ScriptedDrafter(count_up)
    drafter.tidy = lambda: 1 / 0
    worker = run(drafter)
    worker.post([opening(answers, 1, question=ask(1))])
    answers.wait(1)
    worker.post([Close(1)])
    settle(worker, answers)
    assert caplog.text.count("failed to tidy up") <= 2
