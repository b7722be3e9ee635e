"""Drafters held against known texts: equal to asking them afresh at every position."""

import random

import pytest
import torch

from draft_service.drafters import DraftRequest
from draft_service.drafters.lookup import LookupDrafter
from draft_service.drafters.model import load_model_drafter
from draft_service.scoring import NO_TOKEN, Score, Text, score_text
from paceline.config import ModelConfig
from paceline.engine import Segment, load_runner
from paceline.lookup import NgramLookup
from paceline.sampling import TokenRow, choose
from paceline.testing.scripted_drafter import ScriptedDrafter
from paceline.testing.tiny_models import tiny_pair
from paceline.tokenizer import Tokenizer
from paceline.types import SamplingParams

torch.set_num_threads(1)
K = 5
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.9, top_k=40, seed=2**64 - 5),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, seed=4),
}


def model(directory):
    return ModelConfig(name=str(directory), dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def load(pair):
    def loaded(max_context=256, kv_slots=2):
        tokenizer = Tokenizer.load(pair[0])
        return load_model_drafter(
            "small", model(pair[1]), layers=0, kv_slots=kv_slots, max_context=max_context, tokenizer=tokenizer
        )

    return loaded


@pytest.fixture(scope="module")
def committed(pair):
    """What the target commits, plainly."""
    runner = load_runner(model(pair[0]), kv_slots=1, max_context=512)

    @torch.inference_mode()
    def decode(prompt, params, num_tokens):
        slot, output, unread = runner.kv.acquire(), [], prompt
        for _ in range(num_tokens):
            logits = runner.forward([Segment(slot, runner.kv.length(slot), unread, 1)])
            unread = choose(logits, [TokenRow(params, len(prompt) + len(output), prompt, output)])
            output = output + unread
        runner.kv.release(slot)
        return output

    return decode


def by_asking(make, text, k):
    """(matches, wrong guess) at every position, by one question to a drafter that has seen nothing before."""
    found = []
    for base in range(text.prompt_len, len(text.token_ids)):
        drafter = make()
        drafter.open(1)
        request = DraftRequest(1, text.token_ids[:base], text.prompt_len, text.sampling, k, text.vocab_size)
        while (guesses := drafter.propose([request])[0]) is None:
            pass
        matches, miss = 0, NO_TOKEN
        for guess, token in zip(guesses, text.token_ids[base:], strict=False):
            if guess != token:
                miss = guess
                break
            matches += 1
        found.append((matches, miss))
        drafter.close(1)
    return found


def pairs(score):
    return list(zip(score.matches, score.misses, strict=True))


@pytest.mark.parametrize("kind", PARAMS)
def test_one_forward_over_a_text_says_what_asking_at_every_position_would(load, committed, kind):
    """A model drafter foretells; matches and first wrong guess of every block are those of real questions."""
    params, prompt = PARAMS[kind], random.Random(1).choices(range(3, 500), k=90)
    text = Text([*prompt, *committed(prompt, params, 40)], len(prompt), params, 512)
    drafter = load()
    score = score_text(drafter, text, K)
    assert pairs(score) == by_asking(lambda: drafter, text, K)
    assert drafter.num_free_slots == 2
    assert 0 < sum(score.matches) < K * 40  # it agrees sometimes


def test_a_drafter_that_stops_at_an_end_is_not_credited_with_what_follows(load, committed):
    """Texts may go on behind an end of sequence; a block does not."""
    params, prompt = PARAMS["greedy"], [70, 71, 72, 73]
    output = committed(prompt, params, 12)
    text = Text([*prompt, *output[:5], 2, *output[5:]], 4, params, 512)
    drafter = load()
    assert pairs(score_text(drafter, text, K)) == by_asking(lambda: drafter, text, K)


def test_positions_that_a_drafter_cannot_read_have_no_guess(load, committed):
    """Its context ends within the text; a token beyond its vocabulary ends it, too."""
    params, prompt = PARAMS["greedy"], [70, 71, 72, 73]
    output = committed(prompt, params, 30)
    drafter = load(max_context=16)
    text = Text([*prompt, *output], 4, params, 512)
    score = score_text(drafter, text, K)
    assert len(score.matches) == 30
    assert score.judged[13:] == [0] * 17  # behind 17 tokens there is one guess too many to read
    assert score.judged[12] <= 1
    wide = Text([*prompt, *output[:6], 511_000, *output[6:]], 4, params, 600_000)
    score = score_text(load(), wide, K)
    assert score.judged[7:] == [0] * 24
    unread = Text([1, 511_000, 2, *output], 3, params, 600_000)
    assert score_text(load(), unread, K).judged == [0] * 30


def test_a_look_up_is_asked_at_every_position():
    """Equal to fresh look-ups; what it learns of its luck changes its weights, not its guesses."""
    rng = random.Random(7)
    tokens = rng.choices(range(6), k=200)
    text = Text(tokens, 40, PARAMS["greedy"], 6)
    score = score_text(LookupDrafter(NgramLookup("ngram", min_match=2, max_match=8)), text, K)
    fresh = by_asking(lambda: LookupDrafter(NgramLookup("ngram", min_match=2, max_match=8)), text, K)
    assert pairs(score) == fresh
    assert score.judged == [m + (miss != NO_TOKEN) for m, miss in fresh]


def test_rounds_of_any_k_follow_from_one_score():
    """Walked along the matches; the first token comes with the prompt, the last round ends with the text."""
    score = Score(4)
    for matches in (3, 0, 4, 2, 1, 0, 2, 1, 0):
        score.add(matches, 9)
    # k = 4: at 1 nothing is right, at 2 four are and the correction follows, at 7 one is and the text ends.
    assert score.rounds(4) == [1, 5, 2]
    assert score.rounds(2) == [1, 3, 1, 3]
    assert score.rounds(1) == [1, 2, 2, 2, 1]
    assert sum(score.rounds(3)) == 8


def test_acceptance_by_position_counts_only_guesses_that_were_reached():
    """(right, seen): a wrong second guess says nothing of the third; a block that ends with the text nothing of later ones."""
    score = Score(3)
    score.add(1, 9)
    score.add(3)
    score.add(0, 9)
    score.add(0)
    assert score.by_position() == [(2, 3), (1, 2), (1, 1)]


def test_a_drafter_that_fails_leaves_nothing_open():
    """Its place is free again, whoever asked hears of it."""

    def fail(request):
        raise RuntimeError("broken")

    drafter = ScriptedDrafter(fail)
    with pytest.raises(RuntimeError, match="broken"):
        score_text(drafter, Text([1, 2, 3], 1, PARAMS["greedy"], 10), 2)
    assert not drafter.opened
