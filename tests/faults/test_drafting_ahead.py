"""Drafting ahead on the whole system: the same tokens at every level, whatever the drafter says and whatever dies."""

import asyncio
import random
from pathlib import Path

import pytest
from scripted_draft import Asked, ScriptedDraft, proposals, scripted_draft
from stack import load_config_with, running_stack, stack_config

import draft_service.service
import verify_service.service
from paceline.config import load_config
from paceline.serving.channel import open_channel
from paceline.v1 import common_pb2, draft_pb2, verify_pb2, verify_pb2_grpc

PROMPT = "The riders take turns at the front of the line"


def levels(level: int, fan: int = 2) -> list[str]:
    return [f'verify.draft_level="{level}"', f"verify.draft_fan={fan}"]


@pytest.mark.parametrize(("level", "fan"), [(1, 1), (2, 1), (2, 3)])
async def test_the_same_tokens_at_every_level(pair: tuple[Path, Path], level: int, fan: int) -> None:
    """Equal to plain, at two temperatures and with penalties; blocks drafted ahead were asked for and some were used.

    How many are used depends on who is quicker, drafter or verifier, and so on the machine: it is not stated.
    """
    async with running_stack(stack_config(*pair, overrides=levels(level, fan))) as stack:
        hits = asked_ahead = 0
        for extra in ({"temperature": 0.0}, {"temperature": 0.8}, {"frequency_penalty": 0.5}):
            request = {"text": PROMPT, "max_tokens": 60, "seed": 5, **extra}
            plain = await stack.generate(**request)
            for drafter in ("self", "model"):
                answer = await stack.generate(**request, drafter=drafter, k=3)
                assert answer.token_ids == plain.token_ids
                (last,) = await stack.client.list_requests(limit=1)
                hits += sum(record.ahead_hit for record in last.rounds)
                assert {record.ahead_level for record in last.rounds} <= {0, level}
                asked_ahead += sum(record.ahead_level == level for record in last.rounds)
                assert all(record.accepted <= record.drafted <= 3 for record in last.rounds)
                assert all(record.ahead_level for record in last.rounds if record.ahead_hit)
        assert 0 < hits <= asked_ahead


async def test_many_sequences_draft_ahead_within_few_slots(pair: tuple[Path, Path]) -> None:
    """Slots lent to outcomes come back when a new sequence needs one; nothing is left at the end."""
    overrides = [*levels(2, 3), "draft.kv_slots=6"]
    async with running_stack(stack_config(*pair, overrides=overrides)) as stack:
        requests = [
            {"text": f"{i} {PROMPT}", "max_tokens": 40, "temperature": 0.7, "seed": i} for i in range(6)
        ]
        plain = [await stack.generate(**request) for request in requests]
        drafted = await asyncio.gather(
            *(stack.generate(**request, drafter="model", k=2) for request in requests)
        )
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        again = await stack.generate(**requests[0], drafter="model", k=2)
        assert again.finished.speculative.num_unavailable_rounds <= 1


@pytest.mark.parametrize("level", [1, 2])
async def test_the_drafter_restarts_while_it_drafts_ahead(pair: tuple[Path, Path], level: int) -> None:
    """No error, no token changed, and used again within 5 s of its return."""
    async with running_stack(stack_config(*pair, overrides=levels(level))) as stack:
        request = {"text": PROMPT, "max_tokens": 900, "temperature": 0.8, "seed": 5}
        plain = await stack.generate(**request)
        running = asyncio.create_task(stack.generate(**request, drafter="self", k=3))
        await asyncio.sleep(0.2)
        port = stack.draft.port
        await stack.draft.stop(0)
        config = load_config_with(
            stack.config, draft={"server": stack.config.draft.server.model_copy(update={"port": port})}
        )
        again = await draft_service.service.create_server(config)
        await again.start()
        try:
            assert (await running).token_ids == plain.token_ids
            async with asyncio.timeout(5):
                while True:
                    later = await stack.generate(text=PROMPT, max_tokens=20, seed=1, drafter="self", k=3)
                    if later.finished.speculative.num_accepted_draft_tokens:
                        break
        finally:
            await again.stop(0)


class Mischief:
    """Answers, and ahead of the verdict pushes blocks that are right, wrong, doubled, late, malformed or of old epochs."""

    def __init__(self) -> None:
        self.dice = random.Random(3)
        self.held: list[draft_pb2.Proposal] = []

    def __call__(self, asked: Asked) -> list[draft_pb2.LinkResponse]:
        dice = self.dice
        entries = [asked.proposal(*(dice.randrange(400) for _ in range(asked.k)))]
        for _ in range(6):
            entry = asked.proposal(*(dice.randrange(500) for _ in range(dice.randrange(asked.k + 2))))
            entry.assumed_ids.extend(dice.randrange(520) for _ in range(1 + dice.randrange(3)))
            entry.base_len += dice.choice([0, 0, 0, -1, -2, 1, 7])
            entry.epoch += dice.choice([0, 0, 0, 0, 1]) if dice.random() < 0.5 else 0
            entries.append(entry)
        self.held += entries
        if dice.random() < 0.3:
            entries += [dice.choice(self.held) for _ in range(4)]  # doubled, stale
        if dice.random() < 0.05:
            entries.pop(0)  # dropped
        dice.shuffle(entries)
        return [proposals(*entries)] if entries else []


async def test_a_drafter_that_pushes_anything_changes_no_token(pair: tuple[Path, Path]) -> None:
    """Random blocks ahead, under random stamps: the text is plain's, and no request fails."""
    servicer = ScriptedDraft(Mischief(), max_level=2)
    async with scripted_draft(servicer) as endpoint:
        config = load_config(
            None,
            [
                f'model.name="{pair[0]}"',
                'model.dtype="float32"',
                "verify.server.port=0",
                "verify.draft_wait_s=0.02",
                f'verify.draft_endpoints=["{endpoint}"]',
                *levels(2, 3),
            ],
        )
        verify = await verify_service.service.create_server(config)
        await verify.start()
        try:
            async with open_channel(verify.address) as channel:
                stub = verify_pb2_grpc.VerifyServiceStub(channel)
                while not (await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).drafters:
                    await asyncio.sleep(0.02)

                async def decode(seed: int, mode: common_pb2.DecodingMode.ValueType) -> list[int]:
                    request = verify_pb2.DecodeRequest(
                        request_id="r",
                        prompt_ids=[5, 6, 7],
                        max_tokens=80,
                        sampling=common_pb2.SamplingParams(temperature=0.8, seed=seed, top_p=1.0),
                        plan=common_pb2.Plan(mode=mode, drafter="scripted", k_max=3, k_fixed=True),
                    )
                    return [token async for event in stub.Decode(request) for token in event.run.token_ids]

                for seed in range(3):
                    plain = await decode(seed, common_pb2.DECODING_MODE_PLAIN)
                    assert await decode(seed, common_pb2.DECODING_MODE_SPECULATIVE) == plain
                assert servicer.questions > 20
        finally:
            await verify.stop(0)
