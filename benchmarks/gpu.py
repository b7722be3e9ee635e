"""One short check of the engine on a GPU: parity of the runners, same output with and without blocks, cost of a step.

    python -m benchmarks.gpu                      a 1B-shaped random model in bfloat16 on cuda:0
    python -m benchmarks.gpu --device cpu --small  the same on a tiny one, to see that the script runs

Needs nothing but the installed package: no weights, no network. The last line is ``RESULT {json}``. There are no bars for
times; ``equal_output`` has to be true wherever the runner says that its numerics are deterministic.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.sampling import TokenRow, choose, top2_gap
from paceline.testing.tiny_models import tiny_model_dir, write_tiny_tokenizer
from paceline.types import SamplingParams
from verify_service.verdict import judge

CONTEXT = 256


def billion_model_dir(path: Path) -> Path:
    """A random Llama of the shape of a 1B model, in bfloat16, with a small tokenizer and a padded vocabulary."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(path)
    write_tiny_tokenizer(path)
    return path


def decode(runner: Runner, prompt: list[int], params: SamplingParams, count: int, k: int) -> list[int]:
    """``count`` tokens by blocks of ``k`` random guesses, every other one right by chance of a coin; k = 0: plainly."""
    coin = random.Random(7)
    slot = runner.kv.acquire()
    assert slot is not None, "one sequence at a time"
    tokens, known = list(prompt), []
    if k:
        known = decode(runner, prompt, params, count, 0)
    logits = runner.forward([Segment(slot, 0, tokens, 1)])
    tokens += choose(logits, [TokenRow(params, len(tokens), prompt, ())])
    while len(tokens) < len(prompt) + count:
        at = len(tokens) - len(prompt)
        draft = [token if coin.random() < 0.7 else coin.randrange(3, 500) for token in known[at : at + k]]
        rows = [tokens[-1], *draft]
        logits = runner.forward([Segment(slot, len(tokens) - 1, rows, len(rows))])
        positions = range(len(tokens), len(tokens) + len(rows))
        target = choose(logits, [TokenRow(params, position, prompt, ()) for position in positions])
        verdict = judge(draft, target, stop_ids=frozenset(), room=len(prompt) + count - len(tokens))
        tokens += verdict.committed
        runner.kv.truncate(slot, len(tokens) - 1)
    runner.kv.release(slot)
    return tokens[len(prompt) :]


def step_ms(runner: Runner, sequences: int, rows: int, repeats: int) -> float:
    """Median time of a step of ``sequences`` x ``rows`` at context 256, logits on the host."""
    slots = [runner.kv.acquire() for _ in range(sequences)]
    held = [slot for slot in slots if slot is not None]
    for slot in held:
        runner.forward([Segment(slot, 0, [5 + i % 200 for i in range(CONTEXT)], 0)])

    def run() -> None:
        logits = runner.forward([Segment(slot, CONTEXT, list(range(5, 5 + rows)), rows) for slot in held])
        logits[-1, 0].item()
        for slot in held:
            runner.kv.truncate(slot, CONTEXT)

    times = [_timed(run) for _ in range(repeats + 3)][3:]
    for slot in held:
        runner.kv.release(slot)
    return sorted(times)[len(times) // 2] * 1e3


def draw_ms(device: str, vocab: int, rows: int, repeats: int, **settings: float) -> float:
    """Median time of drawing a token for each of ``rows`` rows of logits that lie on the device."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)).mul_(2.5).to(device)
    params = SamplingParams(seed=3, **settings)  # type: ignore[arg-type]

    def run() -> None:
        choose(logits, [TokenRow(params, position) for position in range(rows)])

    times = [_timed(run) for _ in range(repeats + 3)][3:]
    return sorted(times)[len(times) // 2] * 1e3


def _timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--small", action="store_true", help="a tiny model instead of a 1B-shaped one")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = tiny_model_dir(Path(directory)) if args.small else billion_model_dir(Path(directory))
        runners = {
            name: load_runner(
                ModelConfig(name=str(path), dtype=args.dtype, device=args.device, runner=name),
                kv_slots=17,
                max_context=512,
            )
            for name in ("reference", "lean")
        }
    result: dict[str, object] = {"benchmark": "gpu", "device": args.device, "bar": {"equal_output": True}}
    prompt = [5 + (37 * i) % 400 for i in range(120)]
    logits = {}
    for name, runner in runners.items():
        print(f"{name}: {runner.info.dtype} on {runner.info.device}, {runner.info.runner_reason}")
        slot = runner.kv.acquire()
        assert slot is not None, "nobody else has one"
        logits[name] = runner.forward([Segment(slot, 0, prompt, len(prompt))]).float().cpu()
        runner.kv.release(slot)
        equal = {}
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature, seed=11)
            plain = decode(runner, prompt, params, 64, 0)
            for k in (1, 4, 8):
                blocks = decode(runner, prompt, params, 64, k)
                equal[f"T={temperature} k={k}"] = blocks == plain
        times = {
            f"{sequences}x{rows}": round(step_ms(runner, sequences, rows, args.repeats), 3)
            for sequences, rows in ((1, 1), (1, 5), (1, 9), (8, 1), (8, 5), (16, 1))
        }
        print(f"  same output: {equal}\n  step, ms: {times}")
        result[name] = {
            "numerics": runner.info.numerics,
            "equal": equal,
            "step_ms": times,
            "t5_over_t1": round(times["1x5"] / times["1x1"], 3),
            "t9_over_t1": round(times["1x9"] / times["1x1"], 3),
        }
    result["draw_ms"] = {
        f"{rows} rows, {name}": round(draw_ms(args.device, vocab, rows, args.repeats, **settings), 3)
        for vocab in (1000 if args.small else 128_256,)
        for name, settings in (
            ("T=0", {"temperature": 0.0}),
            ("T=0.8", {"temperature": 0.8}),
            ("T=0.8, top_p=0.95", {"temperature": 0.8, "top_p": 0.95}),
            ("T=0.8, top_k=50", {"temperature": 0.8, "top_k": 50}),
        )
        for rows in (1, 32)
    }
    print(f"draws, ms: {result['draw_ms']}")
    difference = (logits["lean"] - logits["reference"]).abs().max().item()
    agree = (logits["lean"].argmax(-1) == logits["reference"].argmax(-1)) | (
        top2_gap(logits["reference"]) < 0.05
    )
    result["parity"] = {"max_difference": difference, "argmax_agree_off_ties": bool(agree.all())}
    result["equal_output"] = all(
        all(result[name]["equal"].values())  # type: ignore[index]
        for name, runner in runners.items()
        if runner.info.numerics == "deterministic"
    )
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
