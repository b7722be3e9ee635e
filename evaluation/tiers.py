"""Tiers as processes of their own, without Ray, for the length of a block: what a measurement runs against."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

_READY = "listening on "
_START_S = 300.0
_STOP_S = 20.0


@asynccontextmanager
async def tier(module: str, settings: Sequence[str]) -> AsyncIterator[tuple[str, int]]:
    """``python -m module`` with ``settings`` (section.key=value) on a free port; gives its address and process id.

    Raises RuntimeError with what it said when it does not start.
    """
    arguments = [f"{module.removesuffix('_service')}.server.port=0", *settings]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *(part for setting in arguments for part in ("--set", setting)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    reading: asyncio.Task[bytes] | None = None
    try:
        said: list[str] = []
        async with asyncio.timeout(_START_S):
            while line := (await process.stdout.readline()).decode():
                said.append(line)
                if line.startswith(_READY):
                    break
            else:
                raise RuntimeError(f"{module} did not start: {''.join(said[-5:])}")
        reading = asyncio.create_task(process.stdout.read())  # so that it never waits for a reader
        yield said[-1].removeprefix(_READY).strip(), process.pid
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if reading is not None:
            await reading
