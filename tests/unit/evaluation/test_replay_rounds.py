"""Replays on scripted traffic: rounds that can be worked out by hand."""

import json
from types import SimpleNamespace

import pytest

from draft_service.drafters import build_drafters
from evaluation.recordings import Recorded, Recording, Round, load_recording
from evaluation.replay import Replay, always, as_recorded
from evaluation.replay_table import Figures, policy_at, table
from paceline.config import DraftConfig, DrafterConfig, PacelineConfig
from paceline.errors import ConfigError
from paceline.testing.scripted_drafter import ScriptedDrafter
from paceline.types import DepthReason, Law, Plan, SamplingParams
from verify_service import controller
from verify_service.beside import build_beside
from verify_service.facts import Decision, State
from verify_service.native import compiled_controller

GREEDY = SamplingParams(temperature=0.0)
TOKENIZER = SimpleNamespace(fingerprint="", vocab_size=1000)
PLAIN = Plan.plain("test")


def recorded(output, *, number=1, began=0.0, ended=1.0, scope="s", plan=PLAIN, max_tokens=None, **extra):
    extra.setdefault("sampling", GREEDY)
    return Recorded(
        f"r{number}", began, ended, scope, plan, max_tokens=max_tokens or len(output),
        prompt_ids=(1, 2, 3), output_ids=tuple(output), **extra,
    )  # fmt: skip


def recording(*requests, max_context=1000):
    return Recording(requests, "model", "", 1000, max_context, None)


def count_up(request):
    return [request.token_ids[-1] + 1 + i for i in range(request.k)]


def rounds_of(replayed):
    return [(one.drafted, one.accepted, one.committed) for one in replayed.rounds]


def run(traffic, drafter, k, **extra):
    return Replay(traffic, {drafter.name: drafter}, always(drafter.name, k, k_fixed=True), **extra).run()


def test_rounds_follow_from_the_recorded_tokens():
    """Blocks of three after the first token: all right with the bonus, two right; then as long as there is room for."""
    output = [10, 11, 12, 13, 14, 15, 16, 30, 70, 71, 72]
    (replayed,) = run(recording(recorded(output)), ScriptedDrafter(count_up), 3)
    assert rounds_of(replayed) == [(3, 3, 4), (3, 2, 3), (2, 0, 1), (1, 1, 2)]
    assert replayed.stats.num_draft_tokens == 9
    assert replayed.complete


def test_an_end_of_sequence_ends_the_replay_where_it_ended_the_request():
    """There was room for more than was put out: blocks are as long as then, and nothing is known behind the end."""
    (replayed,) = run(recording(recorded([10, 11, 12], max_tokens=100)), ScriptedDrafter(count_up), 4)
    assert rounds_of(replayed) == [(4, 2, 2)]


def test_what_another_replica_had_committed_is_not_replayed():
    """A request that was resumed begins behind it."""
    (replayed,) = run(recording(recorded([10, 11, 12, 13, 14], resumed=2)), ScriptedDrafter(count_up), 4)
    assert rounds_of(replayed) == [(1, 1, 2)]


def test_a_drafter_that_cannot_read_on_is_left_like_in_the_verify_tier():
    """Its context is full: fewer guesses at first, then plain rounds."""
    drafter = ScriptedDrafter(count_up, max_context=6)
    (replayed,) = run(recording(recorded(range(10, 18))), drafter, 3)
    assert rounds_of(replayed) == [(3, 3, 4), (0, 0, 1), (0, 0, 1), (0, 0, 1)]
    assert [one.outcome for one in replayed.rounds] == ["used", "unavailable", "unavailable", "none"]
    assert not drafter.opened


def test_requests_run_beside_each_other_as_they_were_recorded():
    """Two at once share their batches; the third begins when both are over."""
    drafter = ScriptedDrafter(count_up)
    traffic = recording(
        recorded(range(10, 20), number=1, began=0.0, ended=5.0),
        recorded(range(40, 50), number=2, began=1.0, ended=4.0),
        recorded(range(70, 80), number=3, began=6.0, ended=7.0),
    )
    replayed = run(traffic, drafter, 2)
    assert [one.request_id for one in replayed] == ["r1", "r2", "r3"]
    assert [rounds_of(one) for one in replayed] == [[(2, 2, 3)] * 3] * 3
    assert drafter.batches[:3] == [(1, 2)] * 3
    assert {handle for batch in drafter.batches[3:] for handle in batch} == {3}


@pytest.mark.parametrize("place", ["draft", "verify"])
def test_a_drafter_that_remembers_sees_the_texts_in_the_recorded_order(place):
    """The same output again: nothing is found while the first one runs, all of it after it, nothing of another tenant's."""
    entries = {"suffix": DrafterConfig(kind="suffix", pool_mb=1, place=place)}
    words = [500 - 7 * i for i in range(24)]

    def accepted(*requests):
        config = PacelineConfig(draft=DraftConfig(drafters=entries))
        replay = Replay(
            recording(*requests),
            build_drafters(config, TOKENIZER),
            always("suffix", 8, k_fixed=True),
            beside=build_beside(config.draft, ""),
        )
        return [one.stats.num_accepted_draft_tokens for one in replay.run()]

    first = recorded(words, number=1, began=0.0, ended=1.0)
    assert accepted(first, recorded(words, number=2, began=2.0, ended=3.0))[1] >= 16
    assert accepted(first, recorded(words, number=2, began=0.5, ended=3.0)) == [0, 0]
    assert accepted(first, recorded(words, number=2, began=2.0, ended=3.0, scope="other")) == [0, 0]


def test_without_a_plan_of_its_own_each_request_is_decoded_as_it_was():
    """Plain ones plainly."""
    plan = Plan.speculative("scripted", 2, "test", k_fixed=True)
    traffic = recording(
        recorded(range(10, 17)), recorded(range(10, 17), number=2, began=2.0, ended=3.0, plan=plan)
    )
    replayed = Replay(traffic, {"scripted": ScriptedDrafter(count_up)}, as_recorded).run()
    assert [rounds_of(one) for one in replayed] == [[(0, 0, 1)] * 6, [(2, 2, 3), (2, 2, 3)]]


def test_sampled_laws_and_requests_without_rounds_are_left_out():
    """What was committed hung on the drafter; at temperature 0 every law is the coupled one."""
    ratio = Plan.speculative("x", 2, "test", law=Law.RATIO)
    warm = SamplingParams(temperature=1.0)
    traffic = recording(
        recorded(range(10, 15), plan=ratio, sampling=warm),
        recorded(range(10, 15), number=2, plan=ratio),
        recorded([10], number=3),
    )
    assert [one.request_id for one in run(traffic, ScriptedDrafter(count_up), 2)] == ["r2"]


def test_the_controller_drafts_where_it_pays_and_not_where_it_does_not():
    """A drafter that is right throughout is used more and more; one that is always wrong is soon left alone."""
    plan_of = always("scripted", 8, k_fixed=False)
    traffic = recording(recorded([10 + i for i in range(400)], max_tokens=400))
    (good,) = Replay(traffic, {"scripted": ScriptedDrafter(count_up)}, plan_of).run()
    wrong = ScriptedDrafter(lambda request: [5] * request.k)
    (bad,) = Replay(traffic, {"scripted": wrong}, plan_of).run()
    assert good.stats.num_rounds < 200
    assert bad.stats.num_draft_tokens < 60
    assert sum(one.committed for one in bad.rounds) == sum(one.committed for one in good.rounds) == 399


@pytest.mark.skipif(compiled_controller() is None, reason="no C++ compiler at hand")
@pytest.mark.parametrize("right", [range(9), range(0, 9, 3), ()])
def test_the_compiled_controller_replays_as_python_s_does(right):
    """The tiers' own parts around either: the same rounds, told to drafters that are always, sometimes or never right."""
    traffic = recording(
        recorded([10 + i for i in range(200)], max_tokens=200),
        recorded([10 + i for i in range(150)], number=2, max_tokens=150),
    )

    def guess(request):
        return [token if token % 9 in right else 5 for token in count_up(request)]

    first, second = (
        Replay(
            traffic, {"scripted": ScriptedDrafter(guess)}, always("scripted", 8, k_fixed=False), policy=policy
        ).run()
        for policy in (controller, compiled_controller())
    )
    assert list(map(rounds_of, first)) == list(map(rounds_of, second))


class Twos:
    """Always two, never cut."""

    def decide(self, model, state, facts):
        decision = Decision(2, True, DepthReason.ALL, 1.0, 0.0, 0.0)
        return State(), {row.id: decision for row in facts.rows if not row.finished}

    def trim(self, model, state, ready, num_sequences, prompt_rows, num_plain):
        return {one.id: (one.length, None) for one in ready}


def test_any_policy_can_be_tried():
    """What decides is a parameter; one that lacks a part is refused in words."""
    traffic = recording(recorded(range(10, 17)))
    replay = Replay(
        traffic, {"scripted": ScriptedDrafter(count_up)}, always("scripted", 8, k_fixed=False), policy=Twos()
    )
    assert rounds_of(replay.run()[0]) == [(2, 2, 3), (2, 2, 3)]
    assert callable(policy_at("verify_service.controller").decide)
    with pytest.raises(ConfigError, match="has no decide"):
        policy_at("json:JSONDecoder")
    with pytest.raises(ConfigError, match="nowhere"):
        policy_at("nowhere:thing")


def test_figures_are_ratios_of_sums_and_positions_count_what_was_reached():
    """Two rounds of two requests; a table of them for people."""
    figures = Figures.of(
        "x", [[Round(3, 1, 2), Round(0, 0, 1, "empty")], [Round(2, 2, 3), Round(1, 0, 1)]], speed=1.5
    )
    assert (figures.rounds, figures.tokens, figures.drafted, figures.accepted) == (4, 7, 6, 3)
    assert figures.by_position == (2 / 3, 1 / 2)
    assert figures.tokens_per_round == 7 / 4
    assert "1.750       0.500  1.50x  0.67 0.50" in table([figures])[1]
    assert Figures.of("plain", [[Round(0, 0, 1)]]).acceptance is None


def test_files_that_cannot_be_replayed_are_refused_in_words(tmp_path):
    """None there, no token ids in them, no JSON; half a last line is a file that is being written."""
    with pytest.raises(ConfigError, match="no recorded requests"):
        load_recording([tmp_path])
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl: No such file or directory$"):
        load_recording([tmp_path / "none.jsonl"])
    path = tmp_path / "requests-1.jsonl"
    path.write_text(json.dumps({"kind": "requests", "request_id": "r"}) + "\n")
    with pytest.raises(ConfigError, match=r"line 1: no token ids; record with verify\.records\.token_ids"):
        load_recording([path])
    path.write_text("{}\n{]\n")
    with pytest.raises(ConfigError, match="cannot read"):
        load_recording([path])
    path.write_text('{"kind": "dropped", "count": 2}\n{"kind": "requ')
    with pytest.raises(ConfigError, match="no recorded requests"):
        load_recording([path])
