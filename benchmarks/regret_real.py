"""Automatic against plain and every static k on the real model, through all three tiers: what deciding by itself loses there.

    python -m benchmarks.regret --real --data ../shared/data [--quick]

Each prompt of Spec-Bench is decoded greedily in every way, one after the other, in an order that turns from prompt to prompt, so that a
neighbour on the machine disturbs all alike. All of it twice. Ways and repeats are tenants of their own: nobody finds another's
answer in memory. Times are those of decoding, from the first token to the last. The *prompt oracle* takes for each prompt the way
that was fastest in the other repeat: who knows each prompt's best k, judged without its own luck. The lot of plain requests is off.
"""

import asyncio
import json
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from evaluation.tiers import tier
from evaluation.workload import load_spec_bench
from paceline.client import Chunk, Client, Finished, generate_request
from paceline.types import Mode

BARS = {"static": 0.98, "oracle": 0.96}
STATIC = (1, 2, 4, 8)
WAYS = ("automatic", "plain", *(f"static {k}" for k in STATIC))
REPEATS = 2


async def decode(client: Client, text: str, way: str, repeat: int, tokens: int) -> tuple[float, list[int]]:
    """Seconds from the first token to the last, and the tokens."""
    mode = {"automatic": None, "plain": Mode.PLAIN}.get(way, Mode.SPECULATIVE)
    request = generate_request(
        messages=[("user", text)],
        temperature=0.0,
        max_tokens=tokens,
        tenant=f"{way} {repeat}",
        mode=mode,
        k=int(way.removeprefix("static ")) if mode is Mode.SPECULATIVE else None,
    )
    ids: list[int] = []
    first = last = 0.0
    async for event in client.generate(request):
        match event:
            case Chunk(token_ids=new) if new:
                last = time.perf_counter()
                first = first or last
                ids += new
            case Finished():
                pass
            case _:
                pass
    return last - first, ids


async def measure(spec_bench: Path, each: int, tokens: int, model: str) -> dict[str, Any]:
    """Seconds by prompt, way and repeat; and where outputs differed."""
    prompts = load_spec_bench(spec_bench, each)
    setting = [f'model.name="{model}"']
    took: list[dict[str, list[float]]] = [{way: [] for way in WAYS} for _ in prompts]
    counts = [0] * len(prompts)
    different = 0
    async with AsyncExitStack() as stack:
        draft, _ = await stack.enter_async_context(tier("draft_service", setting))
        settings = [*setting, f'verify.draft_endpoints=["{draft}"]']
        verify, _ = await stack.enter_async_context(tier("verify_service", settings))
        settings = [*setting, f'router.verify_endpoints=["{verify}"]', "router.holdout=0.0"]
        router, _ = await stack.enter_async_context(tier("router", settings))
        client = await stack.enter_async_context(Client(router))
        for way in WAYS:
            await decode(client, "Count from one to ten, in words.", way, -1, tokens)
        for repeat in range(REPEATS):
            for index, prompt in enumerate(prompts):
                turn = (index + repeat) % len(WAYS)
                outputs = {}
                for way in (*WAYS[turn:], *WAYS[:turn]):
                    seconds, outputs[way] = await decode(client, prompt.text, way, repeat, tokens)
                    took[index][way].append(seconds)
                counts[index] = len(outputs["plain"])
                different += sum(ids != outputs["plain"] for ids in outputs.values())
    return {
        "took": took,
        "categories": [p.category for p in prompts],
        "tokens": counts,
        "different": different,
    }


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Ratios of speed: over all decoding time, and the median over prompts."""
    took = [one for one, count in zip(found["took"], found["tokens"], strict=True) if count > 1]
    sums = {way: sum(sum(one[way]) for one in took) for way in WAYS}
    others = [way for way in WAYS if way != "automatic"]
    best = min(others, key=lambda way: sums[way])
    known = 0.0
    for one in took:
        for repeat in range(REPEATS):
            other = REPEATS - 1 - repeat
            way = min(others, key=lambda way, one=one, other=other: one[way][other])  # type: ignore[misc]
            known += one[way][repeat]
    paired = {way: statistics.median(sum(one[way]) / sum(one["automatic"]) for one in took) for way in others}
    return {
        "prompts": len(took),
        "vs_static": round(sums[best] / sums["automatic"], 4),
        "best_static": best,
        "vs_plain": round(sums["plain"] / sums["automatic"], 4),
        "vs_prompt_oracle": round(known / sums["automatic"], 4),
        "paired_median_over": {way: round(value, 4) for way, value in paired.items()},
        "plain_over": {way: round(sums["plain"] / sums[way], 4) for way in WAYS},
        "different": found["different"],
    }


def run(data: Path, *, quick: bool, model: str) -> None:
    """Measure and print; the last line is ``RESULT {json}``."""
    path = data / "spec_bench" / "question_open.jsonl"
    found = asyncio.run(measure(path, 2 if quick else 10, 64 if quick else 128, model))
    result = {"benchmark": "regret_real", "model": model, "bars": BARS, **figures(found)}
    for name in sorted(set(found["categories"])):
        mine = [
            one for one, category in zip(found["took"], found["categories"], strict=True) if category == name
        ]
        sums = {way: sum(sum(one[way]) for one in mine) for way in WAYS}
        print(
            f"{name:<16}"
            + "".join(f"{way:>12}{sums['plain'] / sums[way]:>6.2f}" for way in WAYS if way != "plain")
        )
    print("RESULT " + json.dumps(result))
