"""When does it pay to verify one half of the sequences while the other half is drafted? A model of scheduler and drafter.

    python -m benchmarks.alternation [--quick]

Reckoned, not measured: the cost tables of the simulated pairs, no time of our own, every event at its exact time. The
engine runs steps over the rows that are ready, the drafter batches over the questions that wait. Level 1 and 2 find a row's
block ready as often as their hit rates say (level 2 only while it can be afforded, DESIGN section 5). Each way gets its own
best k; plain decoding is one of the ways. The last line is ``RESULT {json}``.
"""

import argparse
import json
import random
from dataclasses import dataclass

from paceline.simulation import PAIRS, Pair

AGREEMENT = 0.8
KS = (1, 2, 3, 4, 5, 6, 8)
SIZES = (1, 4, 8, 16, 32, 48, 64, 96, 128)
RTT_S = 0.0003
SECOND_GUESS = 0.6


@dataclass(frozen=True, slots=True)
class Way:
    """How rows get their blocks. ``split``: the first step takes half of them, and the halves stay apart."""

    name: str
    level: int = 0
    fan: int = 0
    split: bool = False
    gather: float = 0.25
    """Ready rows wait for others for so much of a step at most (``scheduler.GATHER_SHARE``)."""


WAYS = (
    Way("level 0"),
    *(
        Way(f"{name}{', wait' if gather > 0.25 else ''}", level, fan, gather=gather)
        for name, level, fan in (("level 1", 1, 0), ("level 2, F=1", 2, 1), ("level 2, F=3", 2, 3))
        for gather in (0.25, 1.0)
    ),
    Way("two groups", split=True, gather=0.0),
    Way("two groups, level 1", level=1, split=True, gather=0.0),
)


def hit_rate(way: Way, k: int) -> float:
    """With an acceptance of ``AGREEMENT`` and a second guess that is right in ``SECOND_GUESS`` of the other cases."""
    all_right = AGREEMENT**k
    if way.level == 0:
        return 0.0
    if way.level == 1:
        return all_right * AGREEMENT
    corrected = 1 - (1 - SECOND_GUESS) ** way.fan
    bonus = AGREEMENT + (1 - AGREEMENT) * (1 - (1 - SECOND_GUESS) ** (way.fan - 1))
    return all_right * bonus + (1 - all_right) * corrected


def affordable(pair: Pair, way: Way, k: int, size: int) -> bool:
    """Whether the drafter gets all branches done behind a step."""
    if way.level == 0:
        return True
    branches = size * (1 if way.level == 1 else (k + 1) * way.fan)
    passes = way.level if pair.one_pass else k + 1
    return passes * pair.draft.seconds(branches) <= pair.verify.seconds(size * (k + 1)) + RTT_S


def tokens_a_second(pair: Pair, way: Way, k: int, size: int, steps: int) -> float:
    """All sequences together."""
    dice = random.Random(5)
    hits = hit_rate(way, k) if affordable(pair, way, k, size) else 0.0
    expected = (1 - AGREEMENT ** (k + 1)) / (1 - AGREEMENT)
    ready_at = [0.0] * size
    drafter_free, now, rows_run = 0.0, 0.0, 0
    for step in range(steps):
        now = max(now, min(ready_at))
        now = gathered(pair, way, k, ready_at, now)
        ready = [row for row in range(size) if ready_at[row] <= now]
        if way.split and step == 0:
            ready = ready[: (size + 1) // 2]
        rows_run += len(ready)
        now += pair.verify.seconds(len(ready) * (k + 1))
        missed = [row for row in ready if dice.random() >= hits]
        for row in ready:
            ready_at[row] = now
        if missed:
            begun = max(drafter_free, now + RTT_S / 2)
            drafter_free = begun + pair.draft_seconds(k, len(missed))
            for row in missed:
                ready_at[row] = drafter_free + RTT_S / 2
    return rows_run * expected / now


def gathered(pair: Pair, way: Way, k: int, ready_at: list[float], now: float) -> float:
    """When the step begins: the scheduler's rule, with the times of arrival known."""
    ready = sum(at <= now for at in ready_at)
    step_s = pair.verify.seconds(ready * (k + 1))
    coming = [at for at in ready_at if now < at <= now + way.gather * step_s]
    if not coming:
        return now
    left_s = max(coming) - now
    return max(coming) if len(coming) * (step_s - left_s) > ready * left_s else now


def measure(steps: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, pair in PAIRS.items():
        print(f"{name}: tokens a second over plain, at the best k (in brackets)")
        print("   B  " + "  ".join(f"{way.name:>19}" for way in WAYS) + "   two groups over the rest")
        for size in SIZES:
            plain = size / pair.verify.seconds(size)
            best = {
                way: max((tokens_a_second(pair, way, k, size, steps) / plain, k) for k in KS) for way in WAYS
            }
            groups = max(speed for way, (speed, _) in best.items() if way.split)
            others = max(1.0, *(speed for way, (speed, _) in best.items() if not way.split))
            found.setdefault(name, {})[str(size)] = round(groups / others, 3)
            cells = "  ".join(f"{best[way][0]:>15.2f} ({best[way][1]})" for way in WAYS)
            print(f"{size:>4}   {cells}   {groups / others:.3f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    found = measure(100 if arguments.quick else 1000)
    most = max(ratio for by_size in found.values() for ratio in by_size.values())
    print("RESULT", json.dumps({"two_groups_over_the_best_other_way": found, "most": most}))


if __name__ == "__main__":
    main()
