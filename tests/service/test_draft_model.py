"""The whole draft tier with a model in it, driven by a verifier of a few lines over a real socket."""

import asyncio
import contextlib
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from test_draft_link import Peer, close, commit, opening

from draft_service.service import create_server
from paceline.codec import sampling_to_pb
from paceline.config import DraftConfig, DrafterConfig, ModelConfig, PacelineConfig, ServerConfig
from paceline.engine import Segment, load_runner
from paceline.errors import ConfigError
from paceline.sampling import TokenRow, choose
from paceline.testing.tiny_models import tiny_model_dir, tiny_pair, write_tiny_tokenizer
from paceline.tokenizer import Tokenizer
from paceline.types import SamplingParams
from paceline.v1 import draft_pb2 as pb

VOCAB = 512


def model_config(directory):
    return ModelConfig(name=str(directory), dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("pair"))


def settings(target, drafters, **draft):
    server = ServerConfig(port=0)
    return PacelineConfig(
        model=model_config(target), draft=DraftConfig(server=server, drafters=drafters, **draft)
    )


@contextlib.asynccontextmanager
async def linked(config):
    """A started draft tier and a verifier's link to it."""
    server = await create_server(config)
    await server.start()
    peer = Peer(server.address)
    try:
        await peer.hello(fingerprint=Tokenizer.load(Path(config.model.name)).fingerprint, vocab_size=VOCAB)
        yield peer
    finally:
        await peer.cut()
        await server.stop(1.0)


def model_drafter(directory, **more):
    return DrafterConfig(kind="model", model=model_config(directory), **more)


@torch.inference_mode()
def plain(runner, prompt, params, num_tokens):
    slot, output, unread = runner.kv.acquire(), [], prompt
    for _ in range(num_tokens):
        logits = runner.forward([Segment(slot, runner.kv.length(slot), unread, 1)])
        unread = choose(logits, [TokenRow(params, len(prompt) + len(output), prompt, output)])
        output = output + unread
    runner.kv.release(slot)
    return output


async def test_rounds_with_a_smaller_model(pair):
    """Four sequences at once: what the verifier takes is a prefix each time, and far more than chance."""
    target_dir, draft_dir = pair
    runner = load_runner(model_config(target_dir), kv_slots=1, max_context=256)
    drafted = accepted = 0
    async with linked(settings(target_dir, {"small": model_drafter(draft_dir)})) as verify:
        texts = {}
        for i, temperature in enumerate((0.0, 0.0, 0.8, 1.0)):
            prompt = random.Random(i).choices(range(3, VOCAB), k=20 + i)
            params = SamplingParams(temperature=temperature, seed=i)
            texts[i] = (prompt, params, prompt + plain(runner, prompt, params, 48))
        at = {i: len(prompt) + 1 for i, (prompt, _, _) in texts.items()}
        opens = []
        for i, (prompt, params, text) in texts.items():
            entry = opening(i, text[: at[i]], drafter="small", prompt_len=len(prompt), k=4)
            entry.sampling.CopyFrom(sampling_to_pb(params))
            opens.append(entry)
        await verify.send(*opens)
        while at:
            news = []
            for answer in await verify.answers(len(at)):
                assert isinstance(answer, pb.Proposal)
                i, base = answer.sequence_id, at[answer.sequence_id]
                assert answer.base_len == base
                text, guesses = texts[i][2], list(answer.token_ids)
                agreed = 0
                while agreed < len(guesses) and text[base + agreed : base + agreed + 1] == [guesses[agreed]]:
                    agreed += 1
                drafted, accepted = drafted + len(guesses), accepted + agreed
                committed = text[base : base + agreed + 1]
                at[i] = base + len(committed)
                if at[i] >= len(text):
                    news.append(close(i))
                    del at[i]
                else:
                    news.append(commit(i, base, committed, k=4))
            await verify.send(*news)
    assert 0.3 < accepted / drafted < 0.99


async def test_no_slot_left_and_a_slot_given_back(pair):
    """One sequence more than slots is refused for CAPACITY; a close lets it in under the next epoch."""
    target_dir, draft_dir = pair
    config = settings(target_dir, {"small": model_drafter(draft_dir)}, kv_slots=2)
    async with linked(config) as verify:
        await verify.send(*(opening(i, drafter="small") for i in (1, 2, 3)))
        answers = {a.sequence_id: a for a in await verify.answers(3)}
        assert answers[3].reason == pb.REFUSAL_REASON_CAPACITY
        await verify.send(close(1), opening(3, epoch=2, drafter="small"))
        (answer,) = await verify.answers(1)
        assert (answer.sequence_id, answer.epoch, len(answer.token_ids)) == (3, 2, 2)


async def test_the_drafters_own_limit(pair):
    """Around its limit a drafter guesses less, then refuses: the target may go on beyond it."""
    target_dir, draft_dir = pair
    config = settings(target_dir, {"small": model_drafter(draft_dir)}, max_context=32)
    async with linked(config) as verify:
        prompt = random.Random(0).choices(range(3, VOCAB), k=29)
        await verify.send(opening(1, prompt, drafter="small", k=4))
        lengths = []
        for base in (29, 30, 31, 32):
            (answer,) = await verify.answers(1)
            lengths.append(len(answer.token_ids))
            await verify.send(commit(1, base, [7], k=4))
        (refusal,) = await verify.answers(1)
        assert lengths == [4, 3, 2, 1]
        assert refusal.reason == pb.REFUSAL_REASON_CONTEXT
        assert "33 tokens" in refusal.message
        await verify.send(
            opening(2, range(3, 36), drafter="small"), opening(3, range(3, 35), drafter="small")
        )
        answers = {a.sequence_id: a for a in await verify.answers(2)}
        assert answers[2].reason == pb.REFUSAL_REASON_CONTEXT
        assert len(answers[3].token_ids) == 1


async def test_a_drafter_with_another_tokenizer_does_not_start(pair, tmp_path):
    """Settings that cannot work are said in words at the start."""
    other = tiny_model_dir(tmp_path / "other", tokenizer_vocab=400, model_vocab=VOCAB)
    with pytest.raises(ConfigError, match=r"draft\.drafters\.alien"):
        await create_server(settings(pair[0], {"alien": model_drafter(other)}))


def test_prompt_lookup_alone_starts_without_torch(tmp_path):
    """A draft tier without models serves without importing torch, so it is up in about a second."""
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    script = textwrap.dedent("""
        import asyncio, sys
        from draft_service.service import create_server
        from paceline.config import load_config

        async def main():
            kinds = ["draft.drafters.ngram.kind=ngram", "draft.drafters.bad.kind=random"]
            config = load_config(None, [f"model.name={sys.argv[1]}", "draft.server.port=0", *kinds])
            server = await create_server(config)
            await server.start()
            await server.stop(0)

        asyncio.run(main())
        assert not {"torch", "transformers", "ray"} & set(sys.modules), "heavy imports"
    """)
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)


async def test_first_message_after_start_is_served(pair):
    """The server is not up before its models are: the first question is answered like any other."""
    async with linked(settings(pair[0], {"small": model_drafter(pair[1])})) as verify:
        async with asyncio.timeout(5):
            await verify.send(opening(1, drafter="small"))
            (answer,) = await verify.answers(1)
        assert len(answer.token_ids) == 2
