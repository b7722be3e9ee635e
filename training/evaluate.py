"""What a drafter accepts as served: ``python -m training.evaluate --drafter DIR --target smollm2 --answers DIR``.

Plays rounds of ``k`` guesses through the drafter itself along stored greedy answers: by task, by position, and the cost
of its step against a step of the target on the same threads.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draft_service.drafters import DraftRequest
from draft_service.drafters.distilled import load_distilled_drafter
from draft_service.drafters.model import ModelDrafter
from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import SamplingParams
from training.acceptance import Acceptance
from training.answers import is_held_out, read_shard, whole_shards

_GREEDY = SamplingParams(temperature=0.0)


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="training.evaluate", description=__doc__)
    parser.add_argument("--drafter", required=True, help="directory, or name in models/")
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", type=Path, help="directory of shards; greedy answers are played")
    parser.add_argument(
        "--recorded", type=Path, help="instead: a file of benchmarks.recorded, its Spec-Bench part"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="which of the recorded answers")
    parser.add_argument(
        "--held-out-every", type=int, default=1, help="1: all answers; as in training: the held-out"
    )
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--each", type=int, default=1000, help="most answers a task")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        help="read only the last so many of a prompt; 0: all; unset: as its directory says",
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-cost", action="store_true", help="leave the target unloaded")
    parser.add_argument("--to", type=Path, help="file for the result, as training.card reads it")
    options = parser.parse_args(argv)
    if (options.prompt_tokens or 0) < 0:
        parser.error(f"--prompt-tokens is {options.prompt_tokens}, expected a number of tokens or 0")
    tokenizer = Tokenizer.load(resolve_model_dir(options.target))
    drafter = load_distilled_drafter(
        "distilled",
        ModelConfig(name=options.drafter, dtype=options.dtype, threads=options.threads),
        kv_slots=2,
        max_context=2048,
        tokenizer=tokenizer,
        prompt_tokens=options.prompt_tokens,
    )
    if options.recorded:
        played = _recorded(options.recorded, options.temperature, options.each)
    else:
        played = _chosen(options.answers, options.held_out_every, options.each)
    result = _result(drafter, played, options.k, tokenizer.vocab_size)
    result |= {"temperature": options.temperature, "dtype": options.dtype, "answers": len(played)}
    result["prompts"] = "Spec-Bench" if options.recorded else "held-out"
    if not options.no_cost:
        model = ModelConfig(name=options.target, dtype=options.dtype, threads=options.threads)
        target = load_runner(model, kv_slots=2, max_context=512)
        result |= _costs(drafter, target, tokenizer.vocab_size) | {"threads": options.threads}
    for line in acceptance_table(result):
        print(line)
    if options.to:
        options.to.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("RESULT " + json.dumps(result))


def acceptance_table(result: dict[str, Any]) -> list[str]:
    """Markdown: accepted length and share accepted at each position (of those that reached it), by task."""
    k = result["k"]
    lines = [
        "| task | accepted length | " + " | ".join(f"position {i + 1}" for i in range(k)) + " |",
        "|---|---|" + "---|" * k,
    ]
    for task, length in result["by_task"].items():
        shares = " | ".join(f"{share:.3f}" for share in result["by_position"][task])
        lines.append(f"| {task} | {length:.2f} | {shares} |")
    lines.append(f"| **mean of the tasks** | **{result['mean_length_over_tasks']:.2f}** |" + " |" * k)
    return lines


def _result(drafter: ModelDrafter, played: "Sequence[_Played]", k: int, vocab_size: int) -> dict[str, Any]:
    found: dict[str, Acceptance] = {}
    for answer in played:
        _play(drafter, answer, vocab_size, found.setdefault(answer.task, Acceptance(k=k)))
    mean = sum(one.mean_length for one in found.values()) / max(len(found), 1)
    return {
        "version": drafter.version,
        "k": k,
        "mean_length_over_tasks": round(mean, 3),
        "by_task": {task: round(one.mean_length, 3) for task, one in sorted(found.items())},
        "by_position": {task: [round(x, 3) for x in one.by_position] for task, one in sorted(found.items())},
        "bars": {"mean_length_over_tasks": 2.0, "guess_share": 0.15},
    }


@dataclass(frozen=True, slots=True)
class _Played:
    """One answer and how it was drawn."""

    task: str
    ids: list[int]
    prompt_len: int
    sampling: SamplingParams


def _chosen(directory: Path, every: int, each: int) -> list[_Played]:
    counts: Counter[str] = Counter()
    chosen = []
    for shard in whole_shards(directory):
        for answer in read_shard(shard):
            if answer.temperature == 0 and is_held_out(answer, every) and counts[answer.task] < each:
                counts[answer.task] += 1
                chosen.append(_Played(answer.task, answer.ids.tolist(), answer.prompt_len, _GREEDY))
    return chosen


def _recorded(path: Path, temperature: float, each: int) -> list[_Played]:
    """Under the coupled law acceptance follows from the answer and its seed, at any temperature."""
    counts: Counter[str] = Counter()
    chosen = []
    for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
        row = json.loads(line)
        if (
            row["mix"] == "spec_bench"
            and row["temperature"] == temperature
            and counts[row["category"]] < each
        ):
            counts[row["category"]] += 1
            sampling = SamplingParams(temperature=temperature, seed=row["seed"])
            ids = [*row["prompt_ids"], *row["output_ids"]]
            chosen.append(_Played(row["category"], ids, len(row["prompt_ids"]), sampling))
    return chosen


def _play(drafter: ModelDrafter, played: _Played, vocab_size: int, to: Acceptance) -> None:
    """The rounds that serving would have along the answer."""
    ids = played.ids
    drafter.open(1)
    at = played.prompt_len
    while at < len(ids):
        request = DraftRequest(1, ids[:at], played.prompt_len, played.sampling, to.k, vocab_size)
        guesses = None
        while not isinstance(guesses, list):  # a long prompt takes several turns to read
            guesses = drafter.propose([request])[0]
        assert isinstance(guesses, list), "greedy guesses are not drawn"
        guesses = guesses[: len(ids) - at]
        hits = 0
        while hits < len(guesses) and guesses[hits] == ids[at + hits]:
            hits += 1
        at += to.add_round(hits, len(guesses), len(ids) - at)
    drafter.close(1)


def _guessed(drafter: ModelDrafter, prompt: list[int], k: int, vocab_size: int) -> list[int]:
    drafter.open(2)
    guesses = None
    while not isinstance(guesses, list):
        guesses = drafter.propose([DraftRequest(2, prompt, len(prompt), _GREEDY, k, vocab_size)])[0]
    drafter.close(2)
    return guesses


def _costs(drafter: ModelDrafter, target: Runner, vocab_size: int) -> dict[str, float]:
    """Least of many, alternating, context 256: one guess more, and one step of the target with one row; milliseconds."""
    prompt = next(
        prompt
        for prompt in ([(7919 * i + start) % vocab_size for i in range(256)] for start in range(1000))
        if len(_guessed(drafter, prompt, 9, vocab_size)) == 9  # no end of text among them
    )
    slot = target.kv.acquire()
    assert slot is not None
    with torch.inference_mode():
        target.forward([Segment(slot, 0, prompt, 1)])
        drafter.open(2)
        few: list[float] = []
        many: list[float] = []
        step: list[float] = []
        for _ in range(40):
            for times, k in ((few, 1), (many, 9)):
                began = time.perf_counter()
                drafter.propose([DraftRequest(2, prompt, 256, _GREEDY, k, vocab_size)])
                times.append(time.perf_counter() - began)
            began = time.perf_counter()
            target.forward([Segment(slot, 256, prompt[:1], 1)])
            step.append(time.perf_counter() - began)
            target.kv.truncate(slot, 256)
        drafter.close(2)
    guess, whole = 1e3 * (min(many) - min(few)) / 8, 1e3 * min(step)
    print(f"one guess {guess:.3f} ms, one target step {whole:.3f} ms: {guess / whole:.3f}", file=sys.stderr)
    return {
        "guess_ms": round(guess, 3),
        "target_step_ms": round(whole, 3),
        "guess_share": round(guess / whole, 3),
    }


if __name__ == "__main__":
    main()
