"""What handing out tokens costs: processor time a message in each tier, by streams, where forwards cost none.

    python -m benchmarks.messages [--quick] [--streams 1 8 32 128]

All three tiers as processes, on simulated devices whose forwards are sleeps; plain streams, so that every token is a message to its client.
Processor time is of the whole process, its engine's own work included, over the messages that clients got. ``most_messages_s`` is what the
busiest tier could hand out with a core of its own. The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import contextlib
import json
import os
import time
from pathlib import Path

from benchmarks.telemetry import process
from cluster.simulated import simulated
from paceline.client import Chunk, Client, generate_request
from paceline.types import Mode

PAIR = "8b+1b"
WARM_UP_TOKENS = 16


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stream(client: Client, number: int, max_tokens: int) -> int:
    """Messages with tokens that a plain stream took."""
    prompt = f"Write a long story, number {number}, about a lighthouse keeper and a storm."
    request = generate_request(
        text=prompt, max_tokens=max_tokens, mode=Mode.PLAIN, seed=number, ignore_eos=True
    )
    return sum([isinstance(event, Chunk) async for event in client.generate(request)])


async def measured(router: str, pids: dict[str, int], streams: int, max_tokens: int) -> dict[str, float]:
    """Milliseconds of processor time a message by tier, and messages a second."""
    async with Client(router) as client:
        await asyncio.gather(*[stream(client, number, WARM_UP_TOKENS) for number in range(streams)])
        before, begun = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
        counts = await asyncio.gather(*[stream(client, number, max_tokens) for number in range(streams)])
        took_s = time.monotonic() - begun
    messages = sum(counts)
    found = {f"{name}_ms": 1e3 * (cpu_s(pid) - before[name]) / messages for name, pid in pids.items()}
    most = 1e3 / max(found["verify_ms"], found["router_ms"])
    figures = {"streams": streams, **found, "messages_s": messages / took_s, "most_messages_s": most}
    return {name: round(value, 3 if name.endswith("_ms") else 0) for name, value in figures.items()}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    args = parser.parse_args()
    settings = [
        *simulated(PAIR),
        *(f'{tier}.server.metrics_port="off"' for tier in ("draft", "verify", "router")),
    ]
    slots = f"verify.kv_slots={max(args.streams)}"
    figures = []
    with contextlib.ExitStack() as stack:
        draft, _, _ = stack.enter_context(process("draft_service", *settings, "draft.server.port=0"))
        draft_endpoints = f'verify.draft_endpoints=["{draft}"]'
        verify, _, verify_pid = stack.enter_context(
            process("verify_service", *settings, "verify.server.port=0", draft_endpoints, slots)
        )
        verify_endpoints = f'router.verify_endpoints=["{verify}"]'
        router, _, router_pid = stack.enter_context(
            process("router", *settings, "router.server.port=0", verify_endpoints)
        )
        pids = {"verify": verify_pid, "router": router_pid, "client": os.getpid()}
        for streams in args.streams:
            max_tokens = 200 if args.quick else 1000
            figures.append(asyncio.run(measured(router, pids, streams, max_tokens)))
            print(figures[-1], flush=True)
    print("RESULT " + json.dumps({"benchmark": "messages", "pair": PAIR, "figures": figures}))


if __name__ == "__main__":
    main()
