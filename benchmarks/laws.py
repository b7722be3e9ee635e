"""Acceptance under each law on the same pairs: coupled, ratio (top 8, 32, 128, all tokens) and block verification.

    python -m benchmarks.laws [--quick] [--prompts question_open.jsonl]

The target is the default model, the prompts Spec-Bench's, the text the target's own draws at each temperature. At every
base all laws draft k = 4 tokens after the same text with the code that serves; the sampled laws are credited
with their exact expectation given the draft, the coupled one with what it accepts. Drafts:

    distilled the small model made for this target
    noisy     the target itself, spoilt: logits plus a normal error that hangs on the text alone (sigma 0.5 and 1.5)
    sure      logits times 1.3: too certain, as drafters trained on the target's own answers tend to be
    shallow   half the target, half its first 20 of 30 layers, which alone know little

Beside it: what the decision of a round costs, by the process's own time. The last line is ``RESULT {json}``.
"""

import argparse
import hashlib
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from evaluation.workload import load_spec_bench
from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.engine.distilled import load_distilled
from paceline.model_store import resolve_model_dir
from paceline.sampling import TokenRow, choose, decide, draft_tokens, processed_logprobs, sample_draft
from paceline.sampling.block import block_thresholds
from paceline.sampling.ratio import ratio_thresholds
from paceline.tokenizer import Tokenizer
from paceline.types import Law, SamplingParams

K = 4
TEMPERATURES = (0.3, 0.7, 1.0)
TOP_M = {"m=8": 8, "m=32": 32, "m=128": 128, "full": 1 << 20}
REPEATS = 4  # seeds of the coupled law at each base: what it accepts is counted, not expected
STEP = 5  # tokens of the target between two bases
MOST_PROMPT = 200

# From the texts and the target's logits [B, V] after them to the draft's.
Draft = Callable[[Sequence[Sequence[int]], torch.Tensor], torch.Tensor]


class Texts:
    """Some texts in the slots of one model, read up to their last token; branches leave no trace."""

    def __init__(self, runner: Runner, prompts: Sequence[Sequence[int]]) -> None:
        self.runner = runner
        self.texts = [list(prompt) for prompt in prompts]
        self._slots = [runner.kv.acquire() or 0 for _ in prompts]
        for slot, text in zip(self._slots, self.texts, strict=True):
            runner.forward([Segment(slot, 0, text[:-1], 0)])

    def after(self, branches: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits [B, V] after each text and its branch; the branch but for its last token was asked for before."""
        segments = []
        for slot, text, branch in zip(self._slots, self.texts, branches, strict=True):
            start = len(text) + len(branch) - 1
            self.runner.kv.truncate(slot, start)
            segments.append(Segment(slot, start, [[*text, *branch][-1]], 1))
        return self.runner.forward(segments)

    def extend(self, tokens: Sequence[int]) -> None:
        """One token more for each text, which was the branch of the last question's answer."""
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)

    def end(self) -> None:
        """Give the slots back."""
        for slot in self._slots:
            self.runner.kv.release(slot)


def noisy(sigma: float) -> Draft:
    """An error of its own for every text."""

    def draft(texts: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        spoilt = logits.clone()
        for row, text in zip(spoilt, texts, strict=True):
            seed = int.from_bytes(hashlib.sha256(np.array(text).tobytes()).digest()[:7], "big")
            row.add_(sigma * torch.randn(len(row), generator=torch.Generator().manual_seed(seed)))
        return spoilt

    return draft


def sure(factor: float) -> Draft:
    """Too certain."""
    return lambda texts, logits: logits * factor


class Second:
    """``share`` of another model, the rest the target; in slots of its own, read anew where a text is new."""

    def __init__(self, runner: Runner, num: int, share: float = 1.0) -> None:
        self._runner = runner
        self._slots = [runner.kv.acquire() or 0 for _ in range(num)]
        self._read: list[list[int]] = [[] for _ in range(num)]
        self._share = share

    def draft(self, texts: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
        """See ``Draft``."""
        segments = []
        for index, text in enumerate(texts):
            read = self._read[index]
            kept = 0
            while kept < min(len(read), len(text) - 1) and read[kept] == text[kept]:
                kept += 1
            self._runner.kv.truncate(self._slots[index], kept)
            segments.append(Segment(self._slots[index], kept, list(text[kept:]), 1))
            self._read[index] = list(text)
        own = self._runner.forward(segments)
        return own if self._share == 1.0 else (1 - self._share) * logits + self._share * own


def drafted(
    texts: Texts, draft: Draft, params: Sequence[SamplingParams], top_m: int | None
) -> tuple[list[list[int]], list[list], list[torch.Tensor]]:
    """(tokens, distributions, target's logits [K + 1, V]) of each text; ``top_m`` None: with the coupled noise."""
    num = len(texts.texts)
    ids: list[list[int]] = [[] for _ in range(num)]
    distributions: list[list] = [[] for _ in range(num)]
    seen: list[list[torch.Tensor]] = [[] for _ in range(num)]
    for position in range(K + 1):
        logits = texts.after(ids)
        for rows, row in zip(seen, logits, strict=True):
            rows.append(row.clone())
        if position == K:
            break
        guesses = draft([[*text, *branch] for text, branch in zip(texts.texts, ids, strict=True)], logits)
        for index, own in enumerate(params):
            base_len = len(texts.texts[index])
            row = TokenRow(own, base_len + position)
            if top_m is None:
                ids[index].append(choose(guesses[index : index + 1], [row])[0])
                continue
            [(token, distribution)] = sample_draft(guesses[index : index + 1], [row], [base_len], top_m)
            ids[index].append(token)
            distributions[index].append(distribution)
    return ids, distributions, [torch.stack(rows) for rows in seen]


def expectation(law: Law, target: Sequence[np.ndarray], draft: Sequence) -> tuple[float, float]:
    """(expected accepted tokens, probability that the first stays) of one drafted block."""
    if law is Law.RATIO:
        stays = ratio_thresholds(target, draft)
        return sum(math.prod(stays[:i]) for i in range(1, K + 1)), stays[0]
    stops, _ = block_thresholds(target, draft)
    reaches = [1 - math.prod(1 - h for h in stops[i:]) for i in range(K)]
    return sum(reaches), reaches[0]


def count_coupled(
    texts: Texts, draft: Draft, params: Sequence[SamplingParams], accepted: list, seconds: list[float]
) -> None:
    """One drafted block for each text: how many of its tokens the target draws too, and what deciding took."""
    ids, _, logits = drafted(texts, draft, params, None)
    for index, own in enumerate(params):
        rows = [TokenRow(own, len(texts.texts[index]) + j) for j in range(K + 1)]
        started = time.process_time()
        tokens = choose(logits[index], rows)
        seconds.append(time.process_time() - started)
        accepted.append(next((j for j in range(K) if tokens[j] != ids[index][j]), K))


def measure(
    target: Runner, pairs: dict[str, Draft], prompts: Sequence[Sequence[int]], rounds: int
) -> tuple[dict, dict]:
    """Accepted tokens a round by pair, temperature and law; and seconds of the decision by law."""
    accepted: dict = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    seconds: dict[str, list[float]] = defaultdict(list)
    for temperature in TEMPERATURES:
        texts = Texts(target, prompts)
        params = [SamplingParams(temperature=temperature, seed=index) for index in range(len(prompts))]
        for _ in range(rounds):
            for name, draft in pairs.items():
                cell = accepted[name][str(temperature)]
                for repeat in range(REPEATS):
                    seeded = [replace(own, seed=own.seed + 1000 * repeat) for own in params]
                    count_coupled(texts, draft, seeded, cell["coupled"], seconds["coupled"])
                for label, top_m in TOP_M.items():
                    ids, distributions, logits = drafted(texts, draft, params, top_m)
                    for index, own in enumerate(params):
                        rows = [TokenRow(own, len(texts.texts[index]) + j) for j in range(K + 1)]
                        block = draft_tokens(ids[index], distributions[index])
                        probs = [row.exp().numpy() for row in processed_logprobs(logits[index], rows)]
                        for law in (Law.RATIO, Law.BLOCK):
                            cell[f"{law.value} {label}"].append(expectation(law, probs, block)[0])
                            if label == "m=32":
                                started = time.process_time()
                                decide(law, logits[index], rows, block)
                                seconds[law.value].append(time.process_time() - started)
            for _ in range(STEP):
                logits = texts.after([[] for _ in prompts])
                rows = [TokenRow(own, len(text)) for own, text in zip(params, texts.texts, strict=True)]
                texts.extend(choose(logits, rows))
        texts.end()
    return accepted, seconds


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts and rounds")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=Path("../shared/data/spec_bench/question_open.jsonl"),
        help="Spec-Bench",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", nargs="+", default=["distilled", "spoilt"], help="and shallow")
    parser.add_argument("--rounds", type=int, default=0, help="bases a prompt; 0: by --quick")
    arguments = parser.parse_args()
    per_category, rounds = (2, 3) if arguments.quick else (6, 8)
    rounds = arguments.rounds or rounds
    model = ModelConfig(dtype="float32", threads=arguments.threads)
    tokenizer = Tokenizer.load(resolve_model_dir(model.name))
    prompts = [
        tokenizer.encode_chat([("user", prompt.text)])[-MOST_PROMPT:]
        for prompt in load_spec_bench(arguments.prompts, per_category)
    ]
    target = load_runner(model, kv_slots=len(prompts), max_context=512)
    num = len(prompts)
    pairs: dict[str, Draft] = {}
    if "distilled" in arguments.pairs:
        own = load_distilled(
            model.model_copy(update={"name": "smollm2-drafter"}), kv_slots=num, max_context=512
        )
        pairs["distilled"] = Second(own, num).draft
    if "spoilt" in arguments.pairs:
        pairs |= {"noisy 0.5": noisy(0.5), "noisy 1.5": noisy(1.5), "sure 1.3": sure(1.3)}
    if "shallow" in arguments.pairs:
        first_layers = load_runner(model, kv_slots=num, max_context=512, layers=20)
        pairs["shallow"] = Second(first_layers, num, 0.5).draft
    started = time.monotonic()
    accepted, seconds = measure(target, pairs, prompts, rounds)

    labels = ["coupled", *(f"{law} {m}" for m in TOP_M for law in ("ratio", "block"))]
    table: dict = {}
    print(f"accepted of {K} draft tokens a round; {len(prompts)} prompts x {rounds} rounds a cell")
    print(f"{'pair':<12}{'T':>5}" + "".join(f"{label:>14}" for label in labels))
    for name, by_temperature in accepted.items():
        for temperature, cell in by_temperature.items():
            means = {label: statistics.fmean(cell[label]) for label in labels}
            table.setdefault(name, {})[temperature] = means
            print(f"{name:<12}{temperature:>5}" + "".join(f"{means[label]:>14.3f}" for label in labels))
    costs = {law: 1e3 * statistics.median(spent) for law, spent in seconds.items()}
    print("decision of a round with 4 draft tokens, ms of processor time, median:", costs)
    gains = [
        means[f"block {m}"] - means[f"ratio {m}"]
        for cell in table.values()
        for means in cell.values()
        for m in TOP_M
    ]
    errors = {
        name: {
            temperature: {
                label: statistics.stdev(cell[label]) / math.sqrt(len(cell[label])) for label in labels
            }
            for temperature, cell in by_temperature.items()
        }
        for name, by_temperature in accepted.items()
    }
    result = {
        "benchmark": "laws",
        "quick": arguments.quick,
        "prompts": len(prompts),
        "rounds": rounds,
        "k": K,
        "accepted": table,
        "standard_error": errors,
        "decision_ms": costs,
        "seconds": time.monotonic() - started,
        "bars": {
            "block less ratio, mean over all cells": {
                "value": statistics.fmean(gains),
                "sign": ">=",
                "bar": 0.0,
            }
        },
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
