"""Texts scored in the draft tier's idle time: after every question, for nobody's memory, in the order in which they ended."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from draft_service.drafters import build_drafters
from draft_service.news import Close, Drafted, Extend, Open, Origin, Question
from draft_service.scoring import Text
from draft_service.self_scoring import Scorer, SelfScores
from draft_service.worker import DraftWorker
from paceline.config import DraftConfig, DrafterConfig, PacelineConfig, ScoresConfig
from paceline.errors import ConfigError
from paceline.testing.scripted_drafter import ScriptedDrafter
from paceline.types import Law, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
TOKENIZER = SimpleNamespace(fingerprint="", vocab_size=1000)
K = 3


class Published:
    """Scores as they come; ``wait`` for some."""

    def __init__(self):
        self.scores = []
        self._arrived = threading.Condition()

    def __call__(self, text, drafter, score):
        with self._arrived:
            self.scores.append((text.origin, drafter, score.matches))
            self._arrived.notify()

    def wait(self, count):
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.scores) >= count, timeout=10), self.scores
            return self.scores


def count_up(request):
    return [request.token_ids[-1] + 1 + i for i in range(request.k)]


def text(*token_ids, number=1, scope=""):
    return Text(token_ids, 1, GREEDY, 1000, scope, Origin("v", number, 1))


def scorer_of(drafter, published, **settings):
    return Scorer({drafter.name: (drafter, False)}, ScoresConfig(k=K, **settings), published)


def opening(handle, token_ids, *, question=None, deliver=lambda answers: None, law=Law.COUPLED, number=1):
    origin = Origin("v", number, 1)
    return Open(
        handle, "scripted", list(token_ids), 1, GREEDY, 1000, question, deliver, law=law, origin=origin
    )


def seen(worker):
    """Returns when the worker has seen everything posted before: an extra sequence is asked and answered."""
    answered = threading.Event()
    question = Question(1, 0, 0.0)
    worker.post([opening(99, [1], question=question, deliver=lambda _: answered.set(), law=Law.RATIO)])
    assert answered.wait(10)
    worker.post([Close(99)])


@pytest.fixture
def run():
    """Starts a worker around a drafter with a scorer; ends it after the test."""
    workers = []

    def start(drafter, scorer):
        worker = DraftWorker("test", {drafter.name: drafter}, scorer=scorer)
        worker.ended = lambda ended: scorer.offer(ended) if ended is not None else None
        worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        assert worker.stop(5)


def test_a_text_that_is_over_is_scored_at_every_position(run):
    """By a handle of its own, closed again; under a sampled law it is left alone, since it depends on its drafter."""
    drafter, published = ScriptedDrafter(count_up), Published()
    worker = run(drafter, scorer_of(drafter, published))
    worker.post([opening(1, [5, 6, 7], law=Law.RATIO, number=1), opening(2, [5, 6, 7], number=2)])
    worker.post([Extend(2, [9, 10], None), opening(3, [1, 2], number=3)])
    seen(worker)
    worker.post([Close(1), Close(2), Close(3)])
    assert sorted(published.wait(2), key=lambda one: one[0].sequence_id) == [
        (Origin("v", 2, 1), "scripted", [2, 1, 0, 1]),
        (Origin("v", 3, 1), "scripted", [1]),
    ]
    assert not drafter.opened


def test_scoring_waits_while_a_sequence_is_open(run):
    """Its next question finds the drafter idle; when it is over both are scored."""
    drafter, published = ScriptedDrafter(count_up), Published()
    worker = run(drafter, scorer_of(drafter, published))
    worker.post([opening(1, [5, 6], number=1), opening(2, [5, 6], number=2)])
    seen(worker)
    worker.post([Close(1)])
    for _ in range(3):
        worker.post([Extend(2, [7], Question(2, 0, 0.0))])
        seen(worker)
    assert not published.scores
    worker.post([Close(2)])
    assert {origin.sequence_id for origin, *_ in published.wait(2)} == {1, 2}


def test_a_question_comes_before_the_next_piece(run):
    """What arrives during one piece of a text is answered before the next one; then scoring goes on."""
    published, order = Published(), []
    inside, go_on, answered = threading.Event(), threading.Event(), threading.Event()

    def script(request):
        order.append("score" if request.handle < 0 else "serve")
        if order == ["score"]:
            inside.set()
            go_on.wait(10)
        return count_up(request)

    drafter = ScriptedDrafter(script)
    scorer = scorer_of(drafter, published)
    worker = run(drafter, scorer)
    worker.may_score = lambda: True
    scorer.offer(text(5, 6, 7, 8, 9, number=1))
    worker.nudge()
    assert inside.wait(10)
    worker.post(
        [opening(2, [5, 6], question=Question(2, 0, 0.0), deliver=lambda _: answered.set(), number=2)]
    )
    go_on.set()
    assert answered.wait(10)
    published.wait(1)
    assert order == ["score", "serve", "score", "score", "score"]


def test_a_sequence_takes_the_place_that_scoring_holds(run):
    """A drafter with one place: the text at hand is given up and counted, the sequence is not refused."""
    published, answered, first = Published(), threading.Event(), threading.Event()
    inside, go_on = threading.Event(), threading.Event()

    def script(request):
        if request.handle < 0:
            inside.set()
            go_on.wait(10)
        return count_up(request)

    drafter = ScriptedDrafter(script, capacity=1)
    scorer = scorer_of(drafter, published)
    worker = run(drafter, scorer)
    worker.post(
        [opening(1, [5, 6, 7, 8], question=Question(1, 0, 0.0), deliver=lambda _: first.set(), number=1)]
    )
    assert first.wait(10)
    worker.post([Close(1)])
    assert inside.wait(10)
    answers = []
    worker.post(
        [
            opening(
                2, [5, 6], question=Question(2, 0, 0.0), deliver=lambda a: (answers.extend(a), answered.set())
            )
        ]
    )
    go_on.set()
    assert answered.wait(10)
    assert isinstance(answers[0], Drafted)
    assert scorer.dropped == 1
    assert not published.scores


def test_texts_beyond_the_backlog_are_dropped_and_counted():
    """By tokens; what was taken is scored."""
    drafter, published = ScriptedDrafter(count_up), Published()
    scorer = scorer_of(drafter, published, backlog=10)
    for number in range(1, 5):
        scorer.offer(text(1, 2, 3, 4, number=number))
    assert scorer.dropped == 2
    while scorer.pending:
        scorer.piece()
    assert [origin.sequence_id for origin, *_ in published.scores] == [1, 2]


def test_a_drafter_that_raises_costs_its_text_and_no_other():
    """The next one is scored; nothing stays open."""
    published = Published()

    def script(request):
        if request.token_ids[0] == 13:
            raise RuntimeError("unlucky")
        return count_up(request)

    drafter = ScriptedDrafter(script)
    scorer = scorer_of(drafter, published)
    scorer.offer(text(13, 14, number=1))
    scorer.offer(text(5, 6, number=2))
    while scorer.pending:
        scorer.piece()
    assert [origin.sequence_id for origin, *_ in published.scores] == [2]
    assert (scorer.dropped, drafter.opened) == (1, set())


@pytest.mark.parametrize("call", ["open", "close"])
def test_a_drafter_that_cannot_open_or_close_for_scoring_serves_on(run, monkeypatch, call):
    """The thread is everybody's: what was only to be scored is dropped, questions are answered."""
    drafter, published = ScriptedDrafter(count_up), Published()
    usual = getattr(drafter, call)

    def failing(handle):
        if handle < 0:
            raise ValueError("not below nothing")
        usual(handle)

    monkeypatch.setattr(drafter, call, failing)
    scorer = scorer_of(drafter, published)
    worker = run(drafter, scorer)
    for number in (1, 2, 3):
        worker.post([opening(number, [5, 6, 7], number=number)])
        seen(worker)
        worker.post([Close(number)])
        seen(worker)
        for _ in range(1000):
            if not scorer.pending:
                break
            time.sleep(0.005)


def settings(tmp_path, **scores):
    drafters = {
        "suffix": DrafterConfig(kind="suffix", pool_mb=1),
        "ngram": DrafterConfig(kind="ngram"),
        "cascade": DrafterConfig(kind="cascade", members=("suffix",)),
    }
    return PacelineConfig(
        draft=DraftConfig(drafters=drafters, scores=ScoresConfig(dir=str(tmp_path), **scores))
    )


def entries(tmp_path):
    return [json.loads(line) for path in tmp_path.glob("scores-*.jsonl") for line in path.open()]


def test_a_twin_remembers_earlier_texts_of_the_tenant_and_the_drafter_that_serves_nothing(tmp_path):
    """The second of two equal texts is guessed from the first, another tenant's is not; nothing of a text is in the file."""
    config = settings(tmp_path, k=8)
    drafters = build_drafters(config, TOKENIZER)
    scores = SelfScores(config, drafters, TOKENIZER)
    words = list(range(100, 140))
    for number, scope in ((1, "a"), (2, "a"), (3, "b")):
        scores.offer(text(*words, number=number, scope=scope))
    while scores.quick.pending:
        scores.quick.piece()
    scores.close()
    head, *records = entries(tmp_path)
    assert set(head["drafters"]) == {"suffix", "ngram"}  # a cascade decides by time
    by_text = {one["sequence_id"]: one for one in records if one["drafter"] == "suffix"}
    assert sum(by_text[1]["matches"]) == sum(by_text[3]["matches"]) == 0
    assert sum(by_text[2]["matches"]) > 100
    assert "misses" not in records[0]
    assert "output_ids" not in records[0]
    drafters["suffix"].open(1)
    from draft_service.drafters import DraftRequest

    (served,) = drafters["suffix"].propose([DraftRequest(1, words[:20], 1, GREEDY, 4, 1000, scope="a")])
    assert served == []


def test_token_ids_are_in_the_scores_only_when_asked_for(tmp_path):
    """Then with the first wrong guess at every position."""
    config = settings(tmp_path, k=2, drafters=("ngram",), token_ids=True)
    scores = SelfScores(config, build_drafters(config, TOKENIZER), TOKENIZER)
    scores.offer(text(1, 2, 3, 1, 2, 4, number=7))
    while scores.quick.pending:
        scores.quick.piece()
    scores.close()
    _, record = entries(tmp_path)
    assert record["output_ids"] == [2, 3, 1, 2, 4]
    assert record["misses"] == [-1, -1, -1, -1, 3]
    assert (record["sequence_id"], record["verify_id"], record["k"]) == (7, "v", 2)


@pytest.mark.parametrize(
    ("names", "words"), [(("cascade",), "decides by time"), (("other",), "there are: suffix")]
)
def test_drafters_that_cannot_be_scored_are_refused_in_words(tmp_path, names, words):
    """At start."""
    config = settings(tmp_path, drafters=names)
    with pytest.raises(ConfigError, match=words):
        SelfScores(config, build_drafters(config, TOKENIZER), TOKENIZER)


def test_what_is_missing_is_counted_in_the_metrics(tmp_path):
    """Texts that were not scored, records that were not written."""
    config = settings(tmp_path, backlog=10)
    scores = SelfScores(config, build_drafters(config, TOKENIZER), TOKENIZER)
    for number in range(1, 4):
        scores.offer(text(1, 2, 3, 4, number=number))
    found = {sample.name: sample.value for metric in scores.metrics() for sample in metric.samples}
    assert found["paceline_draft_texts_not_scored_total"] == 1
    assert found["paceline_records_lost_total"] == 0
    scores.close()
