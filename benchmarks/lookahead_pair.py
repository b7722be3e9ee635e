"""How often the outcome of a round is among those drafted ahead, on a real pair: SmolLM2 and the drafter made for it.

    python -m benchmarks.lookahead_pair [--quick] [--prompts question_open.jsonl]

The text is the target's own (coupled draws, or greedy), and both models are asked about every position of it. Under the
coupled law that is exact: the committed text does not hang on the drafter, and what a drafter ranks after an accepted
guess is what it ranks after the text. Under the ratio law accepted tokens may differ from the text's; its rounds are
played on the distributions that both models have along the text: guess drawn from the drafter's likeliest 128, kept
with min(1, p / q), corrected from what p has above q, the bonus drawn from p. A round begins at every position, so rounds
overlap. The last line is ``RESULT {json}``.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.laws import MOST_PROMPT, Texts
from benchmarks.lookahead import TEMPERATURES, At, coupled_rank, ratio_play, rounds_of, softmax
from evaluation.workload import load_spec_bench
from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.engine.distilled import load_distilled
from paceline.model_store import resolve_model_dir
from paceline.sampling import TokenRow, choose
from paceline.tokenizer import Tokenizer
from paceline.types import SamplingParams

K = 4
TOP_M = 128


def write(target: Runner, prompts: Sequence[Sequence[int]], params: SamplingParams, tokens: int) -> Texts:
    """The target's own continuation of each prompt."""
    texts = Texts(target, prompts)
    for _ in range(tokens):
        logits = texts.after([[] for _ in prompts])
        texts.extend(choose(logits, [TokenRow(params, len(text)) for text in texts.texts]))
    texts.end()
    return texts


def logits_along(runner: Runner, text: Sequence[int], begin: int) -> "np.ndarray":
    """[len(text) - begin, V] for the tokens at begin and behind it."""
    slot = runner.kv.acquire()
    assert slot is not None
    rows = runner.forward([Segment(slot, 0, list(text[:-1]), len(text) - begin)])
    runner.kv.release(slot)
    return rows.numpy().astype(np.float32)


def coupled_at(text: Sequence[int], begin: int, drafts: "np.ndarray", params: SamplingParams) -> At:
    """What is committed is the text; the drafter ranks with the noise of the position."""
    ranked = [coupled_rank(row, params, begin + index) for index, row in enumerate(drafts)]
    return lambda base, j, bonus: (text[begin + base + j], ranked[base + j])


def ratio_at(targets: "np.ndarray", drafts: "np.ndarray", params: SamplingParams, seed: int) -> At:
    """Played anew for every round."""
    own = [softmax(row / params.temperature) for row in targets]
    guessed = [softmax(_likeliest(row) / params.temperature) for row in drafts]

    def at(base: int, j: int, bonus: bool) -> tuple[int, list[int]]:
        dice = np.random.default_rng((seed, base, j))
        return ratio_play(own[base + j], guessed[base + j], dice, bonus=bonus)

    return at


def _likeliest(row: "np.ndarray") -> "np.ndarray":
    cut = np.full_like(row, -np.inf)
    kept = np.argpartition(row, -TOP_M)[-TOP_M:]
    cut[kept] = row[kept]
    return cut


def measure(prompts: Sequence[Sequence[int]], tokens: int, threads: int) -> dict[str, dict[str, float]]:
    """By temperature and law: acceptance and hit rates."""
    model = ModelConfig(dtype="float32", threads=threads)
    target = load_runner(model, kv_slots=len(prompts), max_context=512)
    named = model.model_copy(update={"name": "smollm2-drafter"})
    drafter = load_distilled(named, kv_slots=1, max_context=512)
    found: dict[str, dict[str, float]] = {}
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, seed=7)
        texts = write(target, prompts, params, tokens)
        plays: dict[str, list[tuple[At, int]]] = {}
        for number, (prompt, text) in enumerate(zip(prompts, texts.texts, strict=True)):
            begin, bases = len(prompt) + 1, len(text) - len(prompt) - 1 - K
            drafts = logits_along(drafter, text, begin)
            name = "coupled" if temperature else "greedy"
            plays.setdefault(name, []).append((coupled_at(text, begin, drafts, params), bases))
            if temperature:
                at = ratio_at(logits_along(target, text, begin), drafts, params, number)
                plays.setdefault("ratio", []).append((at, bases))
        for law, played in plays.items():
            name = f"T={temperature:g}, {law}"
            found[name] = rounds_of(played, K)
            print(f"{name:<16} {found[name]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="12 prompts of 48 tokens: under two minutes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--prompts",
        type=Path,
        default=Path("../shared/data/spec_bench/question_open.jsonl"),
        help="Spec-Bench",
    )
    arguments = parser.parse_args()
    started = time.monotonic()
    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.load(resolve_model_dir("smollm2"))
    prompts = [
        tokenizer.encode_chat([("user", prompt.text)])[-MOST_PROMPT:]
        for prompt in load_spec_bench(arguments.prompts, 2 if arguments.quick else 8)
    ]
    found = measure(prompts, 48 if arguments.quick else 96, arguments.threads)
    bars = {
        f"coupled above ratio at T={temperature:g}, F={fan}": found[f"T={temperature:g}, coupled"][
            f"2, F={fan}"
        ]
        > found[f"T={temperature:g}, ratio"][f"2, F={fan}"]
        for temperature in TEMPERATURES[1:]
        for fan in (1, 3)
    }
    seconds = round(time.monotonic() - started, 1)
    print(
        "RESULT",
        json.dumps({"pair": "smollm2, smollm2-drafter", "k": K, **found, "bars": bars, "seconds": seconds}),
    )


if __name__ == "__main__":
    main()
