"""Pieces of the recipe by themselves."""

import json

import numpy as np
import pytest
import torch

from paceline.engine.blocks import quantise_4, quantise_8, restore
from paceline.errors import ConfigError
from paceline.testing.tiny_models import tiny_model_dir
from paceline.tokenizer import Tokenizer
from training import distill
from training.acceptance import Acceptance
from training.answers import Answer, is_held_out, read_shard, write_shard
from training.instruct import instructions, opening
from training.loss import HeadLoss, targets_of
from training.prompts import collect
from training.vocabulary import ranked_vocabulary


def answer(ids=(5, 6, 7, 8, 9, 2), prompt_len=3, temperature=0.0) -> Answer:
    ids = np.array(ids)
    num = len(ids) - prompt_len
    top = np.stack([ids[prompt_len:], (ids[prompt_len:] + 1) % 12], axis=1)
    return Answer("qa", "own", temperature, ids, prompt_len, top, np.log(np.full((num, 2), [0.7, 0.2])))


def test_rounds_of_agreement():
    """Accepted guesses, the target's own token after the first miss, and the bonus after k hits make up the tokens."""
    found = Acceptance(k=2)
    found.add([True, True, True, False, True, False])
    # a b +c | miss: d | e, miss: f
    assert (found.rounds, found.tokens) == (3, 6)
    assert found.by_position == [2 / 3, 1 / 2]
    assert found.mean_length == 2.0


def test_shards_come_back(tmp_path):
    """What is written is read, ids and likeliest tokens alike."""
    write_shard(tmp_path / "s.npz", [answer(), answer((1, 2, 3), 1, 0.8)])
    first, second = read_shard(tmp_path / "s.npz")
    assert first.ids.tolist() == [5, 6, 7, 8, 9, 2]
    assert second.temperature == 0.8
    np.testing.assert_allclose(first.top_logprobs, answer().top_logprobs, atol=1e-3)


def test_the_split_goes_by_prompt():
    """All answers to one prompt fall on the same side."""
    sides = {is_held_out(answer((5, 6, 7, last), 3, t), 4) for last in range(8) for t in (0.0, 1.0)}
    assert len(sides) == 1


@pytest.mark.parametrize("every", [None, 10**12, 1])
def test_a_run_without_answers_is_refused(tmp_path, every):
    """No answers, none held out, or all of them: an epoch of nothing would begin again for ever."""
    if every is not None:
        write_shard(tmp_path / "s.npz", [answer()])
    words = f"--target nowhere --answers {tmp_path} --run {tmp_path}/run --held-out-every {every or 20}"
    with pytest.raises(ConfigError, match=r"answers to train on and \d held out; some of both"):
        distill.main(words.split())


def test_evaluation_prompts_never_come_in(tmp_path):
    """A training prompt that equals a Spec-Bench turn, whatever its case and spaces, is dropped, and so are doubles."""
    (tmp_path / "spec_bench").mkdir()
    (tmp_path / "gsm8k").mkdir()
    turn = {"question_id": 1, "category": "qa", "turns": ["How many  eggs?"]}
    (tmp_path / "spec_bench/question_open.jsonl").write_text(json.dumps(turn) + "\n")
    rows = [{"question": text} for text in ("how many eggs?", "Why?", "Why?")]
    (tmp_path / "gsm8k/train_600.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [prompt.text for prompt in collect(tmp_path)] == ["Why?"]


def test_end_tokens_are_always_known():
    """The end of a text is in the head's vocabulary even if no answer shows it; the rest goes by expected count."""
    ids = ranked_vocabulary([answer((5, 6, 7, 8, 9), 3)], 12, 4, [11]).tolist()
    assert ids == [8, 9, 10, 11]


@pytest.mark.parametrize("share_tv", [0.0, 0.5, 1.0])
def test_gradients_of_the_loss(share_tv):
    """Loss and gradients equal those of autograd on the written-out divergence, tokens outside the head included."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(10, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    index_of = torch.full((14,), -1)
    index_of[:10] = torch.arange(10)
    top_ids = torch.stack([torch.randperm(14, generator=generator)[:4] for _ in range(7)])
    logprobs = torch.randn(7, 4, generator=generator, dtype=torch.float64).log_softmax(1) - 0.1
    targets = targets_of([top_ids], [logprobs], index_of, 0.1)
    loss = HeadLoss.apply(hidden, head, targets, share_tv)
    found = torch.autograd.grad(loss, (hidden, head))
    dense = torch.zeros(7, 10, dtype=torch.float64)
    for row in range(7):
        for index, prob in zip(targets.index[row].tolist(), targets.probs[row].tolist(), strict=True):
            if index >= 0:
                dense[row, index] += prob
    own = (hidden @ head.T).log_softmax(1)
    kl, tv = -(dense * own).sum(1), 1 - torch.minimum(own.exp(), dense).sum(1)
    expected = (((1 - share_tv) * kl + share_tv * tv) * targets.weight).sum() / targets.weight.sum()
    torch.testing.assert_close(loss, expected)
    for one, other in zip(found, torch.autograd.grad(expected, (hidden, head)), strict=True):
        torch.testing.assert_close(one, other)


def test_positions_that_the_head_cannot_say_do_not_count():
    """Where all likely tokens are outside, the position has no weight."""
    targets = targets_of([torch.tensor([[3, 4]])], [torch.tensor([[-0.1, -3.0]])], torch.full((5,), -1), 0.1)
    assert targets.weight.tolist() == [0.0]


@pytest.mark.parametrize(("quantise", "worst"), [(quantise_4, 0.15), (quantise_8, 0.01)])
def test_blocks_are_near_and_stable(quantise, worst):
    """Blocks lose little, and numbers that are in blocks already lose nothing."""
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(2))
    parts = quantise(weight)
    once = restore(parts.__getitem__, set(parts))
    assert (once - weight).square().mean().sqrt() < worst
    again = quantise_8(once) if quantise is quantise_8 else None
    if again:
        assert torch.equal(restore(again.__getitem__, set(again)), once)


def test_a_target_writes_prompts_for_itself(tmp_path):
    """It is given a user's turn up to its first word; what it does not end, hardly says or says again is left out."""
    tokenizer = Tokenizer.load(tiny_model_dir(tmp_path / "target"))
    begun = opening(tokenizer)
    eos = tokenizer.encode_chat([("user", "hello")])[len(begun) + len(tokenizer.encode("hello"))]
    assert tokenizer.encode_chat([("user", "hello")])[: len(begun)] == begun
    assert tokenizer.decode(begun, skip_special=False).endswith("user\n")

    class Said:
        """A generator whose answers are known."""

        def run(self, jobs):
            for text in ("What is the wind?", "What is the wind?", "Hm", "How long, "):
                assert next(jobs).ids == begun
                end = [] if text.endswith(" ") else [eos]
                yield answer((*begun, *tokenizer.encode(text), *end), len(begun), 1.0)
            yield answer((*begun, *tokenizer.encode("Write three lines"), eos), len(begun), 1.0)
            raise AssertionError("two were wanted")

    found = list(instructions(Said(), tokenizer, frozenset([eos]), seed=1, count=2))
    assert found == ["What is the wind?", "Write three lines"]
