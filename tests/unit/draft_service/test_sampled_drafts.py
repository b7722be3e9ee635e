"""The model drafter under a sampled law: its own draws, and exactly what they were drawn from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draft_service.drafters import DraftRequest, Sampled
from draft_service.drafters.model import load_model_drafter
from paceline.config import ModelConfig
from paceline.engine import Segment, load_runner
from paceline.sampling import TokenRow, draft_tokens, sample_draft
from paceline.testing.tiny_models import tiny_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import Law, SamplingParams

VOCAB = 512
PROMPT = [5, 9, 2, 40, 7]
PARAMS = {
    "plain": SamplingParams(temperature=1.0, seed=7),
    "cut": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3),
    "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=1.0, logit_bias={40: 3.0}, seed=4),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny", seed=1)
    return ModelConfig(name=str(directory), dtype="float32", device="cpu", threads=1)


@pytest.fixture
def drafter(config):
    return load_model_drafter(
        "self",
        config,
        layers=0,
        kv_slots=4,
        max_context=64,
        tokenizer=Tokenizer.load(Path(config.name)),
        top_m=8,
    )


def request(params, token_ids=PROMPT, *, k=3, law=Law.RATIO, handle=1):
    return DraftRequest(handle, token_ids, len(PROMPT), params, k, VOCAB, law=law)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_each_token_is_drawn_from_what_is_sent(config, drafter, params):
    """Recomputed with one forward a prefix: the same tokens, the same numbers, history of the draft included."""
    drafter.open(1)
    [drafted] = drafter.propose([request(params)])
    assert isinstance(drafted, Sampled)
    runner = load_runner(config, kv_slots=1, max_context=64)
    slot = runner.kv.acquire()
    for index, (token, distribution) in enumerate(zip(drafted.token_ids, drafted.distributions, strict=True)):
        runner.kv.truncate(slot, 0)
        prefix = drafted.token_ids[:index]
        logits = runner.forward([Segment(slot, 0, [*PROMPT, *prefix], 1)])
        rows = [TokenRow(params, len(PROMPT) + index, PROMPT, prefix)]
        assert sample_draft(logits, rows, [len(PROMPT)], 8) == [(token, distribution)]
        assert len(distribution.token_ids) <= 8
    assert all(token.prob > 0 for token in draft_tokens(drafted.token_ids, drafted.distributions))


def test_the_same_question_gets_the_same_draws_and_another_round_others(drafter):
    """Draws are keyed by seed, round and position: nothing is remembered, nothing shared between rounds."""
    params = SamplingParams(temperature=3.0, seed=5)
    drafter.open(1)
    first = drafter.propose([request(params, k=6)])
    assert drafter.propose([request(params, k=6)]) == first
    [later] = drafter.propose([request(params, [*PROMPT, first[0].token_ids[0]], k=5)])
    assert later.token_ids != first[0].token_ids[1:]


def test_a_block_is_cut_behind_an_end_of_sequence_and_takes_as_long_as_any(drafter, monkeypatch):
    """Every sampled block costs k forwards, whatever is drawn: being in time must not hang on the tokens."""
    drafter._eos_ids = frozenset(range(VOCAB))  # whatever is drawn ends
    forwards = []
    forward = drafter._runner.forward
    monkeypatch.setattr(drafter._runner, "forward", lambda s: (forwards.append(len(s)), forward(s))[1])
    drafter.open(1)
    [drafted] = drafter.propose([request(PARAMS["plain"], k=4)])
    assert len(drafted.token_ids) == len(drafted.distributions) == 1
    assert len(forwards) == 4


def test_laws_share_a_batch(drafter):
    """A coupled sequence, a greedy one and a sampled one: each gets what it would get alone."""
    params = PARAMS["plain"]
    requests = [
        request(params, law=Law.COUPLED, handle=1),
        request(replace(params, temperature=0.0), law=Law.BLOCK, handle=2),
        request(params, law=Law.BLOCK, handle=3),
    ]
    for one in requests:
        drafter.open(one.handle)
    together = drafter.propose(requests)
    assert [isinstance(answer, Sampled) for answer in together] == [False, False, True]
    for one, answer in zip(requests, together, strict=True):
        assert drafter.propose([one]) == [answer]


def test_what_is_sampled_has_the_model_s_distribution(config, drafter):
    """800 seeds, the first token: frequencies within 4.5 sigma of the numbers sent (odds 7e-6 a token)."""
    counts = torch.zeros(VOCAB)
    for seed in range(800):
        drafter.open(seed)
        [drafted] = drafter.propose([request(SamplingParams(temperature=0.5, seed=seed), k=1, handle=seed)])
        drafter.close(seed)
        counts[drafted.token_ids[0]] += 1
    [distribution] = drafted.distributions
    total = sum(distribution.probs)
    for token, prob in zip(distribution.token_ids, distribution.probs, strict=True):
        share = prob / total
        assert abs(counts[token] - 800 * share) < 4.5 * (800 * share * (1 - share)) ** 0.5 + 1
