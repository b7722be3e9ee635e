"""A cascade: who answers a round, what it learns, and that quick answers never wait for the slower half."""

import sys
import threading

import pytest
from test_draft_worker import Answers, ask, opening

from draft_service.drafters import DraftRequest, Pass
from draft_service.drafters.cascade import PROBE_RARELY, Cascade
from draft_service.drafters.prospects import Positions, Record, RoundTime, Track, bucket_of
from draft_service.news import Close, Drafted, Extend
from draft_service.worker import DraftWorker
from paceline.errors import ConfigError
from paceline.lookup import Weighed
from paceline.testing.scripted_drafter import ScriptedDrafter
from paceline.types import SamplingParams


class Clock:
    """Moves when told."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Weigher(ScriptedDrafter):
    """Scripted guesses with scripted probabilities."""

    def weigh(self, batch):
        self.batches.append(tuple(request.handle for request in batch))
        return [Weighed(*self.script(request)) for request in batch]


def request(handle, token_ids, k=4, *, alone=False, temperature=0.0):
    return DraftRequest(
        handle, token_ids, 1, SamplingParams(temperature=temperature), k, 1000, "", alone=alone
    )


def count_up(request):
    return [request.token_ids[-1] + 1 + i for i in range(request.k)]


def sure(request):
    return count_up(request), [0.9] * request.k


def nothing(request):
    return [], []


def slow_member(script=count_up, **more):
    return ScriptedDrafter(script, name="slow", slow=True, **more)


# --- decisions ------------------------------------------------------------------------------------------------------


def test_a_confident_quick_guess_answers():
    """With probabilities of .9 nothing slow can promise more."""
    cascade = Cascade("cascade", [Weigher(sure), slow_member()], clock=Clock())
    cascade.open(1)
    assert cascade.propose([request(1, [5])]) == [[6, 7, 8, 9]]


def test_without_a_quick_guess_the_slower_half_is_asked():
    """At first it is trusted enough to get its rounds."""
    cascade = Cascade("cascade", [Weigher(nothing), slow_member()], clock=Clock())
    cascade.open(1)
    assert isinstance(cascade.propose([request(1, [5])])[0], Pass)
    assert cascade.propose([request(1, [5], alone=True)]) == [[]], "there is nobody to pass on to"


def test_guesses_that_cost_more_than_they_bring_are_left_out():
    """A row costs a tenth of a round until measured: a guess of .02 is not worth it, what comes before it is."""
    cascade = Cascade("cascade", [Weigher(lambda r: ([6, 7, 8], [0.9, 0.5, 0.02]))], clock=Clock())
    cascade.open(1)
    assert cascade.propose([request(1, [5])]) == [[6, 7]]


def drive(cascade, clock, rounds, *, slow_right, slow_s, round_s=0.010, k=4):
    """One sequence through so many rounds; the slower half's guesses are right or wrong. Who answered, in letters."""
    cascade.open(1)
    cascade.slower.open(1)
    text, answered = [0], ""
    for _ in range(rounds):
        (outcome,) = cascade.propose([request(1, text, k)])
        guesses = outcome
        if isinstance(outcome, Pass):
            answered += "s"
            (guesses,) = cascade.slower.propose([request(1, text, outcome.k)])
            assert clock.now > 0 or not slow_s
        else:
            answered += "q" if outcome else "-"
        clock.now += round_s
        right = slow_right or not isinstance(outcome, Pass)
        text = [*text, *(guesses if right else [999])] or text
        text = [*text, text[-1] + 1 if right else 0]
    return answered


def taking(clock, seconds):
    def script(request):
        clock.now += seconds
        return [(request.token_ids[-1] + 1 + i) % 999 for i in range(request.k)]

    return script


def test_a_slow_member_that_is_always_wrong_gets_few_rounds():
    """It is found out within a few rounds, then only probed."""
    clock = Clock()
    cascade = Cascade("cascade", [Weigher(nothing), slow_member(taking(clock, 0.005))], clock=clock)
    answered = drive(cascade, clock, 600, slow_right=False, slow_s=0.005)
    assert answered.count("s") < 30
    assert answered[50:].count("s") >= 2, "but it is not given up for ever"
    waits = [len(rounds) for rounds in answered.split("s")[-4:-1]]
    assert waits == sorted(waits), "only asked more and more rarely"
    assert waits[-1] <= PROBE_RARELY


def test_a_slow_member_that_gets_better_gets_its_rounds_back():
    """At first always wrong, then always right: within a few probes it answers everything."""
    clock = Clock()
    cascade = Cascade("cascade", [Weigher(nothing), slow_member(taking(clock, 0.001))], clock=clock)
    drive(cascade, clock, 60, slow_right=False, slow_s=0.001)
    cascade.close(1)
    cascade.slower.close(1)
    assert drive(cascade, clock, 1500, slow_right=True, slow_s=0.001)[-100:] == "s" * 100


def test_a_long_prompt_is_not_read_for_a_probe():
    """Where the slower half would have to read much first, it is tried four times as rarely."""
    counts = []
    for prompt_len in (1, 1000):
        clock = Clock()
        cascade = Cascade("cascade", [Weigher(nothing), slow_member(taking(clock, 0.1))], clock=clock)
        drive(cascade, clock, 60, slow_right=False, slow_s=0.1)
        passed = 0
        for handle in range(2, 200):
            cascade.open(handle)
            for at in range(2):
                passed += isinstance(cascade.propose([request(handle, [0] * (prompt_len + at))])[0], Pass)
            cascade.close(handle)
        counts.append(passed)
    assert counts[0] > counts[1]


def test_reading_and_guessing_are_told_apart():
    """A first answer behind a long prompt is not what guesses cost from then on."""
    record = Record()
    record.took(4, 3, 0.004)
    for _ in range(20):
        record.took(4, 1000, 0.104)
    assert record.cost_s(4) == pytest.approx(0.004)
    assert record.cost_s(4, 1000) == pytest.approx(0.004 + 0.100 / 16, rel=0.01)


def test_a_slow_member_that_is_right_keeps_its_rounds():
    """Where nothing else has guesses it answers all of them."""
    clock = Clock()
    cascade = Cascade("cascade", [Weigher(nothing), slow_member(taking(clock, 0.002))], clock=clock)
    assert drive(cascade, clock, 60, slow_right=True, slow_s=0.002) == "s" * 60


def test_a_slow_member_that_is_right_but_dear_is_dropped():
    """Five tokens a round do not pay for drafting that takes ten rounds' time."""
    clock = Clock()
    cascade = Cascade("cascade", [Weigher(nothing), slow_member(taking(clock, 0.100))], clock=clock)
    answered = drive(cascade, clock, 100, slow_right=True, slow_s=0.100)
    assert answered.count("s") < 25


def test_the_slower_half_is_asked_for_as_much_as_pays():
    """Right at the first position and never at the second: soon only one guess is asked for."""
    clock = Clock()
    cascade = Cascade("cascade", [Weigher(nothing), slow_member(taking(clock, 0.0005))], clock=clock)
    cascade.open(1)
    cascade.slower.open(1)
    text, lengths = [0], []
    for _ in range(60):
        (outcome,) = cascade.propose([request(1, text)])
        assert isinstance(outcome, Pass)
        lengths.append(outcome.k)
        (guesses,) = cascade.slower.propose([request(1, text, outcome.k)])
        clock.now += 0.010 * (1 + 0.1 * len(guesses))
        text = [*text, guesses[0], 0]
    assert lengths[0] > 1
    assert set(lengths[-20:]) == {1}


def test_of_two_quick_members_the_better_offer_wins():
    """The one with more expected tokens, whatever the order of the members."""
    few = Weigher(lambda r: ([1, 2], [0.9, 0.8]), name="few")
    many = Weigher(lambda r: ([3, 4, 5], [0.9, 0.8, 0.7]), name="many")
    for members in ([few, many], [many, few]):
        cascade = Cascade("cascade", members, clock=Clock())
        cascade.open(1)
        assert cascade.propose([request(1, [0])]) == [[3, 4, 5]]


def test_a_quick_member_that_does_not_weigh_is_judged_by_experience():
    """Its guesses are left out once they have proved wrong, and come back where they prove right."""
    clock = Clock()
    cascade = Cascade("cascade", [ScriptedDrafter(count_up)], clock=clock)
    cascade.open(1)
    text = [5]

    def proposed():
        (guesses,) = cascade.propose([request(1, text)])
        clock.now += 0.010 * (1 + 0.1 * len(guesses))
        return guesses

    assert proposed() != []
    for _ in range(80):
        text = [*text, 0]
        proposed()
    assert proposed() == []
    for _ in range(80):
        text = [*text, text[-1] + 1]
        proposed()
    assert proposed() != []


def test_any_two_drafters_and_never_none():
    """Quick only, slow only, both; no member at all is a wrong setting. The version is that of the members."""
    both = Cascade("c", [ScriptedDrafter(count_up), slow_member()])
    quick = Cascade("c", [ScriptedDrafter(count_up)])
    slow = Cascade("c", [slow_member(), slow_member()])
    assert both.slower is not None
    assert quick.slower is None
    assert slow.slower is not None
    slow.open(1)
    assert isinstance(slow.propose([request(1, [0])])[0], Pass)
    assert len({both.version, quick.version, slow.version}) == 3
    with pytest.raises(ConfigError, match="members is empty"):
        Cascade("c", [])


def test_the_better_of_two_slow_members_is_found():
    """Both are right, one is ten times dearer: after some rounds nearly all go to the cheap one."""
    clock = Clock()
    dear, cheap = slow_member(taking(clock, 0.010)), slow_member(taking(clock, 0.001))
    cascade = Cascade("cascade", [dear, cheap], clock=clock)
    drive(cascade, clock, 300, slow_right=True, slow_s=0.001)
    assert len(cheap.batches) > 5 * len(dear.batches)


def test_no_room_with_one_member_takes_none_of_the_others():
    """A sequence is open with every member or with none."""
    first, full = slow_member(), slow_member(capacity=1)
    cascade = Cascade("cascade", [first, full], clock=Clock())
    cascade.slower.open(1)
    with pytest.raises(Exception, match="places"):
        cascade.slower.open(2)
    assert first.opened == full.opened == {1}
    cascade.slower.close(1)
    assert first.opened == full.opened == set()


# --- what it learns ---------------------------------------------------------------------------------------------------


def test_guesses_are_judged_by_what_was_committed_later():
    """Each guess counts whose predecessors were right, also those that were never verified; the rest is not known."""
    record = Record()
    track = Track(record, 0.0)
    for _ in range(200):
        track.guessed(2, [7, 8, 9, 10])
        track.committed([0, 0, 7, 8, 1])
    first, second, third, fourth = track.survival(4)
    assert first > 0.95
    assert second > 0.9
    assert third < 0.05
    assert fourth <= third
    other = Track(record, 0.0).survival(4)
    assert other[1] > 0.9, "a new sequence starts from what the others taught"
    assert 0.3 < Track(record, 1.0).survival(1)[0] < 0.8, "at another temperature nothing is known yet"


def test_every_temperature_has_its_range():
    """The greatest number, too, which the router takes: its double is none."""
    assert [bucket_of(t) for t in (0.0, 5e-324, 0.4, 0.5, 1.0, 1.5, 1e30, sys.float_info.max)] == [
        0, 1, 1, 2, 3, 4, 4, 4,
    ]  # fmt: skip


def test_counts_forget():
    """What was long ago counts less: acceptance that changes is seen within a few dozen rounds."""
    positions = Positions(48.0)
    for _ in range(1000):
        positions.observe(0, right=True)
    for _ in range(60):
        positions.observe(0, right=False)
    right, seen = positions.at(0)
    assert right / seen < 0.4
    assert positions.at(5) == (0.0, 0.0)


def test_round_times_are_a_line():
    """Base and row are found from rounds of several lengths; one length alone leaves the row near its prior."""
    rounds = RoundTime()
    for i in range(400):
        rounds.took(i % 5, 0.010 + 0.002 * (i % 5))
    assert rounds.of(0) == pytest.approx(0.010, rel=0.1)
    assert rounds.of(8) == pytest.approx(0.026, rel=0.1)
    same = RoundTime()
    for _ in range(400):
        same.took(4, 0.014)
    assert same.of(4) == pytest.approx(0.014, rel=0.05)
    assert 0.005 < same.of(0) < 0.014


def test_a_stall_is_no_cost():
    """One round of a second among rounds of ten milliseconds moves the estimate little."""
    rounds = RoundTime()
    for _ in range(100):
        rounds.took(0, 0.010)
    rounds.took(0, 1.0)
    assert rounds.of(0) < 0.012


# --- two threads ------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    """Starts both workers around a cascade; gives the quick one's post. Both end after the test."""
    workers = []

    def start(cascade):
        slow = DraftWorker("slow", {"cascade": cascade.slower})
        quick = DraftWorker("quick", {"cascade": cascade}, slower=slow.post)
        for worker in (slow, quick):
            worker.start()
            workers.append(worker)
        return quick

    yield start
    for worker in workers:
        assert worker.stop(5)


def by_text(request):
    """Sure of itself where the last token is even, without a guess where it is odd."""
    return sure(request) if request.token_ids[-1] % 2 == 0 else ([], [])


def wait_for(condition):
    done = threading.Event()
    for _ in range(1000):
        if condition():
            return
        done.wait(0.005)
    raise AssertionError("not in time")


def test_each_half_answers_its_rounds_on_the_same_link(threads):
    """The slower half sees all tokens, but only when it is asked; both answer under the sequence's own handle."""
    slow = slow_member(lambda r: [50 + len(r.token_ids)])
    worker, answers = threads(Cascade("cascade", [Weigher(by_text), slow])), Answers()
    worker.post([opening(answers, 1, [2], drafter="cascade", question=ask(2))])
    assert answers.wait(1)[0].token_ids == [3, 4]
    worker.post([Extend(1, [4], ask(2, 1))])
    answers.wait(2)
    assert slow.batches == [], "the slower half has not heard of the sequence yet"
    worker.post([Extend(1, [5], ask(2, 2))])
    third = answers.wait(3)[2]
    assert third.token_ids == [53]
    assert (third.base_len, third.question.round_index) == (3, 2)
    worker.post([Extend(1, [6], ask(2, 3)), Extend(1, [7, 9], ask(2, 4))])
    assert answers.wait(4)[3].token_ids == [56]
    worker.post([Close(1)])
    wait_for(lambda: not slow.opened)


def test_quick_answers_do_not_wait_for_the_slower_half(threads):
    """While the slow member hangs in one sequence, others and later rounds of the same are answered at once."""
    slow = slow_member(lambda r: [50])
    worker, answers = threads(Cascade("cascade", [Weigher(by_text), slow])), Answers()
    slow.hang()
    worker.post([opening(answers, 1, [3], drafter="cascade", question=ask(2))])
    assert slow.hanging.wait(5)
    worker.post([opening(answers, 2, [8], drafter="cascade", question=ask(2))])
    worker.post([Extend(1, [4], ask(2, 1))])
    got = {(a.handle, a.base_len): a.token_ids for a in answers.wait(2)}
    assert got == {(2, 1): [9, 10], (1, 2): [5, 6]}
    slow.let_go()
    late = answers.wait(3)[2]
    assert (late.handle, late.base_len) == (1, 1), "stale: the verifier counts it and goes on"


def test_a_question_taken_back_is_not_answered(threads):
    """A question that waits behind a hanging one, and that the quick half has answered for a later length, is void."""
    slow = slow_member(lambda r: [50])
    worker, answers = threads(Cascade("cascade", [Weigher(by_text), slow])), Answers()
    slow.hang()
    worker.post([opening(answers, 1, [3], drafter="cascade", question=ask(2))])
    assert slow.hanging.wait(5)
    worker.post([opening(answers, 2, [5], drafter="cascade", question=ask(2))])
    wait_for(lambda: not worker._asking)
    worker.post([Extend(2, [6], ask(2, 1))])
    assert answers.wait(1)[0].token_ids == [7, 8]
    slow.let_go()
    answers.wait(2)
    worker.post([Extend(2, [7], ask(2, 2))])
    answers.wait(3)
    assert [a.base_len for a in answers.all() if a.handle == 2] == [2, 3]


@pytest.mark.parametrize("trouble", ["no room", "it raises", "context"])
def test_trouble_of_the_slower_half_leaves_the_quick_one(threads, trouble):
    """No room, a failure, a text too long: the sequence is not refused, its rounds are answered quickly from then on."""

    def script(request):
        if trouble == "it raises":
            raise ValueError("broken")
        return [50]

    slow = slow_member(
        script, capacity=1 if trouble == "no room" else 0, max_context=2 if trouble == "context" else 0
    )
    if trouble == "no room":
        slow.open(77)
    worker, answers = threads(Cascade("cascade", [Weigher(by_text), slow])), Answers()
    worker.post([opening(answers, 1, [1, 1, 3], drafter="cascade", question=ask(2))])
    first = answers.wait(1)[0]
    assert isinstance(first, Drafted)
    assert first.token_ids == []
    worker.post([Extend(1, [4], ask(2, 1))])
    assert answers.wait(2)[1].token_ids == [5, 6]
    worker.post([Extend(1, [5], ask(2, 2))])
    assert answers.wait(3)[2].token_ids == []
    worker.post([Close(1)])
    wait_for(lambda: worker.num_sequences == 0)
    assert slow.opened <= {77}
