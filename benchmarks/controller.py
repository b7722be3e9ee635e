"""What the controller itself takes: cutting and deciding, a step, by sequences; and whether it decides the same again.

    python -m benchmarks.controller [--quick] [--clock cpu|wall]

Facts are those of simulated streams (benchmarks.regret) whose acceptance differs and changes, so that depths move. By default the
thread's own processor time: on a busy machine the wall clock measures the neighbours. The last line is `RESULT {json}`.
"""

import argparse
import gc
import json
import time

from benchmarks import regret
from verify_service.controller import decide
from verify_service.facts import State
from verify_service.prices import Model

BAR_MS = {32: 0.3}
SEQUENCES = (1, 8, 32)


def world(sequences: int, tokens: int, k_max: int) -> regret.World:
    """So many streams at a time, bursts of copying among them."""
    streams = tuple(regret.Stream(i, 0.0, 150 + 37 * i % 300) for i in range(40 * sequences))
    bursts, steady = regret.bursts(40, 80), regret.by_stream((0.2, 0.5, 0.8, 0.95))
    return regret.World(
        f"{sequences} streams, k {k_max}",
        regret.CHEAP_ROWS,
        lambda key, at: (bursts if key % 2 else steady)(key, at),
        streams,
        regret.lookup_s,
        concurrency=sequences,
        tokens=tokens,
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under half a minute")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    args = parser.parse_args()
    clock = time.thread_time if args.clock == "cpu" else time.perf_counter
    figures = {}
    same = True
    for sequences in SEQUENCES:
        for k_max in (4, 8):
            steps = 1200 if args.quick else 6000
            found = world(sequences, steps * sequences, k_max)
            facts: list[object] = []
            gc.collect()
            outcome = regret.run(found, "controller", k_max=k_max, clock=clock, facts=facts)
            took = sorted(outcome.decide_s)
            name = f"{sequences} sequences, k up to {k_max}"
            figures[name] = {
                "median_ms": round(1e3 * took[len(took) // 2], 4),
                "p99_ms": round(1e3 * took[int(0.99 * (len(took) - 1))], 4),
                "max_ms": round(1e3 * took[-1], 4),
                "drafted_a_round": round(outcome.drafted / outcome.rounds, 2),
            }
            same &= again(found, facts)
            print(f"{name}: {figures[name]}")
    print(f"the same decisions again: {same}")
    print(
        "RESULT "
        + json.dumps(
            {
                "benchmark": "controller",
                "clock": args.clock,
                "figures": figures,
                "same_again": same,
                "bar_p99_ms": BAR_MS,
            }
        )
    )


def again(world: regret.World, facts: list[object]) -> bool:
    """Decide the recorded facts once more."""
    model, state = Model(world.table), State()
    for step, decisions in facts:  # type: ignore[misc]
        state, found = decide(model, state, step)
        if found != decisions:
            return False
    return True


if __name__ == "__main__":
    main()
