"""A replay of recorded traffic gives the very rounds of a live run, on the whole system with tiny models."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from stack import running_stack, stack_config
from typer.testing import CliRunner

from cluster.cli import app
from draft_service.drafters import build_drafters
from draft_service.scoring import Score
from evaluation.recordings import load_recording
from evaluation.replay import Replay, always
from paceline.testing.tiny_models import tiny_pair
from paceline.tokenizer import Tokenizer
from verify_service.beside import build_beside

torch.set_num_threads(1)
QUESTIONS = [
    "the riders take turns",
    "a list of numbers: 1, 2, 3, 1, 2, 3, 1, 2",
    "names: Ada, Ada, Ada, Ada",
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("pair"))


async def served(config, directory: Path, drafter: str, k: int, *, at_once: bool = False):
    """The requests decoded by ``drafter`` with ``k``, as the verify tier recorded them."""
    settings = config.verify.records.model_copy(update={"dir": str(directory), "token_ids": True})
    config = config.model_copy(update={"verify": config.verify.model_copy(update={"records": settings})})
    waiting = []
    async with running_stack(config) as stack:
        for turn in (0, 9):  # the second time there is something to remember
            for number, text in enumerate(QUESTIONS):
                request = stack.generate(
                    text=text,
                    drafter=drafter,
                    k=k,
                    max_tokens=20 + turn,
                    temperature=0.8 * (number % 2),
                    seed=number,
                    tenant=f"tenant {number % 2}",
                )
                waiting.append(request)
                if not at_once:
                    await waiting.pop()
        await asyncio.gather(*waiting)
    return load_recording([directory])


@pytest.mark.parametrize(("drafter", "k"), [("suffix", 5), ("beside", 5), ("model", 3)])
async def test_replayed_rounds_are_those_of_a_live_run(pair, tmp_path, drafter, k):
    """Recorded with one drafter and k, replayed with another drafter and k, equal to a run with these: every round."""
    target, draft = pair
    config = stack_config(
        target,
        draft,
        [
            "verify.draft_wait_least_s=60.0",
            "verify.draft_wait_s=60.0",
            "draft.drafters.beside={kind='suffix', pool_mb=1}",  # looked up beside the target
        ],
    )
    recorded = await served(config, tmp_path / "recorded", "random", 2)
    live = await served(config, tmp_path / "live", drafter, k)
    drafters = build_drafters(config, Tokenizer.load(target))
    beside = build_beside(config.draft, recorded.tokenizer_fingerprint)
    replay = Replay(recorded, drafters, always(drafter, k, k_fixed=True), beside=beside)
    replayed = replay.run()
    assert [one.output_ids for one in live.requests] == [one.output_ids for one in recorded.requests]
    assert [list(one.rounds) for one in replayed] == [list(one.rounds) for one in live.requests]
    assert sum(one.stats.num_accepted_draft_tokens for one in replayed) > 10


async def test_requests_side_by_side_are_replayed_side_by_side(pair, tmp_path):
    """Who shared a batch with whom changes no round of a drafter that knows its own text only."""
    config = stack_config(*pair, ["verify.draft_wait_least_s=60.0", "verify.draft_wait_s=60.0"])
    recorded = await served(config, tmp_path / "recorded", "ngram", 2, at_once=True)
    live = await served(config, tmp_path / "live", "model", 4, at_once=True)
    drafters = build_drafters(config, Tokenizer.load(pair[0]))
    replayed = Replay(recorded, drafters, always("model", 4, k_fixed=True)).run()
    asked = {one.request_id: (one.sampling.seed, one.max_tokens) for one in recorded.requests}
    rounds = {asked[one.request_id]: one.rounds for one in replayed}
    assert rounds == {(one.sampling.seed, one.max_tokens): one.rounds for one in live.requests}
    assert len(rounds) == 2 * len(QUESTIONS)
    settings = [
        "--set",
        f"draft.drafters.model={{kind='model', model={{name='{pair[1]}', dtype='float32'}}}}",
    ]
    told = CliRunner().invoke(
        app, ["replay", str(tmp_path / "recorded"), "-d", "model", "-k", "4", "--json", *settings]
    )
    row = json.loads(told.stdout)["rows"][1]
    assert (row["name"], row["rounds"]) == ("model k=4", sum(map(len, rounds.values())))


async def test_a_draft_replica_scores_itself_and_the_scores_tell_the_rounds(pair, tmp_path):
    """With nobody asking, texts are scored under drafters that did not serve them; the rounds of k = 3 that follow from the
    score of the one that did are those that were served.
    """
    target, draft = pair
    config = stack_config(
        target,
        draft,
        [
            "verify.draft_wait_least_s=60.0",
            "verify.draft_wait_s=60.0",
            f'verify.records.dir="{tmp_path}"',
            f'draft.scores.dir="{tmp_path}"',
            'draft.scores.drafters=["model", "self", "ngram"]',
        ],
    )
    async with running_stack(config) as stack:
        for number, text in enumerate(QUESTIONS):
            await stack.generate(text=text, drafter="model", k=3, max_tokens=30, temperature=0.5, seed=number)
        async with asyncio.timeout(20):
            while len(entries(tmp_path, "scores")) < 3 * len(QUESTIONS):
                await asyncio.sleep(0.05)
    refused = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert refused.exit_code == 2
    assert "record with verify.records.token_ids = true" in refused.stderr
    served = {(one["verify_id"], one["sequence_id"]): one for one in entries(tmp_path, "requests")}
    by_model = [one for one in entries(tmp_path, "scores") if one["drafter"] == "model"]
    assert len(served) == len(by_model) == len(QUESTIONS)
    for one in by_model:
        score = Score(one["k"], one["matches"], one["judged"], [])
        lengths = [r["committed"] for r in served[one["verify_id"], one["sequence_id"]]["rounds"]]
        told = score.rounds(3)
        assert told[:-1] == lengths[: len(told) - 1]  # the mirror was not told of the last round
        assert 1 + sum(told) == one["output_tokens"]
    itself = [one for one in entries(tmp_path, "scores") if one["drafter"] == "self"]
    assert all(one["matches"] == one["judged"] for one in itself)  # the target's own guesses are never wrong
    assert sum(map(sum, (one["matches"] for one in itself))) > 100


def entries(directory, kind):
    found = [json.loads(line) for path in directory.glob(f"{kind}-*.jsonl") for line in path.open()]
    return [one for one in found if one["kind"] == kind]
