"""Tiers on real sockets, for the length of a block."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from paceline.config import PacelineConfig
from paceline.serving.server import TierServer

CreateServer = Callable[[PacelineConfig], Awaitable[TierServer]]


@asynccontextmanager
async def running_server(
    create_server: CreateServer, config: PacelineConfig, *, drain_s: float = 0.0
) -> AsyncIterator[str]:
    """``create_server(config)`` started; gives its address. At the end calls in flight are cut after ``drain_s``.

    Use port 0 in the tier's settings, so that tests can run side by side.
    """
    server = await create_server(config)
    try:
        await server.start()
        yield server.address
    finally:
        await server.stop(drain_s)
