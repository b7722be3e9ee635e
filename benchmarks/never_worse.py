"""Automatic against plain on the real model: throughput and tails of a mixed stream, at rising concurrency.

    python -m cluster.against -- python -m benchmarks.never_worse --prompts question.jsonl [--quick]

The stream mixes all Spec-Bench categories with creative writing and with a task on which every drafter fails (random words, high
temperature). The same requests with the same seeds go through in short blocks that take turns, so that a neighbour on the machine
meets all ways:

- plain, in a closed loop of so many streams;
- automatic, in a closed loop: `throughput` compares these two;
- both, each request sent when the plain loop had sent it: the tails compare these two. Whoever switches
  speculation on gets no more requests for it; in a closed loop the faster way does, and reads more prompts beside every stream
  (`closed` holds the tails there). And where the machine slows down for a while, requests at set times pile up, those of a loop do not:
  so neither way is compared with a loop.

Tokens must be equal. `p99_gap` is of the requests' mean time a token behind the first, as in the holdout's comparison
(router/holdout.py); `p99_chunk_gap` of all times between two arrivals. The second counts a round that brings five tokens like one that
brings one: it is above 1 wherever verifying rows costs anything, so it has no bar. Intervals of 90 % by resampling requests, the same for both
ways. With `--static K` a further way is run in the closed loop: speculative with that k for everything. The last line is `RESULT {json}` with the ratios
automatic / plain and their bars.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
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
_DRAWS = 400
_SYLLABLES = ("ka", "lo", "mi", "ru", "ten", "sho", "va", "pli", "gor", "ex", "un", "dra", "bi", "zet")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the stream."""

    kind: str
    text: str
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What became of a request. Seconds; ``gap``: mean time a token behind the first, NaN where there is one token only."""

    start: float  # since its block began
    total: float
    first: float
    gap: float
    chunk_gaps: tuple[float, ...]
    token_ids: tuple[int, ...]
    drafted: int
    accepted: int


@dataclass(slots=True)
class Measured:
    """What one way of decoding gave at one level, request by request."""

    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_s(self) -> float:
        """Tokens a second."""
        return sum(len(sample.token_ids) for sample in self.samples) / self.seconds


TAILS: dict[str, Callable[[Sequence[Sample]], float]] = {
    "p99_total": lambda samples: quantile([one.total for one in samples], 0.99),
    "p99_gap": lambda samples: quantile([one.gap for one in samples if one.gap == one.gap], 0.99),
    "p99_chunk_gap": lambda samples: quantile([gap for one in samples for gap in one.chunk_gaps], 0.99),
    "ttft": lambda samples: statistics.fmean([one.first for one in samples]),
}


def tails(automatic: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, list[float]]:
    """Ratio of each tail, and the ends of its interval: requests drawn with replacement, the same for both."""
    rng = random.Random(11)
    draws = [rng.choices(range(len(plain)), k=len(plain)) for _ in range(_DRAWS)]
    found = {}
    for name, tail in TAILS.items():
        ratios = sorted(
            tail([automatic[i] for i in draw]) / tail([plain[i] for i in draw])
            for draw in (draws if name != "p99_chunk_gap" else [])
        )
        ends = [ratios[_DRAWS // 20], ratios[-1 - _DRAWS // 20]] if ratios else []
        found[name] = [round(value, 3) for value in (tail(automatic) / tail(plain), *ends)]
    return found


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


async def one(client: Client, request: Request, way: str, max_tokens: int, began: float) -> Sample:
    """One request, measured."""
    started = last = first = time.perf_counter()
    ids: list[int] = []
    chunk_gaps: list[float] = []
    at_first = drafted = accepted = 0
    mode = {"plain": Mode.PLAIN}.get(way, Mode.SPECULATIVE if way.startswith("static") else None)
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
                    chunk_gaps.append(now - last)
                else:
                    first, at_first = now, len(new)
                ids += new
                last = now
            case Finished(speculative=stats):
                drafted += stats.num_draft_tokens
                accepted += stats.num_accepted_draft_tokens
            case _:
                pass
    total = time.perf_counter() - started
    gap = (last - first) / (len(ids) - at_first) if len(ids) > at_first else math.nan
    return Sample(
        started - began, total, first - started, gap, tuple(chunk_gaps), tuple(ids), drafted, accepted
    )


async def closed(
    client: Client, requests: Sequence[Request], way: str, level: int, max_tokens: int, into: Measured
) -> list[Sample]:
    """The requests through a closed loop of ``level`` streams."""
    gate = asyncio.Semaphore(level)

    async def gated(request: Request) -> Sample:
        async with gate:
            return await one(client, request, way, max_tokens, started)

    started = time.perf_counter()
    found = await asyncio.gather(*map(gated, requests))
    into.seconds += time.perf_counter() - started
    into.samples += found
    return found


async def at(
    client: Client,
    requests: Sequence[Request],
    way: str,
    starts: Sequence[float],
    max_tokens: int,
    into: Measured,
) -> list[Sample]:
    """Each request at its time."""

    async def timed(request: Request, start: float) -> Sample:
        await asyncio.sleep(max(0.0, began + start - time.perf_counter()))
        return await one(client, request, way, max_tokens, began)

    began = time.perf_counter()
    found = await asyncio.gather(*map(timed, requests, starts))
    into.seconds += time.perf_counter() - began
    into.samples += found
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
            loops = {way: Measured() for way in ways}
            same = {"plain": Measured(), "automatic": Measured()}
            await closed(client, requests[:2], "automatic", 1, 16, Measured())
            for index in range(blocks):
                part = requests[index * size : (index + 1) * size]
                starts: list[float] = []
                for way in ways if index % 2 else [*ways[1:], ways[0]]:
                    found = await closed(client, part, way, level, args.max_tokens, loops[way])
                    if way == "plain":
                        starts = [sample.start for sample in found]
                for way in sorted(same, reverse=bool(index % 2)):
                    await at(client, part, way, starts, args.max_tokens, same[way])
            levels[str(level)] = report = _report(requests, loops, same)
            print(level, report, flush=True)
    return {"benchmark": "never_worse", "levels": levels, "bars": BARS, "static": args.static}


def _report(
    requests: Sequence[Request], loops: dict[str, Measured], same: dict[str, Measured]
) -> dict[str, object]:
    """``same``: both ways with requests sent at the same times."""
    plain = loops["plain"].samples
    others = [*same.values(), *(measured for way, measured in loops.items() if way != "plain")]
    by_times = {way: measured.samples for way, measured in same.items()}
    kinds = sorted({request.kind for request in requests})
    by_kind = {
        kind: statistics.fmean(
            one.total
            for one, request in zip(by_times["plain"], requests, strict=True)
            if request.kind == kind
        )
        / statistics.fmean(
            one.total
            for one, request in zip(by_times["automatic"], requests, strict=True)
            if request.kind == kind
        )
        for kind in kinds
    }
    automatic = loops["automatic"]
    return {
        "throughput": round(automatic.tokens_s / loops["plain"].tokens_s, 3),
        **tails(by_times["automatic"], by_times["plain"]),
        "closed": {name: ends[0] for name, ends in tails(automatic.samples, plain).items()},
        "requests": len(requests),
        "different": sum(
            one.token_ids != truth.token_ids
            for measured in others
            for one, truth in zip(measured.samples, plain, strict=True)
        ),
        "drafted": sum(sample.drafted for sample in automatic.samples),
        "accepted": sum(sample.accepted for sample in automatic.samples),
        "tokens_s": {way: round(measured.tokens_s, 1) for way, measured in loops.items()},
        "speed_by_kind": {kind: round(value, 3) for kind, value in by_kind.items()},
    }


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
