"""``python -m router`` as its own process."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from scripted_verify import Script, ask, scripted_verify, tokenizer, tokenizer_dir

from paceline.client import Client

IDS = tokenizer().encode("one two three")


async def start(*settings: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router",
        *(part for setting in ("router.server.port=0", *settings) for part in ("--set", setting)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=dict(os.environ),
    )


async def test_it_serves_and_ends_in_order_when_told_to() -> None:
    """SIGTERM: the request in flight is finished, then exit code 0."""
    async with scripted_verify(Script(output=IDS, delay_s=0.1)) as verify:
        process = await start(
            f'model.name="{tokenizer_dir()}"', f'router.verify_endpoints=["{verify.address}"]'
        )
        assert process.stdout is not None
        address = ""
        while not address:
            line = (await process.stdout.readline()).decode()
            assert line, (await process.communicate())[1].decode()
            if line.startswith("listening on "):
                address = line.split()[-1]
        async with Client(address) as client:
            task = asyncio.create_task(ask(client, max_tokens=len(IDS)))
            while not verify.servicer.active:
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            answer = await task
        _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert answer.ids == IDS
    assert process.returncode == 0, stderr.decode()
    assert b"Traceback" not in stderr


async def test_a_wrong_policy_ends_the_start_in_words() -> None:
    """Exit code 2, naming the key."""
    process = await start(f'model.name="{tokenizer_dir()}"', 'router.plans.poetry={mode="plain"}')
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert b"unknown types of task ['poetry']" in stderr
