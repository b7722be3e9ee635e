"""Automatic against plain on the real model: throughput and tails of a mixed stream, at rising concurrency.

    python -m cluster.against -- python -m benchmarks.never_worse --prompts question.jsonl [--quick]

The stream mixes all Spec-Bench categories with creative writing and with a task on which every drafter fails (random words, high
temperature). Arrivals are paired: at each level the same requests, in the same order and with the same seeds, go through a closed loop
of so many streams, once automatic and once plain, in short blocks that take turns, so that a neighbour on the machine meets both.
Tokens must be equal. `p99_gap` is of the requests' mean time a token behind the first, as in the holdout's comparison
(router/holdout.py); `p99_chunk_gap` of all times between two arrivals. The second counts a round that brings five tokens like one that
brings one: it is above 1 wherever verifying rows costs anything, so it has no bar. With `--static K` a third way is run too: speculative with that k for everything. The last line is `RESULT {json}`
with the ratios automatic / plain and their bars.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.workload import load_spec_bench
from paceline.client import Chunk, Client, Finished, generate_request
from paceline.types import Mode

LEVELS = (1, 4, 8, 16, 32)
BARS = {"throughput": 1.00, "throughput_at_1": 1.25, "p99_total": 1.03, "p99_gap": 1.03, "ttft": 1.03}

_CREATIVE = (
    "Write a short poem about a lighthouse in winter.",
    "Tell a story about two brothers who find a map.",
    "Invent a new holiday and describe how it is celebrated.",
    "Write a letter from a tree to the wind.",
    "Describe a city at the bottom of the sea.",
    "Write the first page of a detective novel set on a train.",
)
_SYLLABLES = ("ka", "lo", "mi", "ru", "ten", "sho", "va", "pli", "gor", "ex", "un", "dra", "bi", "zet")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the stream."""

    kind: str
    text: str
    temperature: float
    seed: int


@dataclass(slots=True)
class Measured:
    """What one way of decoding gave at one level."""

    tokens: int = 0
    seconds: float = 0.0
    totals: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    chunk_gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    by_kind: dict[str, list[float]] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0

    def figures(self) -> dict[str, float]:
        """Tokens a second and tails."""
        return {
            "tokens_s": self.tokens / self.seconds,
            "p99_total": quantile(self.totals, 0.99),
            "p99_gap": quantile(self.gaps, 0.99),
            "p99_chunk_gap": quantile(self.chunk_gaps, 0.99),
            "ttft": statistics.fmean(self.firsts),
        }


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value with so large a part of all at or below it."""
    return sorted(values)[max(math.ceil(part * len(values)), 1) - 1]


def stream(prompts: Path, count: int) -> list[Request]:
    """``count`` requests: two thirds Spec-Bench, a sixth creative, a sixth on which nothing can be guessed."""
    mix = random.Random(7)
    bench = load_spec_bench(prompts, 1 + count // 9)
    mix.shuffle(bench)
    found = []
    for index in range(count):
        if index % 6 == 4:
            found.append(Request("creative", _CREATIVE[index // 6 % len(_CREATIVE)], 0.8, index))
        elif index % 6 == 5:
            words = " ".join(
                "".join(mix.choices(_SYLLABLES, k=mix.randrange(2, 4))) for _ in range(mix.randrange(20, 60))
            )
            found.append(Request("adversarial", f"Continue in this language: {words}", 1.5, index))
        else:
            prompt = bench[index % len(bench)]
            found.append(Request(prompt.category, prompt.text, 0.0, index))
    return found


async def one(client: Client, request: Request, way: str, max_tokens: int, into: Measured) -> list[int]:
    """One request, measured."""
    started = last = first = time.perf_counter()
    ids: list[int] = []
    at_first = 0
    mode = {"automatic": None, "plain": Mode.PLAIN}.get(way, Mode.SPECULATIVE)
    message = generate_request(
        messages=[("user", request.text)],
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=max_tokens,
        tenant=way,  # one way's prompts are not another's warm start
        mode=mode,
        k=int(way.removeprefix("static ")) if mode is Mode.SPECULATIVE else None,
    )
    async for event in client.generate(message):
        now = time.perf_counter()
        match event:
            case Chunk(token_ids=new) if new:
                if ids:
                    into.chunk_gaps.append(now - last)
                else:
                    into.firsts.append(now - started)
                    first, at_first = now, len(new)
                ids += new
                last = now
            case Finished(speculative=stats):
                into.drafted += stats.num_draft_tokens
                into.accepted += stats.num_accepted_draft_tokens
            case _:
                pass
    total = time.perf_counter() - started
    if len(ids) > at_first:
        into.gaps.append((last - first) / (len(ids) - at_first))
    into.totals.append(total)
    into.by_kind.setdefault(request.kind, []).append(total)
    into.tokens += len(ids)
    return ids


async def block(
    client: Client, requests: Sequence[Request], way: str, level: int, max_tokens: int, into: Measured
) -> list[list[int]]:
    """The requests through a closed loop of ``level`` streams."""
    gate = asyncio.Semaphore(level)

    async def gated(request: Request) -> list[int]:
        async with gate:
            return await one(client, request, way, max_tokens, into)

    started = time.perf_counter()
    found = await asyncio.gather(*map(gated, requests))
    into.seconds += time.perf_counter() - started
    return found


async def run(args: argparse.Namespace) -> dict[str, object]:
    """All levels."""
    ways = ["plain", "automatic", *(f"static {k}" for k in args.static)]
    levels: dict[str, object] = {}
    async with Client(args.address) as client:
        for level in args.levels:
            size = max(level, 6) * (1 if args.quick else 4)
            blocks = 2 if args.quick else 6
            requests = stream(args.prompts, size * blocks)
            measured = {way: Measured() for way in ways}
            await block(client, requests[:2], "automatic", 1, 16, Measured())
            different = 0
            for index in range(blocks):
                part = requests[index * size : (index + 1) * size]
                found = {}
                for way in ways if index % 2 else reversed(ways):
                    found[way] = await block(client, part, way, level, args.max_tokens, measured[way])
                different += sum(
                    found[way][at] != found["plain"][at] for way in ways for at in range(len(part))
                )
            figures = {way: measured[way].figures() for way in ways}
            ratios = {key: figures["automatic"][key] / figures["plain"][key] for key in figures["plain"]}
            kinds = {
                kind: statistics.fmean(plain) / statistics.fmean(measured["automatic"].by_kind[kind])
                for kind, plain in sorted(measured["plain"].by_kind.items())
            }
            levels[str(level)] = {
                "throughput": round(ratios["tokens_s"], 3),
                "p99_total": round(ratios["p99_total"], 3),
                "p99_gap": round(ratios["p99_gap"], 3),
                "p99_chunk_gap": round(ratios["p99_chunk_gap"], 3),
                "ttft": round(ratios["ttft"], 3),
                "requests": len(requests),
                "different": different,
                "drafted": measured["automatic"].drafted,
                "accepted": measured["automatic"].accepted,
                "tokens_s": {way: round(figures[way]["tokens_s"], 1) for way in ways},
                "speed_by_kind": {kind: round(value, 3) for kind, value in kinds.items()},
            }
            print(level, levels[str(level)], flush=True)
    return {"benchmark": "never_worse", "levels": levels, "bars": BARS, "static": args.static}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address", default=os.environ.get("PACELINE_ADDRESS", "127.0.0.1:7440"))
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench, JSONL")
    parser.add_argument("--levels", type=int, nargs="+", default=None)
    parser.add_argument("--max-tokens", type=int, default=None)
    parser.add_argument("--static", type=int, nargs="*", default=[], help="run these fixed k as well")
    parser.add_argument(
        "--quick", action="store_true", help="levels 1 and 8, about two minutes on two quiet cores"
    )
    args = parser.parse_args()
    args.levels = args.levels or ((1, 8) if args.quick else LEVELS)
    args.max_tokens = args.max_tokens or (48 if args.quick else 96)
    print("RESULT " + json.dumps(asyncio.run(run(args))))


if __name__ == "__main__":
    main()
