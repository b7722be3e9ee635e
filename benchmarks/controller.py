"""What the controller itself takes: cutting and deciding, a step, by sequences; compiled, as it serves, and in Python.

    python -m benchmarks.controller [--quick] [--clock cpu|wall] [--repeats N]

Facts are those of simulated streams (benchmarks.worlds) whose acceptance differs and changes, so that depths move: drafters behind the
link, and look-ups beside the target. Each recorded step is decided again so many times, and its least time counts: what a step takes
beyond that, the neighbours on the machine took. ``as_run`` has the first times as well. By default the thread's own processor time.
Both are asked all steps, and ``same_again`` says whether each decided and cut as was recorded; ``python_p99_ms`` is the reference's time.
Without a compiler Python is what serves. A loop of two million additions is the yardstick of the machine. The last line is `RESULT {json}`.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from typing import Any

from benchmarks import regret, worlds
from verify_service import controller
from verify_service.facts import State
from verify_service.native import compiled_controller
from verify_service.prices import Model
from verify_service.steering import Policy

BAR_MS = {32: 0.3}
SEQUENCES = (1, 8, 32)


def world(sequences: int, tokens: int, *, beside: bool) -> worlds.World:
    """So many streams at a time, bursts of copying among them."""
    streams = tuple(worlds.Stream(i, 0.0, 150 + 37 * i % 300) for i in range(40 * sequences))
    bursts, steady = worlds.bursts(40, 80), worlds.by_stream((0.2, 0.5, 0.8, 0.95))

    def truth(key: int, at: int) -> tuple[float, Callable[[int], float]]:
        return (bursts if key % 2 else steady)(key, at)

    return worlds.World(
        f"{sequences} streams",
        worlds.CHEAP_ROWS,
        None if beside else truth,
        streams,
        worlds.lookup_s,
        concurrency=sequences,
        tokens=tokens,
        beside=truth if beside else None,
    )


def again(
    world: worlds.World, calls: list[Any], clock: Callable[[], float], policy: Policy
) -> tuple[bool, list[float]]:
    """Decide what was recorded once more: whether it comes out the same, and what each step took."""
    decide, trim = policy.decide, policy.trim
    model, state = Model(world.table), State()
    same, took = True, []
    for asked, told, decisions in calls:
        begun = clock()
        if asked is not None:
            *question, cut = asked
            found_cut = trim(model, state, *question)
        state, found = decide(model, state, told)
        if told.num_sequences:
            took.append(clock() - begun)
        same &= list(found.items()) == list(decisions.items()) and (asked is None or found_cut == cut)
    return same, took


def quantiles(took: list[float]) -> dict[str, float]:
    """Median, p99 and longest, in milliseconds."""
    ranked = sorted(took)
    at = {"median_ms": len(ranked) // 2, "p99_ms": int(0.99 * (len(ranked) - 1)), "max_ms": -1}
    return {name: round(1e3 * ranked[index], 4) for name, index in at.items()}


def lesser(some: list[float], others: list[float]) -> list[float]:
    """By step the shorter time."""
    return [min(pair) for pair in zip(some, others, strict=True)]


def yardstick_ms() -> float:
    """Two million additions."""
    begun = time.thread_time()
    total = 0
    for number in range(2_000_000):
        total += number
    return round(1e3 * (time.thread_time() - begun), 1)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    clock = time.thread_time if args.clock == "cpu" else time.perf_counter
    recorded = {}
    for sequences in SEQUENCES:
        for k_max, beside in ((4, False), (8, False), (8, True)):
            found = world(sequences, (1200 if args.quick else 6000) * sequences, beside=beside)
            calls: list[Any] = []
            outcome = regret.run(found, "controller", k_max=k_max, calls=calls)
            name = f"{sequences} sequences, k up to {k_max}" + (", looked up beside" if beside else "")
            recorded[name] = found, calls, round(outcome.drafted / outcome.rounds, 2)
    serving = compiled_controller()
    same = True
    first: dict[str, list[float]] = {}
    least: dict[str, list[float]] = {}
    in_python: dict[str, list[float]] = {}
    sticks = []
    for _ in range(args.repeats):
        sticks.append(yardstick_ms())
        for name, (found, calls, _) in recorded.items():
            gc.collect()
            equal, took = again(found, calls, clock, serving or controller)
            first.setdefault(name, took)
            least[name] = lesser(least.get(name, took), took)
            equal_there, took = again(found, calls, clock, controller)
            in_python[name] = lesser(in_python.get(name, took), took)
            same &= equal and equal_there
    figures = {}
    for name, (_, _, drafted) in recorded.items():
        figures[name] = {
            **quantiles(least[name]),
            "as_run": quantiles(first[name]),
            "python_p99_ms": quantiles(in_python[name])["p99_ms"],
            "drafted_a_round": drafted,
        }
        print(f"{name}: {figures[name]}")
    what = "compiled" if serving is not None else "in Python, for want of compiled code"
    print(f"{what}; the same decisions again, by both: {same}; two million additions: {sticks} ms")

    def worst_ms(figure: str) -> dict[int, float]:
        return {
            count: max(one[figure] for name, one in figures.items() if name.startswith(f"{count} "))
            for count in SEQUENCES
        }

    result = {"benchmark": "controller", "clock": args.clock, "repeats": args.repeats, "figures": figures}
    result |= {
        "same_again": same,
        "yardstick_ms": min(sticks),
        "p99_ms": worst_ms("p99_ms"),
        "bar_p99_ms": BAR_MS,
    }
    result |= {"compiled": serving is not None, "python_p99_ms": worst_ms("python_p99_ms")}
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
