"""The whole system in one process on real sockets: draft, verify and router on tiny models."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draft_service.service
import router.service
import verify_service.service
from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.config import PacelineConfig, load_config
from paceline.serving.server import TierServer
from paceline.testing.servers import CreateServer
from paceline.types import Mode

Wire = Callable[[str], AbstractAsyncContextManager[str]]
"""Relays to an endpoint; gives the address of its other end."""


@dataclass(slots=True)
class Answer:
    """One request's stream, put together."""

    started: Started
    text: str
    token_ids: list[int]
    chunks: list[Chunk]
    finished: Finished


@dataclass(slots=True)
class Stack:
    """A running system and its client."""

    client: Client
    config: PacelineConfig
    draft: TierServer
    verify: TierServer
    router: TierServer

    async def generate(self, **request: Any) -> Answer:
        """One request to its end; ``drafter`` implies speculative decoding, its absence plain."""
        if "mode" not in request:
            request["mode"] = Mode.SPECULATIVE if "drafter" in request else Mode.PLAIN
        started: Started | None = None
        chunks: list[Chunk] = []
        async for event in self.client.generate(generate_request(**request), timeout_s=60):
            match event:
                case Started():
                    started = event
                case Chunk():
                    chunks.append(event)
                case Finished():
                    assert started is not None
                    ids = [token for chunk in chunks for token in chunk.token_ids]
                    return Answer(started, "".join(c.text for c in chunks), ids, chunks, event)
        raise AssertionError("no answer")


def stack_config(target: Path, draft_model: Path, overrides: Sequence[str] = ()) -> PacelineConfig:
    """Settings for tiny models: drafters ngram, suffix, model (the draft model), self (the target itself), random, and a cascade of suffix and model.

    Look-ups are placed in the draft tier, so that what is tested goes over the link.
    """
    return load_config(
        None,
        [
            f'model.name="{target}"',
            'model.dtype="float32"',
            "verify.server.port=0",
            "draft.server.port=0",
            "router.server.port=0",
            "verify.draft_wait_s=5.0",
            "verify.draft_wait_least_s=5.0",  # counts of rounds do not depend on how busy the machine is
            "draft.drafters.ngram={kind='ngram', min_match=1, place='draft'}",
            f"draft.drafters.model={{kind='model', model={{name='{draft_model}', dtype='float32'}}}}",
            f"draft.drafters.self={{kind='model', model={{name='{target}', dtype='float32'}}}}",
            "draft.drafters.random={kind='random'}",
            "draft.drafters.suffix={kind='suffix', pool_mb=1, place='draft'}",
            "draft.drafters.cascade={kind='cascade', members=['suffix', 'model']}",
            *overrides,
        ],
    )


@asynccontextmanager
async def running_stack(config: PacelineConfig, wire: Wire | None = None) -> AsyncIterator[Stack]:
    """Start draft, verify and router, in that order; stop them in the other. ``wire`` joins the first two."""
    async with AsyncExitStack() as servers:
        draft = await _started(servers, draft_service.service.create_server, config)
        endpoint = await servers.enter_async_context(wire(draft.address)) if wire else draft.address
        config = load_config_with(config, verify={"draft_endpoints": (endpoint,)})
        verify = await _started(servers, verify_service.service.create_server, config)
        config = load_config_with(config, router={"verify_endpoints": (verify.address,)})
        router_server = await _started(servers, router.service.create_server, config)
        async with Client(router_server.address) as client:
            stack = Stack(client, config, draft, verify, router_server)
            await _until_linked(stack, len(config.draft.drafters))
            yield stack


async def _started(stack: AsyncExitStack, create: CreateServer, config: PacelineConfig) -> TierServer:
    """A tier that stops with ``stack``."""
    server = await create(config)
    stack.push_async_callback(server.stop, 0)
    await server.start()
    return server


def load_config_with(config: PacelineConfig, **sections: dict[str, Any]) -> PacelineConfig:
    """The settings with some fields of some sections replaced."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()}
    )


async def _until_linked(stack: Stack, num_drafters: int) -> None:
    import asyncio

    async with asyncio.timeout(20):
        while True:
            info = await stack.client.server_info()
            if sum(drafter.available for drafter in info.drafters) == num_drafters:
                return
            await asyncio.sleep(0.05)
