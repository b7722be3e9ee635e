"""The pool of the suffix lookup when it is full: memory, look-up and insertion times.

    python -m benchmarks.suffix_pool [--quick] [--tokens 10000000] [--budget-mb 256]

Texts are walks through a made-up language: frequent words as frequent as in English (Zipf), phrases that come back, so
that contexts have from one to very many places, the worst cases among them. A look-up is one in the pool; a question is all
that the lookup does for a round (learning, own text, pool, choice). Times are this thread's processor time, so other work on the
machine counts little, and wall time beside it. The last line is ``RESULT {json}``.
"""

import argparse
import json
import resource
import time
from itertools import islice
from pathlib import Path

import numpy as np

from paceline.lookup import SuffixLookup

VOCAB = 49_152
SCOPE = "tenant"
BARS = {"lookup_p99_us": 100.0, "pooled_tokens": 10_000_000}


class Language:
    """Endless texts of ``length`` tokens: phrases of Zipf-distributed tokens, the phrases Zipf-distributed too."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        ranks = 1.0 / np.arange(1, VOCAB + 1)
        tokens = self._rng.choice(VOCAB, size=2_000_000, p=ranks / ranks.sum())
        cuts = np.sort(self._rng.choice(len(tokens), size=200_000, replace=False))
        self._phrases = np.split(tokens, cuts)
        weights = 1.0 / np.arange(1, len(self._phrases) + 1) ** 0.7
        self._chosen = iter(())
        self._weights = weights / weights.sum()

    def text(self, length: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < length:
            phrase = next(self._chosen, None)
            if phrase is None:
                self._chosen = iter(self._rng.choice(len(self._phrases), size=100_000, p=self._weights))
                continue
            tokens += self._phrases[phrase].tolist()
        return tokens[:length]


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def run(*, tokens: int, budget_mb: int, questions: int, length: int) -> dict:
    language = Language(0)
    before_mb = _resident_mb()
    lookup = SuffixLookup("suffix", pool_bytes=budget_mb << 20, min_probability=0.2)
    pool = lookup._pool
    assert pool is not None
    added, insert_s, slices = 0, 0.0, []
    while added < tokens:
        text = language.text(length)
        pool.add(SCOPE, text)
        added += len(text)
        more = True
        while more:
            began = time.thread_time()
            more = pool.settle()
            slices.append(time.thread_time() - began)
    insert_s = sum(slices)
    held = min(added, pool.capacity)
    grown_mb = _resident_mb() - before_mb

    cpu_us, wall_us, look_up_us, guessed = [], [], [], 0
    for handle in range(questions // 50):
        text = language.text(400)
        lookup.open(handle)
        for at in islice(range(300, 400, 2), 50):
            wall, cpu = time.perf_counter(), time.thread_time()
            guesses = lookup.guess(handle, text[:at], prompt_len=200, scope=SCOPE, k=8).token_ids
            if at > 300:  # the first question reads the prompt
                cpu_us.append((time.thread_time() - cpu) * 1e6)
                wall_us.append((time.perf_counter() - wall) * 1e6)
            guessed += len(guesses)
            context = text[at : at + 32]  # not looked at before, so nothing of it is in the caches
            cpu = time.thread_time()
            pool.after(SCOPE, context, 8)
            look_up_us.append((time.thread_time() - cpu) * 1e6)
        lookup._texts.pop(handle)  # nothing may go into the pool meanwhile
    figures = {
        "pooled_tokens": added if held == added else held,
        "capacity_places": pool.capacity,
        "budget_mb": budget_mb,
        "resident_growth_mb": round(grown_mb, 1),
        "insert_us_per_token": round(1e6 * insert_s / added, 3),
        "slice_p99_us": round(float(np.percentile(slices, 99)) * 1e6, 1),
        "lookup_p50_us": round(float(np.percentile(look_up_us, 50)), 1),
        "lookup_p99_us": round(float(np.percentile(look_up_us, 99)), 1),
        "question_p50_us": round(float(np.percentile(cpu_us, 50)), 1),
        "question_p99_us": round(float(np.percentile(cpu_us, 99)), 1),
        "question_wall_p50_us": round(float(np.percentile(wall_us, 50)), 1),
        "question_wall_p99_us": round(float(np.percentile(wall_us, 99)), 1),
        "guesses_per_question": round(guessed / questions, 2),
    }
    for name, value in figures.items():
        print(f"{name}: {value}")
    return figures


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer questions; the pool is as full")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--budget-mb", type=int, default=256)
    parser.add_argument("--length", type=int, default=250, help="tokens of a text in the pool")
    args = parser.parse_args()
    figures = run(
        tokens=args.tokens,
        budget_mb=args.budget_mb,
        questions=5_000 if args.quick else 50_000,
        length=args.length,
    )
    print("RESULT " + json.dumps({"benchmark": "suffix_pool", **figures, "bars": BARS}))


if __name__ == "__main__":
    main()
