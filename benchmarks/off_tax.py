"""What does speculation cost while it is off? The K=0 tax, paired, with an interval narrow enough to see one per cent.

    python -m benchmarks.off_tax [--quick] [--model smollm2] [--sequences 1] [--clock wall|cpu]

Two engines of the verify tier on one runner take turns: one has never heard of a drafter, the other has one linked that
nobody asks. Each turn decodes the same tokens; the two turns of a pair are neighbours in time and their order changes from
pair to pair, so that drift and neighbours on the machine cancel. The figure is the median of the ratios of the pairs,
with a bootstrap interval of 95 %. ``--clock cpu`` counts processor time of the process, for a machine that is not quiet
(one thread). The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.step_overhead import SilentPort, decode
from paceline.config import ModelConfig, VerifyConfig
from paceline.engine import Runner, load_runner
from verify_service.engine import Engine
from verify_service.link_port import Offer

BAR = 1.01


async def turn(
    runner: Runner, sequences: int, tokens: int, clock: Callable[[], float], *, linked: bool
) -> float:
    """Seconds a token of one short run. The engine is new, so nothing is warm that is not warm for the other."""
    engine = Engine(runner, VerifyConfig(), asyncio.get_running_loop())
    engine.start()
    try:
        if linked:
            engine.link_up(SilentPort(), {"ngram": Offer("1")})
        await decode(engine, 0, 4, 0.0)  # the thread runs, the caches are warm
        began = clock()
        await asyncio.gather(*(decode(engine, number, tokens, 0.0) for number in range(sequences)))
        return (clock() - began) / tokens
    finally:
        await asyncio.to_thread(engine.stop)


async def pairs(args: argparse.Namespace, clock: Callable[[], float]) -> list[tuple[float, float]]:
    """(without, linked) of each pair."""
    runner = load_runner(
        ModelConfig(name=args.model, threads=args.threads), kv_slots=args.sequences, max_context=256
    )
    order = random.Random(1)
    found = []
    for _ in range(args.pairs):
        took = {}
        for linked in order.sample((False, True), 2):
            took[linked] = await turn(runner, args.sequences, args.tokens, clock, linked=linked)
        found.append((took[False], took[True]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="80 pairs of 40 tokens instead of 400")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    args = parser.parse_args()
    args.pairs = args.pairs or (80 if args.quick else 400)
    args.threads = 1 if args.clock == "cpu" else os.cpu_count() or 1
    torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    found = asyncio.run(pairs(args, clock))
    ratios = np.array([linked / without for without, linked in found])
    draws = np.random.default_rng(1).choice(ratios, (4000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    ratio = float(np.median(ratios))
    token_ms = 1e3 * statistics.median(without for without, _ in found)
    print(
        f"{args.pairs} pairs x {args.tokens} tokens x {args.sequences} sequences, clock {args.clock}: ",
        end="",
    )
    print(
        f"{token_ms:.3f} ms a step without; linked over without {ratio:.4f} (95 %: {low:.4f} to {high:.4f})"
    )
    met = "met " if high <= BAR else "not shown" if low <= BAR else "MISSED"
    print(f"{met} K=0 tax: {ratio:.4f} (<= {BAR})")
    result = {
        "benchmark": "off_tax",
        "quick": args.quick,
        "model": args.model,
        "clock": args.clock,
        "pairs": args.pairs,
        "ms_a_step": token_ms,
        "ratio": ratio,
        "interval": [float(low), float(high)],
        "bars": {"K=0 tax, upper end of the interval": {"value": float(high), "sign": "<=", "bar": BAR}},
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
