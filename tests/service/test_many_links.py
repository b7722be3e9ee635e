"""Several draft replicas for a verify replica and the reverse, on real sockets."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from scripted_draft import Asked, ScriptedDraft, proposals, scripted_draft

import draft_service.service
import verify_service.service
from paceline import codec
from paceline.config import load_config
from paceline.serving.channel import open_channel
from paceline.testing.faulty_link import faulty_link
from paceline.testing.servers import running_server
from paceline.testing.tiny_models import tiny_pair
from paceline.types import Plan, SamplingParams
from paceline.v1 import common_pb2, draft_pb2, verify_pb2, verify_pb2_grpc

Stub = verify_pb2_grpc.VerifyServiceStub
PROMPTS = [[5 + i, 6, 7] for i in range(4)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("pair"))


@asynccontextmanager
async def verify(target: Path | str, endpoints: list[str], *settings: str) -> AsyncIterator[Stub]:
    """A verify replica that is linked to all of them."""
    config = load_config(
        None,
        [
            f'model.name="{target}"',
            'model.dtype="float32"',
            "verify.server.port=0",
            f"verify.draft_endpoints={endpoints}",
            "draft.drafters={scripted={kind='random'}}",  # nothing is looked up beside the target
            *settings,
        ],
    )
    async with (
        running_server(verify_service.service.create_server, config) as address,
        open_channel(address) as channel,
    ):
        yield Stub(channel)


@asynccontextmanager
async def real_draft(target: Path, drafter: Path, *names: str) -> AsyncIterator[str]:
    """A draft replica with drafters ``model`` (the draft model) and ``self`` (the target itself), or some of them."""
    paths = {"model": drafter, "self": target}
    config = load_config(
        None,
        [
            f'model.name="{target}"',
            "draft.server.port=0",
            *(
                f"draft.drafters.{name}={{kind='model', model={{name='{paths[name]}', dtype='float32'}}}}"
                for name in names
            ),
        ],
    )
    async with running_server(draft_service.service.create_server, config) as address:
        yield address


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def until_offered(stub: Stub, *names: str) -> None:
    async with asyncio.timeout(20):
        while True:
            info = await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())
            if {drafter.name for drafter in info.drafters if drafter.available} >= set(names):
                return
            await asyncio.sleep(0.02)


async def decode(
    stub: Stub, prompt: list[int], drafter: str, max_tokens: int = 60
) -> tuple[list[int], list[common_pb2.RoundRecord], verify_pb2.DecodeFinished]:
    """Token ids, records and end. ``drafter`` empty: plain."""
    plan = Plan.speculative(drafter, 3, "test", k_fixed=True) if drafter else Plan.plain("test")
    call = stub.Decode(
        verify_pb2.DecodeRequest(
            request_id="r",
            prompt_ids=prompt,
            sampling=codec.sampling_to_pb(SamplingParams(temperature=0.0)),
            max_tokens=max_tokens,
            plan=codec.plan_to_pb(plan),
        )
    )
    ids: list[int] = []
    rounds = []
    async for event in call:
        if event.HasField("run"):
            ids += event.run.token_ids
            if event.run.HasField("round"):
                rounds.append(event.run.round)
        elif event.HasField("finished"):
            return ids, rounds, event.finished
    raise AssertionError("no end")


class Oracle(ScriptedDraft):
    """Says what the target will say, after a moment, and remembers how sequences were opened."""

    def __init__(self, texts: list[list[int]]) -> None:
        super().__init__(self._guess, delay_s=0.001)
        self.texts = texts
        self.opened: list[tuple[int, tuple[int, ...]]] = []  # epoch, tokens at the first question under it
        self._epochs: set[tuple[int, int]] = set()

    def _guess(self, asked: Asked) -> list[draft_pb2.LinkResponse]:
        if (asked.sequence_id, asked.epoch) not in self._epochs:
            self._epochs.add((asked.sequence_id, asked.epoch))
            self.opened.append((asked.epoch, asked.tokens))
        at = len(asked.tokens)
        (text,) = (text for text in self.texts if tuple(text[:at]) == asked.tokens)
        return [proposals(asked.proposal(*text[at : at + 1]))]


PATIENT = ["verify.draft_wait_s=5.0", "verify.draft_wait_least_s=5.0"]
"""What is counted does not depend on how busy the machine is."""
STEADY = ['simulation.pair="8b+1b"', "simulation.time_scale=0.2", "verify.draft_wait_s=0.2"]
"""A verify step takes 5.6 ms, so that there is time to see a link fall silent."""


@pytest.mark.parametrize("how", ["gone", "silent"])
async def test_sequences_go_on_at_another_replica_when_theirs_dies_or_hangs(how: str) -> None:
    """They spread over two replicas; those of the lost one are opened at the other, with all that is committed, one epoch later."""
    async with verify("simulated", [], "simulation.time_scale=0") as stub:
        plain = [(await decode(stub, prompt, "", 500))[0] for prompt in PROMPTS]
    texts = [prompt + ids for prompt, ids in zip(PROMPTS, plain, strict=True)]
    first, second = Oracle(texts), Oracle(texts)
    lost = AsyncExitStack()
    async with lost, scripted_draft(second) as other:
        endpoint = await lost.enter_async_context(scripted_draft(first))
        endpoint, wire = await lost.enter_async_context(faulty_link(endpoint))
        async with verify("simulated", [endpoint, other], *STEADY) as stub:
            await until_offered(stub, "scripted")
            running = [asyncio.create_task(decode(stub, prompt, "scripted", 500)) for prompt in PROMPTS]
            await until(lambda: bool(first.live and second.live) and first.questions > 6)
            if how == "gone":
                await lost.aclose()
            else:
                wire.hang()
            answers = await asyncio.gather(*running)
            wire.go_on()
    assert [ids for ids, _, _ in answers] == plain
    assert {tokens[:3] for _, tokens in second.opened} == {tuple(prompt) for prompt in PROMPTS}
    moved = [(epoch, tokens) for epoch, tokens in second.opened if epoch > 1]
    assert moved
    for _, tokens in moved:
        assert any(tuple(text[: len(tokens)]) == tokens for text in texts)
    begin = {tokens[:3]: len(tokens) for _, tokens in moved}
    assert any(
        record.accepted and record.base_len >= begin.get(tuple(prompt), 1 << 30)
        for prompt, (_, rounds, _) in zip(PROMPTS, answers, strict=True)
        for record in rounds
    ), "drafted for where they moved to"


async def test_two_verify_replicas_share_a_draft_replica(pair: tuple[Path, Path]) -> None:
    """Their sequences have the same ids and do not meet; one leaves in mid-stream, the other notices nothing."""
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(real_draft(*pair, "model", "self"))
        leaving = AsyncExitStack()
        leaves = await leaving.enter_async_context(verify(pair[0], [endpoint], *PATIENT))
        stays = await stack.enter_async_context(verify(pair[0], [endpoint], *PATIENT))
        await until_offered(leaves, "model", "self")
        await until_offered(stays, "model", "self")
        plain = [(await decode(stays, prompt, ""))[0] for prompt in PROMPTS]
        asked = [(prompt, name) for prompt in PROMPTS for name in ("model", "self")]
        both = await asyncio.gather(
            *(decode(stub, prompt, name) for stub in (leaves, stays) for prompt, name in asked)
        )
        assert [ids for ids, _, _ in both] == [ids for ids in plain for _ in range(2)] * 2
        longer = (await decode(stays, PROMPTS[0], "", 300))[0]
        left = asyncio.create_task(decode(leaves, PROMPTS[1], "model", 300))
        stayed = asyncio.create_task(decode(stays, PROMPTS[0], "self", 300))
        await asyncio.sleep(0.05)
        await leaving.aclose()
        await asyncio.wait([left])
        ids, _, finished = await stayed
        assert ids == longer
        assert finished.speculative.num_accepted_draft_tokens


async def test_each_replica_is_asked_for_the_drafters_that_it_has(pair: tuple[Path, Path]) -> None:
    """Two replicas, one of which alone has the drafter ``self``: when it goes, its sequences go on plainly, the rest moves."""
    async with AsyncExitStack() as stack:
        small = await stack.enter_async_context(real_draft(*pair, "model"))
        leaving = AsyncExitStack()
        large = await leaving.enter_async_context(real_draft(*pair, "model", "self"))
        stub = await stack.enter_async_context(verify(pair[0], [small, large], *PATIENT))
        await until_offered(stub, "model", "self")
        plain = [(await decode(stub, prompt, "", 200))[0] for prompt in PROMPTS]
        asked = [(prompt, name) for prompt in PROMPTS for name in ("model", "self")]
        answers = await asyncio.gather(*(decode(stub, prompt, name, 200) for prompt, name in asked))
        assert [ids for ids, _, _ in answers] == [ids for ids in plain for _ in range(2)]
        running = [asyncio.create_task(decode(stub, prompt, name, 200)) for prompt, name in asked]
        await asyncio.sleep(0.05)
        await leaving.aclose()
        assert [(await task)[0] for task in running] == [ids for ids in plain for _ in range(2)]
        _, _, after = await decode(stub, PROMPTS[0], "self", 40)
        assert after.speculative.num_draft_tokens == 0
        _, _, after = await decode(stub, PROMPTS[0], "model", 40)
        assert after.speculative.num_draft_tokens > 0
