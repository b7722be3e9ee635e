"""Records of requests, written by a verify replica on a real socket."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from scripted_draft import ScriptedDraft, proposals, scripted_draft

import verify_service.service
from paceline import codec
from paceline.config import load_config
from paceline.serving.channel import open_channel
from paceline.testing.tiny_models import tiny_model_dir
from paceline.types import Plan, SamplingParams
from paceline.v1 import verify_pb2, verify_pb2_grpc
from verify_service.recording import SCHEMA

torch.set_num_threads(1)
PROMPT = [70, 71, 72, 73]
SECRET = 2**64 - 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def verify(model: Path, *settings: str):
    servicer = ScriptedDraft(lambda asked: [proposals(asked.proposal(*[5] * asked.k))])
    async with scripted_draft(servicer) as endpoint:
        config = load_config(
            None,
            [
                f'model.name="{model}"',
                'model.dtype="float32"',
                "verify.server.port=0",
                f"verify.draft_endpoints=['{endpoint}']",
                "verify.draft_wait_least_s=20.0",
                "verify.draft_wait_s=20.0",
                *settings,
            ],
        )
        server = await verify_service.service.create_server(config)
        await server.start()
        try:
            async with open_channel(server.address) as channel:
                stub = verify_pb2_grpc.VerifyServiceStub(channel)
                while True:
                    info = await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())
                    if any(one.name == "scripted" and one.available for one in info.drafters):
                        break
                    await asyncio.sleep(0.02)
                yield stub
        finally:
            await server.stop(0)


async def decode(stub, plan, *, max_tokens=12, leave=False):
    message = verify_pb2.DecodeRequest(
        request_id="r1",
        prompt_ids=PROMPT,
        max_tokens=max_tokens,
        plan=codec.plan_to_pb(plan),
        sampling=codec.sampling_to_pb(SamplingParams(temperature=0.7, seed=SECRET, logit_bias={99: 0.5})),
        tenant="a tenant's name",
    )
    ids, rounds = [], []
    call = stub.Decode(message, timeout=30)
    async for response in call:
        if response.HasField("run"):
            ids += response.run.token_ids
            if response.run.HasField("round"):
                rounds.append(response.run.round)
                if leave:
                    call.cancel()
                    break
    return ids, rounds


def entries(directory):
    return [json.loads(line) for path in sorted(directory.glob("*.jsonl")) for line in path.open()]


async def test_a_record_has_the_request_and_its_rounds_and_nothing_of_its_text(model, tmp_path):
    """By default neither prompt nor output, nor the tenant's name; all fields of the schema but the ids are there."""
    async with verify(model, f'verify.records.dir="{tmp_path}"') as stub:
        ids, rounds = await decode(stub, Plan.speculative("scripted", 3, "why", k_fixed=True))
        await decode(stub, Plan.plain("because"), max_tokens=900, leave=True)
    head, first, second = entries(tmp_path)
    assert head["kind"] == "replica"
    assert head["model"]["vocab_size"] == 512
    assert not head["token_ids"]
    assert set(SCHEMA) - set(first) == {"prompt_ids", "output_ids"}
    assert first["request_id"] == "r1"
    assert first["plan"]["drafter"] == "scripted"
    assert first["plan"]["drafter_version"] == "1"
    assert (first["prompt_tokens"], first["output_tokens"], first["finish"]) == (4, len(ids), "length")
    assert first["sampling"]["seed"] == str(SECRET)
    assert [(r["drafted"], r["accepted"], r["committed"], r["outcome"]) for r in first["rounds"]] == [
        (r.drafted, r.accepted, r.committed, "used") for r in rounds[:-1]
    ] + [(0, 0, 1, "none")]
    assert second["finish"] == "cancelled"
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert "tenant's name" not in text
    assert '"logit_bias":[]' in text


async def test_token_ids_are_recorded_when_they_are_asked_for(model, tmp_path):
    """Prompt and output as they were."""
    async with verify(model, f'verify.records.dir="{tmp_path}"', "verify.records.token_ids=true") as stub:
        ids, _ = await decode(stub, Plan.speculative("scripted", 3, "why", k_fixed=True))
    head, record = entries(tmp_path)
    assert head["token_ids"]
    assert record["prompt_ids"] == PROMPT
    assert record["output_ids"] == ids
    assert record["sampling"]["logit_bias"] == [{"token_id": 99, "bias": 0.5}]


async def test_nothing_is_written_unless_a_directory_is_named(model, tmp_path, monkeypatch):
    """The default leaves no file."""
    monkeypatch.chdir(tmp_path)
    async with verify(model) as stub:
        await decode(stub, Plan.plain("because"))
    assert list(tmp_path.iterdir()) == []


async def test_times_of_a_request_that_never_ran_are_no_negative_ones(model, tmp_path):
    """It waited for memory, or for the rest of its prompt, and its caller left."""
    async with verify(model, f'verify.records.dir="{tmp_path}"', "verify.kv_slots=1") as stub:
        longest = asyncio.create_task(decode(stub, Plan.plain("because"), max_tokens=900))
        await _until_running(stub, 1, 0)
        waits = asyncio.create_task(decode(stub, Plan.plain("because")))
        await _until_running(stub, 1, 1)
        waits.cancel()
        await _until_running(stub, 1, 0)
        longest.cancel()
        await _until_running(stub, 0, 0)
    _, waited, _ = entries(tmp_path)
    assert waited["output_tokens"] == 0
    assert min(waited["timings"].values()) >= 0.0


async def _until_running(stub, running: int, waiting: int) -> None:
    while True:
        info = await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())
        if (info.num_running, info.num_waiting) == (running, waiting):
            return
        await asyncio.sleep(0.005)
