"""What watching costs: the same requests with nothing, with metrics, and with every request traced, in one run.

    python -m benchmarks.telemetry [--quick]

Two stacks stand side by side, each a draft, a verify and a router process on SmolLM2, one with metrics. Tracing is switched by
the caller's traceparent on one and the same stack, so nothing else differs; metrics differ by the stack, so the depth of drafting is fixed
and both do the same work. A round of requests goes to each arm in turn, so that a busy moment hits all of them. Metrics are scraped every
second, several times as often as usual; spans go to a collector in a process of its own. Figures: wall time a round against the arm with
nothing, and the same for the tiers' own CPU time, which a busy machine disturbs less.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.client import Client, Finished, generate_request
from paceline.testing.collector import OtlpCollector
from paceline.types import Mode

ARMS = ("nothing", "metrics", "traces")
STACKS = {"nothing": "plain", "traces": "plain", "metrics": "metrics"}
BARS = {"metrics": 0.01, "traces": 0.02}
PROMPTS = (
    "Rewrite in one sentence: The meeting was moved. It is now on Friday. Everybody has been told.",
    "Extract the names to JSON: Anna met Bob in Paris on Monday, and Carl met Dora in Rome on Tuesday.",
    "Write a poem about a river that is late for the sea.",
    "Explain how a bicycle stays upright.",
)


@dataclass
class Stack:
    """Three processes."""

    address: str
    pids: list[int]
    metrics: list[str]

    def cpu_s(self) -> float:
        """User and system time of the tiers so far."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class Arm:
    """What was measured."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@contextlib.contextmanager
def process(module: str, *settings: str) -> Iterator[tuple[str, str, int]]:
    """A tier; its address, its metrics' address, itself."""
    command = [sys.executable, "-m", module, *(part for one in settings for part in ("--set", one))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    # A file, not a pipe: nobody reads while requests run, and a tier that fills a pipe with its log stands still.
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            assert running.stdout is not None
            address = next(
                (line.split()[-1] for line in running.stdout if line.startswith("listening on ")), ""
            )
            if not address:
                running.wait()
                raise RuntimeError(Path(log.name).read_text(encoding="utf-8")[-2000:])
            time.sleep(0.2)
            found = re.search(r"url=http://(\S+)/metrics", Path(log.name).read_text(encoding="utf-8"))
            yield address, found[1] if found else "", running.pid
        finally:
            running.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(15)
            running.kill()


@contextlib.contextmanager
def stack(name: str, collector: str) -> Iterator[Stack]:
    """Three tiers."""
    port = "0" if name == "metrics" else '"off"'
    common = ["model.threads=1", f'telemetry.otlp_endpoint="{collector}"', 'verify.depth="fixed"']
    with contextlib.ExitStack() as entered:

        def start(tier: str, module: str, *more: str) -> tuple[str, str, int]:
            own = [f"{tier}.server.port=0", f"{tier}.server.metrics_port={port}"]
            return entered.enter_context(process(module, *common, *own, *more))

        draft = start("draft", "draft_service")
        verify = start("verify", "verify_service", f'verify.draft_endpoints=["{draft[0]}"]')
        router = start("router", "router", f'router.verify_endpoints=["{verify[0]}"]')
        tiers = (draft, verify, router)
        yield Stack(router[0], [one[2] for one in tiers], [one[1] for one in tiers if one[1]])


WISHES: tuple[dict[str, Any], ...] = (
    {"mode": Mode.SPECULATIVE, "drafter": "ngram", "k": 4},
    {"mode": Mode.SPECULATIVE, "drafter": "distilled", "k": 4},
    {"mode": Mode.PLAIN},
    {"mode": Mode.PLAIN},
)


async def round_of_requests(client: Client, tokens: int, *, traced: bool) -> None:
    """Four at once, traced or not as the caller's context says."""

    async def one(prompt: str, wish: dict[str, Any]) -> None:
        request = generate_request(
            messages=[("user", prompt)], temperature=0.0, max_tokens=tokens, ignore_eos=True, **wish
        )
        context = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{'01' if traced else '00'}"
        async for event in client.generate(request, timeout_s=120, metadata=[("traceparent", context)]):
            if isinstance(event, Finished):
                return

    await asyncio.gather(*(one(prompt, wish) for prompt, wish in zip(PROMPTS, WISHES, strict=True)))


async def scraping(addresses: list[str]) -> None:
    while True:
        for address in addresses:
            await asyncio.to_thread(
                lambda url: urllib.request.urlopen(url).read(), f"http://{address}/metrics"
            )
        await asyncio.sleep(1.0)


async def measure(rounds: int, tokens: int) -> dict[str, object]:
    collecting = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
        [sys.executable, "-m", "benchmarks.telemetry", "--collect"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert collecting.stdout is not None
        collector = collecting.stdout.readline().strip()
        async with contextlib.AsyncExitStack() as opened:
            stacks = {name: opened.enter_context(stack(name, collector)) for name in set(STACKS.values())}
            clients = {
                name: await opened.enter_async_context(Client(one.address)) for name, one in stacks.items()
            }
            arms = {arm: Arm() for arm in ARMS}
            scraper = asyncio.create_task(scraping(stacks["metrics"].metrics))
            for number in range(-3, rounds):  # the first ones warm up
                shift = number % len(ARMS)
                for arm in (*ARMS[shift:], *ARMS[:shift]):
                    one = stacks[STACKS[arm]]
                    cpu, wall = one.cpu_s(), time.monotonic()
                    await round_of_requests(clients[STACKS[arm]], tokens, traced=arm == "traces")
                    waited = time.monotonic() - wall
                    await asyncio.sleep(0.6)  # what is sent afterwards counts too
                    if number >= 0:
                        arms[arm].wall.append(waited)
                        arms[arm].cpu.append(one.cpu_s() - cpu)
            scraper.cancel()
    finally:
        collecting.terminate()
        collecting.wait(10)
    return figures(arms, rounds, tokens)


def figures(stacks: dict[str, Arm], rounds: int, tokens: int) -> dict[str, object]:
    base = stacks["nothing"]
    result: dict[str, object] = {"rounds": rounds, "tokens_a_round": tokens * len(PROMPTS)}
    for arm in ARMS[1:]:
        for name in ("wall", "cpu"):
            ratios = [a / b - 1 for a, b in zip(getattr(stacks[arm], name), getattr(base, name), strict=True)]
            whole = sum(getattr(stacks[arm], name)) / sum(getattr(base, name)) - 1
            minimum = min(getattr(stacks[arm], name)) / min(getattr(base, name)) - 1
            spread = statistics.quantiles(ratios, n=4) if len(ratios) > 3 else [min(ratios), 0, max(ratios)]
            result[f"{arm}_{name}"] = {
                "whole": round(whole, 4),
                "median": round(statistics.median(ratios), 4),
                "minima": round(minimum, 4),
                "quartiles": [round(spread[0], 4), round(spread[2], 4)],
            }
    result["tokens_per_s"] = {
        arm: round(tokens * len(PROMPTS) / statistics.median(one.wall), 1) for arm, one in stacks.items()
    }
    result["bars"] = BARS
    return result


async def collect() -> None:
    async with OtlpCollector() as collector:
        print(collector.endpoint, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the tiers end with it
    if arguments.collect:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(collect())
        return
    rounds, tokens = (12, 64) if arguments.quick else (60, 128)
    result = asyncio.run(measure(rounds, tokens))
    for name, value in result.items():
        print(f"{name}: {value}")
    print(f"RESULT {json.dumps(result)}")


if __name__ == "__main__":
    main()
