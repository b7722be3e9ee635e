"""Does memory stay flat? A thousand requests in each state (plain, speculative by each kind of drafter), under Ray.

    python -m benchmarks.soak [--quick]

Tiny random models stand in, so that the requests are many and what grows is our own. Resident memory of every tier is
read after each hundred requests; the slope is fitted without the first fifth. The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import numpy as np

from cluster.launch import Cluster, running_cluster
from paceline.client import Client, Finished, generate_request
from paceline.config import load_config
from paceline.testing.tiny_models import tiny_pair
from paceline.types import Mode

BAR_MB_A_REQUEST = 0.1
STREAMS = 8
SAMPLE_EVERY = 100


def resident_mb(pid: int) -> float:
    """Resident set of a process, MB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def request(client: Client, number: int, drafter: str) -> int:
    """One request of up to 24 tokens; every seventh is cancelled on the way. Gives the tokens seen."""
    message = generate_request(
        token_ids=[5 + (number * 31 + i * 7) % 400 for i in range(20 + number % 40)],
        max_tokens=24,
        temperature=0.8,
        seed=number,
        mode=Mode.SPECULATIVE if drafter else Mode.PLAIN,
        drafter=drafter or None,
        k=4 if drafter else None,
        tenant=f"t{number % 5}",
    )
    stream = client.generate(message)
    assert isinstance(stream, AsyncGenerator)
    seen = 0
    async for event in stream:
        seen += 1
        if number % 7 == 0 and seen > 3:
            await stream.aclose()
            break
        if isinstance(event, Finished):
            return event.usage.completion_tokens
    return 0


async def state(cluster: Cluster, drafter: str, requests: int) -> dict[str, list[float]]:
    """Resident memory of each tier over ``requests`` requests."""
    pids = cluster.pids()
    memory: dict[str, list[float]] = {name: [] for name in pids}
    async with Client(cluster.router_address) as client:
        for first in range(0, requests, SAMPLE_EVERY):
            numbers = iter(range(first, first + SAMPLE_EVERY))

            async def worker(numbers: Iterator[int] = numbers) -> None:
                for number in numbers:
                    await request(client, number, drafter)

            await asyncio.gather(*(worker() for _ in range(STREAMS)))
            for name, pid in pids.items():
                memory[name].append(resident_mb(pid))
    return memory


def slope(samples: list[float]) -> float:
    """MB a request, fitted without the first fifth."""
    kept = samples[len(samples) // 5 :]
    return float(np.polyfit(np.arange(len(kept)) * SAMPLE_EVERY, kept, 1)[0])


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="500 requests a state")
    args = parser.parse_args()
    requests = 500 if args.quick else 1000
    slopes: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        target, draft = tiny_pair(Path(directory))
        config = load_config(
            None,
            [
                f'model.name="{target}"',
                "router.server.port=0",
                "verify.server.port=0",
                "draft.server.port=0",
                f"draft.drafters.model={{kind='model', model={{name='{draft}'}}}}",
                "draft.drafters.ngram={kind='ngram'}",
            ],
        )
        with running_cluster(config) as cluster:
            for drafter in ("", "ngram", "model"):
                memory = asyncio.run(state(cluster, drafter, requests))
                name = drafter or "plain"
                slopes[name] = {tier: round(slope(samples), 4) for tier, samples in memory.items()}
                ends = ", ".join(f"{t} {s[0]:.0f} -> {s[-1]:.0f} MB" for t, s in memory.items())
                print(f"{name}: {requests} requests, {ends}; slope {slopes[name]} MB a request", flush=True)
    worst = max(value for state_slopes in slopes.values() for value in state_slopes.values())
    result = {
        "benchmark": "soak",
        "slope_mb_a_request": slopes,
        "worst": worst,
        "bar": {"worst": BAR_MB_A_REQUEST},
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
