"""Whether w4a8 may be chosen unasked: how far its next tokens are from float32's, and how far bfloat16's are.

    python -m benchmarks.precision [--quick] [--model smollm2] [--answers ../shared/data/smollm2_answers] [--threads 1]

Recorded prompts and answers are run through the model as they stand (teacher-forced); every position of an answer counts
once. The yardstick is the exact float32 path over the same weights. Without recorded answers the model writes its own, in
float32, to the prompts of `benchmarks.engine`. Bars: argmax agreement with float32 at least that of bfloat16, perplexity
within one per cent. bfloat16 is emulated on most CPUs: `--quick` takes under two minutes on two quiet cores, without it
ten times the positions. The last line is `RESULT {json}`.
"""

import argparse
import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine import PROMPTS, generate
from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer

LONGEST = 400
PRECISIONS = ("float32", "bfloat16", "w4a8")


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of prompt and answer, and where the answer begins."""

    token_ids: list[int]
    prompt_length: int

    @property
    def length(self) -> int:
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True, slots=True)
class Outcome:
    """Per position: the best token, the log-probability of the recorded one, the lead of the best over the second."""

    best: torch.Tensor
    log_probs: torch.Tensor
    lead: torch.Tensor


def recorded(directory: Path) -> Iterator[Answer]:
    """The answers of ``directory`` in a shuffled but fixed order."""
    entries = json.loads((directory / "answers.json").read_text(encoding="utf-8"))
    ids = np.load(directory / "answers.npz")["ids"]
    ends = np.cumsum([entry["len"] for entry in entries])
    for index in np.random.default_rng(11).permutation(len(entries)):
        entry, end = entries[index], int(ends[index])
        if entry["len"] <= LONGEST and entry["len"] - entry["prompt_len"] >= 8:
            yield Answer(ids[end - entry["len"] : end].astype(int).tolist(), entry["prompt_len"])


def written(runner: Runner, directory: Path) -> Iterator[Answer]:
    """The model's own greedy answers."""
    tokenizer = Tokenizer.load(directory)
    for prompt in PROMPTS:
        token_ids = tokenizer.encode_chat([("user", prompt)])
        output, _ = generate(runner, token_ids, LONGEST - len(token_ids), k=0)
        yield Answer([*token_ids, *output], len(token_ids))


def run(runner: Runner, answers: list[Answer]) -> Outcome:
    """What ``runner`` says at every position of the answers."""
    best, log_probs, lead = [], [], []
    for answer in answers:
        slot = runner.kv.acquire()
        assert slot is not None
        logits = runner.forward([Segment(slot, 0, answer.token_ids[:-1], answer.length)])
        runner.kv.release(slot)
        said = torch.tensor(answer.token_ids[answer.prompt_length :])
        top = logits.topk(2)
        best.append(top.indices[:, 0])
        lead.append(top.values[:, 0] - top.values[:, 1])
        log_probs.append(logits.log_softmax(1).gather(1, said[:, None])[:, 0])
    return Outcome(torch.cat(best), torch.cat(log_probs), torch.cat(lead))


def load(model: str, precision: str, threads: int) -> Runner:
    settings = ModelConfig.model_validate(
        {"name": model, "dtype": precision, "threads": threads, "runner": "lean"}
    )
    return load_runner(settings, kv_slots=2, max_context=2 * LONGEST)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4,000 positions instead of 40,000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", type=Path, default=Path("../shared/data/smollm2_answers"))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    positions = 4_000 if arguments.quick else 40_000

    answers: list[Answer] = []
    found: dict[str, Outcome] = {}
    for precision in PRECISIONS:
        runner = load(arguments.model, precision, arguments.threads)
        print(f"{precision}: {runner.info.runner_reason}", flush=True)
        if not answers:
            has_answers = (arguments.answers / "answers.npz").is_file()
            directory = resolve_model_dir(arguments.model)
            for answer in recorded(arguments.answers) if has_answers else written(runner, directory):
                answers.append(answer)
                if sum(one.length for one in answers) >= positions:
                    break
        found[precision] = run(runner, answers)
        del runner
        gc.collect()

    exact = found["float32"]
    figures = {}
    for precision in PRECISIONS[1:]:
        one = found[precision]
        differs = one.best != exact.best
        figures[precision] = {
            "agreement": 1 - float(differs.float().mean()),
            "different": int(differs.sum()),
            "perplexity_ratio": float((exact.log_probs.mean() - one.log_probs.mean()).exp()),
            "log_prob_difference": float((one.log_probs - exact.log_probs).abs().mean()),
            "lead_where_different": float(exact.lead[differs].median()) if differs.any() else 0.0,
        }
        print(f"{precision}: {figures[precision]}")
    w4a8, bfloat16 = figures["w4a8"], figures["bfloat16"]
    bars: dict[str, tuple[float, str, float]] = {
        "argmax agreement of w4a8 with float32; bar: bfloat16's": (
            w4a8["agreement"], ">=", bfloat16["agreement"]),
        "perplexity of w4a8 over float32's": (w4a8["perplexity_ratio"], "<=", 1.01),
    }  # fmt: skip
    for text, (value, sign, bar) in bars.items():
        met = value <= bar if sign == "<=" else value >= bar
        print(f"{'met ' if met else 'MISSED'} {text}: {value:.4f} ({sign} {bar:.4f})")
    result = {
        "benchmark": "precision",
        "model": arguments.model,
        "answers": len(answers),
        "positions": len(exact.best),
        "figures": figures,
        "bars": {
            text: {"value": value, "sign": sign, "bar": bar} for text, (value, sign, bar) in bars.items()
        },
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
