"""The task classifier's time a prompt, on prompts as they come and on hostile ones.

    python -m benchmarks.task_type --quick --data ../shared/data/task_classification

Processor time of one thread, the least of several runs of each prompt: what the machine's other work adds is not the
classifier's. Accuracy is the training script's to report (``python -m training.task_type --report``).
"""

import argparse
import json
import time
from pathlib import Path

from router.task_type import classify

BAR_MS = 1.0


def least_ms(prompt: str, runs: int) -> float:
    best = float("inf")
    for _ in range(runs):
        started = time.process_time_ns()
        classify(prompt)
        best = min(best, time.process_time_ns() - started)
    return best / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="three runs of each prompt instead of twenty")
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    runs = 3 if options.quick else 20
    lines = (options.data / "dev.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["text"] for line in lines]
    prompts += [prompt * (1 + 20_000 // len(prompt)) for prompt in prompts[::10]]
    classify(prompts[0])
    times = sorted(least_ms(prompt, runs) for prompt in prompts)
    hostile = max(
        least_ms(unit * (1_000_000 // len(unit)), runs)
        for unit in ("\n- ", "A) ", "```", "def x(", "1 + 1 ", "| a ")
    )
    figures = {
        "prompts": len(times),
        "p50_ms": round(times[len(times) // 2], 3),
        "p99_ms": round(times[int(len(times) * 0.99)], 3),
        "most_ms": round(times[-1], 3),
        "hostile_ms": round(hostile, 3),
        "bar_p99_ms": BAR_MS,
    }
    figures["met"] = figures["p99_ms"] < BAR_MS
    print("RESULT " + json.dumps(figures))


if __name__ == "__main__":
    main()
