"""Drafting ahead on the worker's thread: what is pushed, what a verdict finds, who goes first."""

import threading

import pytest
from test_draft_worker import Answers

from draft_service.drafters.base import Branch
from draft_service.news import Close, Drafted, Extend, Open, Question, Refused
from draft_service.worker import DraftWorker
from paceline.link import Lookahead
from paceline.types import SamplingParams

K = 3


class AheadScript:
    """Guesses count up from the last token, by one; a step can be held. ``fails``: looking ahead raises."""

    name, version, slow, one_pass, device = "ahead", "1", True, False, "cpu"

    def __init__(self, *, max_level=2, max_context=0, fails=False):
        self.max_level = max_level
        self.max_context = max_context
        self.fails = fails
        self.asked: list[tuple[tuple[int, ...], int, int]] = []
        self.abandoned: list[int] = []
        self.steps = threading.Semaphore(10_000)

    def open(self, handle):
        pass

    def close(self, handle):
        pass

    def propose(self, batch):
        for one in batch:
            if one.num_hypothetical and not one.offset and self.fails:
                raise ValueError("on purpose")
            if one.num_hypothetical:
                self.steps.acquire()
            self.asked.append((tuple(one.token_ids), one.num_hypothetical, one.k))
        return [[one.token_ids[-1] + 1 + i for i in range(one.k)] for one in batch]

    def enumerate(self, batch):
        if self.fails:
            raise ValueError("on purpose")
        self.steps.acquire()
        for one in batch:
            if one.branches:
                for branch in one.branches:
                    branch.guesses.append((branch.guesses or branch.assumed)[-1] + 1)
                continue
            for accepted in range(len(one.block) + 1):
                right = tuple(one.block[:accepted])
                one.branches += [Branch((*right, 50 + i)) for i in range(one.fan)]

    def abandon(self, handle):
        self.abandoned.append(handle)


@pytest.fixture
def answers():
    return Answers()


@pytest.fixture
def run():
    workers = []

    def start(drafter):
        worker = DraftWorker("test", {drafter.name: drafter})
        worker.start()
        workers.append((worker, drafter))
        return worker

    yield start
    for worker, drafter in workers:
        drafter.steps.release(10_000)
        assert worker.stop(5)


def question(level, fan=0, k=K):
    return Question(k, 0, 0.0, Lookahead(level, fan))


def opened(worker, answers, asked, token_ids=(1, 2)):
    worker.post([Open(1, "ahead", list(token_ids), 1, SamplingParams(), 100, asked, answers.deliver)])


def plain(answer: Drafted):
    return (answer.base_len, answer.assumed_ids, answer.token_ids)


def test_level_1_pushes_the_next_block_as_if_everything_were_accepted(run, answers):
    """The bonus guess is assumed, the block behind it is pushed, and then nothing until the verdict."""
    drafter = AheadScript()
    opened(run(drafter), answers, question(1))
    got = answers.wait(2)
    assert [plain(one) for one in got] == [(2, (), [3, 4, 5]), (2, (3, 4, 5, 6), [7, 8, 9])]
    assert got[1].pushed
    assert [hypothetical for _, hypothetical, _ in drafter.asked] == [0, 3, 4, 5, 6]


def test_a_foreseen_verdict_is_not_answered_again_and_the_next_block_is_drafted_ahead(run, answers):
    """The verifier has the block already: the drafter is two blocks ahead of what it was told."""
    worker = run(AheadScript())
    opened(worker, answers, question(1))
    answers.wait(2)
    worker.post([Extend(1, [3, 4, 5, 6], question(1))])
    assert plain(answers.wait(3)[2]) == (6, (7, 8, 9, 10), [11, 12, 13])


def test_another_verdict_gets_an_ordinary_answer(run, answers):
    """What was drafted ahead is dropped."""
    worker = run(AheadScript())
    opened(worker, answers, question(1))
    answers.wait(2)
    worker.post([Extend(1, [3, 40], question(0))])
    assert plain(answers.wait(3)[2]) == (4, (), [41, 42, 43])


def test_half_a_block_drafted_ahead_is_finished_not_begun_again(run, answers):
    """The verdict comes in the middle: the answer builds on what is there, and says what it assumed."""
    drafter = AheadScript()
    drafter.steps = threading.Semaphore(2)  # the bonus guess and one more
    worker = run(drafter)
    opened(worker, answers, question(1))
    answers.wait(1)
    while len(drafter.asked) < 3:
        pass
    worker.post([Extend(1, [3, 4, 5, 6], question(0))])
    drafter.steps.release(10_000)
    assert plain(answers.wait(2)[1]) == (2, (3, 4, 5, 6), [7, 8, 9])
    assert (tuple(range(1, 8)), 1, 2) in drafter.asked or (tuple(range(1, 9)), 2, 1) in drafter.asked


def test_level_2_pushes_every_outcome_in_one_message(run, answers):
    """F outcomes at each accepted length, each with its own block."""
    opened(run(AheadScript()), answers, question(2, 2))
    answers.wait(1 + (K + 1) * 2)
    pushed = answers.batches[1]
    assert len(pushed) == (K + 1) * 2
    assert plain(pushed[0]) == (2, (50,), [51, 52, 53])
    assert plain(pushed[-1]) == (2, (3, 4, 5, 51), [52, 53, 54])


def test_a_foreseen_correction_finds_its_block(run, answers):
    """Level 2: also where the verdict is a correction; the next round is enumerated from that block."""
    drafter = AheadScript()
    worker = run(drafter)
    opened(worker, answers, question(2, 1))
    answers.wait(1 + K + 1)
    worker.post([Extend(1, [3, 50], question(2, 1))])
    later = answers.wait(1 + 2 * (K + 1))[K + 2 :]
    assert plain(later[0]) == (4, (50,), [51, 52, 53])
    assert plain(later[1]) == (4, (51, 50), [51, 52, 53])  # behind the first guess of the block foreseen
    assert drafter.abandoned == [1]
    assert [plain(block) for block in answers.taken()] == [(2, (3, 50), [51, 52, 53])]


def test_a_failure_of_drafting_ahead_costs_nothing_but_the_guess(run, answers):
    """The sequence keeps its drafter."""
    for level in (1, 2):
        worker, got = run(AheadScript(fails=True)), Answers()
        opened(worker, got, question(level, 1))
        got.wait(1)
        worker.post([Extend(1, [9], question(level, 1))])
        assert plain(got.wait(2)[1]) == (3, (), [10, 11, 12])


def test_nothing_is_drafted_ahead_beyond_the_drafters_context(run, answers):
    """Two known, three guessed, three more: nine positions are needed, eight are not enough."""
    drafter = AheadScript(max_context=7)
    worker = run(drafter)
    opened(worker, answers, question(1))
    answers.wait(1)
    worker.post([Close(1)])
    assert worker.stop(5)
    assert all(hypothetical == 0 for _, hypothetical, _ in drafter.asked)


def test_a_drafter_of_a_lower_level_is_not_asked_for_more(run, answers):
    """An ordinary answer, and no more."""
    drafter = AheadScript(max_level=1)
    worker = run(drafter)
    opened(worker, answers, question(2, 3))
    answers.wait(1)
    assert worker.stop(5)
    assert len(answers.all()) == 1


def test_a_drafter_that_cannot_even_give_up_costs_its_sequences_and_no_thread(run, answers, monkeypatch):
    """They are refused, so that they go on plainly at once; the next one is served."""
    drafter = AheadScript(fails=True)

    def failing(handle):
        raise KeyError(handle)

    monkeypatch.setattr(drafter, "abandon", failing)
    worker = run(drafter)
    opened(worker, answers, question(2, fan=1))
    block, refused = answers.wait(2)
    assert isinstance(block, Drafted)
    assert isinstance(refused, Refused)
    assert not worker.num_sequences
    opened(worker, answers, question(0))
    assert plain(answers.wait(3)[2]) == (2, (), [3, 4, 5])
