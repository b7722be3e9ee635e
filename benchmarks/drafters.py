"""Drafters side by side: acceptance by position, accepted length, cost, speed over plain decoding, same output.

    python -m benchmarks.drafters replay --recorded FILE [--quick] [--drafters ngram suffix cascade]
    python -m benchmarks.drafters live --data DIR [--quick] [--drafters ngram suffix cascade]

``replay`` holds drafters against answers of the target that ``benchmarks.recorded`` has stored. The committed text does not
depend on the drafter, so the acceptance is exactly that of a run, at both temperatures, and the target need not run. Its
speed ratio is computed: rounds cost what ``--step-ms`` says of a step with 1, 2, 4, ... rows (default: SmolLM2 on two
quiet cores, docs/log.md) and ``--link-ms``, drafting costs this thread's own processor time.

``live`` starts the whole stack under Ray and asks each prompt plainly and with each drafter, in turn, over gRPC: one
stream, wall time from first token to last. Its acceptance by position is a lower bound: replies do not say how long each block
was, so one whose guesses were all right counts as if it had gone on.

Settings, with the drafters in them, come from ``--config`` and ``--set``, as everywhere. Accepted length counts the target's own
token and all rounds, also those without a block. The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.recorded import Recorded, load_recorded
from draft_service.drafters import Drafter, DraftRequest, Pass, TwoSpeed, build_drafters
from draft_service.drafters.base import tidy
from evaluation.workload import Prompt, load_spec_bench
from paceline.client import Chunk, Client, Finished, generate_request
from paceline.config import PacelineConfig, load_config
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import Mode, SamplingParams

STEP_MS = "1:5.9,2:6.5,4:8.5,5:9.7,9:15.6,16:25.2"
BARS = {
    "suffix_over_ngram_accepted_length": 1.15,
    "cascade_mean_ratio": 1.35,
    "cascade_worst_ratio": 1.0,
    "cascade_over_better_member": 0.97,
}


@dataclass(slots=True)
class Sums:
    """One drafter on one kind of traffic."""

    rounds: int = 0
    tokens: int = 0
    blocks: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    target_s: float = 0.0
    plain_s: float = 0.0
    reached: list[int] = field(default_factory=lambda: [0] * 64)
    right: list[int] = field(default_factory=lambda: [0] * 64)

    def block(self, num_guesses: int, num_right: int) -> None:
        """One block; position j is reached when all before it were right."""
        self.blocks += num_guesses > 0
        self.drafted += num_guesses
        self.accepted += num_right
        for position in range(min(num_guesses, num_right + 1)):
            self.reached[position] += 1
            self.right[position] += position < num_right

    def plus(self, other: "Sums") -> "Sums":
        """Both together."""
        return Sums(
            *(getattr(self, name) + getattr(other, name) for name in _COUNTS),
            [a + b for a, b in zip(self.reached, other.reached, strict=True)],
            [a + b for a, b in zip(self.right, other.right, strict=True)],
        )

    def figures(self, k: int) -> dict:
        """What the table shows."""
        return {
            "accepted_length": round(self.tokens / max(self.rounds, 1), 3),
            "tokens_per_block": round((self.accepted + self.blocks) / self.blocks, 3)
            if self.blocks
            else None,
            "rounds_with_block": round(self.blocks / max(self.rounds, 1), 3),
            "acceptance": round(self.accepted / self.drafted, 3) if self.drafted else None,
            "by_position": [
                round(r / n, 2) if n else None for r, n in zip(self.right[:k], self.reached[:k], strict=True)
            ],
            "draft_ms_per_round": round(1e3 * self.draft_s / max(self.rounds, 1), 3),
            "speed_ratio": round(self.plain_s / (self.target_s + self.draft_s), 3) if self.target_s else None,
        }


_COUNTS = ("rounds", "tokens", "blocks", "drafted", "accepted", "draft_s", "target_s", "plain_s")


class StepCost:
    """Seconds of a target step by its rows, from points in between by straight lines."""

    def __init__(self, text: str, link_ms: float) -> None:
        points = [point.split(":") for point in text.split(",")]
        self._rows = [int(rows) for rows, _ in points]
        self._ms = [float(ms) for _, ms in points]
        self._link_s = link_ms / 1e3

    def __call__(self, num_guesses: int, *, linked: bool) -> float:
        beyond = max(num_guesses + 1 - self._rows[-1], 0) * self._ms[-1] / self._rows[-1]
        step_s = (float(np.interp(num_guesses + 1, self._rows, self._ms)) + beyond) / 1e3
        return step_s + (self._link_s if linked else 0.0)


class Clock:
    """This thread's processor time, and what the target would have taken meanwhile: what a cascade measures by."""

    def __init__(self) -> None:
        self.target_s = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self.target_s


def ask(drafter: Drafter, request: DraftRequest, opened: set[int]) -> list[int]:
    """One question to its end, through the slower half where it is passed on."""
    slower = drafter.slower if isinstance(drafter, TwoSpeed) else None
    while True:
        (answer,) = drafter.propose([request])
        if isinstance(answer, Pass):
            assert slower is not None
            request = replace(request, k=answer.k)
            if request.handle not in opened:
                slower.open(request.handle)
                opened.add(request.handle)
            drafter = slower
        elif isinstance(answer, list):
            return answer


def replay_one(
    drafter: Drafter, handle: int, answer: Recorded, *, k: int, cost: StepCost, clock: Clock, vocab_size: int
) -> Sums:
    """One recorded answer, round by round, as the verify tier would do it."""
    sums, opened = Sums(), set[int]()
    text, prompt_len = answer.prompt_ids + answer.output_ids, len(answer.prompt_ids)
    at = prompt_len + 1  # the prefill gives the first token
    sampling = SamplingParams(temperature=answer.temperature, seed=answer.seed)
    drafter.open(handle)
    while at < len(text):
        request = DraftRequest(
            handle,
            text[:at],
            prompt_len,
            sampling,
            k,
            vocab_size,
            scope=f"{answer.mix} {answer.temperature}",
            alone=False,
        )
        began = time.thread_time()
        guesses = ask(drafter, request, opened)
        sums.draft_s += time.thread_time() - began
        truth = text[at : at + len(guesses)]
        num_right = next(
            (i for i, (a, b) in enumerate(zip(guesses, truth, strict=False)) if a != b), len(truth)
        )
        committed = min(num_right + 1, len(text) - at)
        round_s = cost(len(guesses), linked=True)
        clock.target_s += round_s
        sums.block(len(guesses), num_right)
        sums.rounds += 1
        sums.tokens += committed
        sums.target_s += round_s
        sums.plain_s += committed * cost(0, linked=False)
        at += committed
    drafter.close(handle)
    if isinstance(drafter, TwoSpeed) and drafter.slower is not None and opened:
        drafter.slower.close(handle)
    while tidy(drafter):
        pass
    return sums


def replay(args: argparse.Namespace) -> dict:
    """All drafters over all recorded answers; prints the tables."""
    config = load_config(args.config, args.overrides)
    clock, cost = Clock(), StepCost(args.step_ms, args.link_ms)
    tokenizer = Tokenizer.load(resolve_model_dir(config.model.name))
    answers = load_recorded(args.recorded)
    if args.quick:
        seen: dict[tuple[str, str, float], int] = defaultdict(int)
        kept = []
        for answer in answers:
            key = (answer.mix, answer.category, answer.temperature)
            seen[key] += 1
            if seen[key] <= args.quick_count:
                kept.append(answer)
        answers = kept
    tables: dict[str, dict[tuple[float, str, str], Sums]] = {}
    for name in args.drafters:
        # Each from scratch: no drafter profits from another's traffic.
        drafter = build_drafters(config, tokenizer, clock=clock)[name]
        table = tables[name] = defaultdict(Sums)
        for handle, answer in enumerate(answers):
            key = (answer.temperature, answer.mix, answer.category)
            sums = replay_one(
                drafter, handle, answer, k=args.k, cost=cost, clock=clock, vocab_size=args.vocab_size
            )
            table[key] = table[key].plus(sums)
    return _report(tables, args.k)


def _report(tables: dict[str, dict[tuple[float, str, str], Sums]], k: int) -> dict:
    rows = []
    print(
        f"{'T':>4} {'traffic':13} {'category':15} {'drafter':10} {'length':>6} {'block':>6} {'share':>6} "
        f"{'accept':>6} {'draft ms':>8} {'ratio':>6}  by position"
    )
    keys = sorted({key for table in tables.values() for key in table})
    for temperature, mix, category in keys:
        for name, table in tables.items():
            figures = table[temperature, mix, category].figures(k)
            rows.append(
                {"temperature": temperature, "mix": mix, "category": category, "drafter": name, **figures}
            )
            positions = " ".join("-" if p is None else f"{p:.2f}" for p in figures["by_position"])
            print(
                f"{temperature:4} {mix:13} {category:15} {name:10} {figures['accepted_length']:6.3f} "
                f"{figures['tokens_per_block'] or 0:6.2f} {figures['rounds_with_block']:6.2f} "
                f"{figures['acceptance'] or 0:6.3f} {figures['draft_ms_per_round']:8.3f} "
                f"{figures['speed_ratio'] or 0:6.3f}  {positions}"
            )
    return {"rows": rows, "summary": _summary(rows)}


def _summary(rows: Sequence[dict]) -> dict:
    """Means over the categories of a traffic, and the figures that have bars (at temperature 0)."""
    means: dict[tuple[float, str, str], tuple[float, float]] = {}
    for temperature, mix, name in sorted({(r["temperature"], r["mix"], r["drafter"]) for r in rows}):
        of = [r for r in rows if (r["temperature"], r["mix"], r["drafter"]) == (temperature, mix, name)]
        ratios = [r["speed_ratio"] for r in of if r["speed_ratio"]]
        means[temperature, mix, name] = (
            float(np.mean([r["accepted_length"] for r in of])),
            float(np.mean(ratios)) if ratios else float("nan"),
        )
        length, ratio = means[temperature, mix, name]
        print(f"mean over categories: T={temperature} {mix} {name}: length {length:.3f}, ratio {ratio:.3f}")
    summary: dict = {
        "mean_accepted_length": {f"T={t} {m} {n}": round(v[0], 3) for (t, m, n), v in means.items()},
        "mean_speed_ratio": {f"T={t} {m} {n}": round(v[1], 3) for (t, m, n), v in means.items()},
    }
    for mix in ("conversation", "template"):
        if (0.0, mix, "suffix") in means and (0.0, mix, "ngram") in means:
            over = means[0.0, mix, "suffix"][0] / means[0.0, mix, "ngram"][0]
            summary[f"suffix_over_ngram {mix}"] = round(over, 3)
    cascade = [
        r["speed_ratio"]
        for r in rows
        if (r["temperature"], r["mix"], r["drafter"]) == (0.0, "spec_bench", "cascade") and r["speed_ratio"]
    ]
    if cascade:
        summary["cascade_mean_ratio"] = round(float(np.mean(cascade)), 3)
        summary["cascade_worst_ratio"] = min(cascade)
    return summary


# --- live -------------------------------------------------------------------------------------------------------------


DEEPEST = 4  # of the plans, where requests name no k


async def _decode(
    client: Client, prompt: Prompt, drafter: str, temperature: float, args: argparse.Namespace
) -> tuple[list[int], Finished]:
    request = generate_request(
        messages=[("user", prompt.text)],
        temperature=temperature,
        seed=int(prompt.id),
        max_tokens=args.max_tokens,
        mode=Mode.SPECULATIVE if drafter else Mode.PLAIN,
        drafter=drafter or None,
        k=args.k or None if drafter else None,
        tenant=drafter or "plain",  # a memory of its own for each, of prefixes and of texts
    )
    ids: list[int] = []
    async for event in client.generate(request):
        match event:
            case Chunk():
                ids += event.token_ids
            case Finished():
                return ids, event
    raise AssertionError("the client raises when no answer comes")


def _live_sums(ids: Sequence[int], finished: Finished, plain_s: float) -> Sums:
    stats = finished.speculative
    sums = Sums(
        rounds=stats.num_rounds,
        tokens=max(len(ids) - 1, 0),
        draft_s=finished.timings.draft_s,
        target_s=finished.timings.decode_s - finished.timings.draft_s,
        plain_s=plain_s,
    )
    sums.blocks, sums.drafted = stats.num_spec_steps, stats.num_draft_tokens
    sums.accepted = stats.num_accepted_draft_tokens
    for num_right, count in enumerate(stats.acceptance_histogram):
        for position in range(num_right + 1):
            sums.reached[position] += count
            sums.right[position] += count if position < num_right else 0
    return sums


async def live(args: argparse.Namespace, address: str) -> dict:
    """Every prompt plainly and with each drafter, next to each other in time."""
    prompts = load_spec_bench(
        args.data / "spec_bench" / "question_open.jsonl",
        args.quick_count if args.quick else args.per_category,
    )
    tables: dict[str, dict[tuple[float, str, str], Sums]] = {
        name: defaultdict(Sums) for name in args.drafters
    }
    requests = equal = 0
    async with Client(address) as client:
        for temperature in args.temperatures:
            for number, prompt in enumerate(prompts):
                plain_ids, plain = await _decode(client, prompt, "", temperature, args)
                turn = number % len(args.drafters)
                for name in [*args.drafters[turn:], *args.drafters[:turn]]:
                    ids, finished = await _decode(client, prompt, name, temperature, args)
                    requests += 1
                    equal += ids == plain_ids
                    key = (temperature, "spec_bench", prompt.category)
                    tables[name][key] = tables[name][key].plus(
                        _live_sums(ids, finished, plain.timings.decode_s)
                    )
    report = _report(tables, args.k or DEEPEST)
    print(f"same output: {equal} of {requests}")
    return {**report, "requests": requests, "equal": equal}


def run_live(args: argparse.Namespace) -> dict:
    """The stack of ``--config`` under Ray, asked by ``live``."""
    from rich.console import Console

    from cluster.launch import running_cluster  # Ray: only where it is needed
    from cluster.progress import progress_on

    free_ports = [f"{tier}.server.port=0" for tier in ("router", "verify", "draft")]
    config: PacelineConfig = load_config(args.config, [*free_ports, *args.overrides])
    with (
        progress_on(Console(stderr=True, highlight=False)) as progress,
        running_cluster(config, progress=progress) as cluster,
    ):
        return asyncio.run(live(args, cluster.router_address))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["replay", "live"])
    parser.add_argument("--recorded", type=Path, help="replay: what benchmarks.recorded wrote")
    parser.add_argument("--data", type=Path, help="live: folder with spec_bench")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--drafters", nargs="+", default=["ngram", "suffix", "cascade"])
    parser.add_argument(
        "--k", type=int, default=4, help="live, 0: as many as pay, by the controller, up to the plan's k"
    )
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--quick-count", type=int, default=2, help="prompts of each category with --quick")
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="live")
    parser.add_argument("--max-tokens", type=int, default=96, help="live")
    parser.add_argument("--step-ms", default=STEP_MS, help="replay: rows:ms,rows:ms,...")
    parser.add_argument("--link-ms", type=float, default=0.8, help="replay: what a round with a drafter adds")
    parser.add_argument("--vocab-size", type=int, default=49_152, help="replay")
    args = parser.parse_args()
    if args.mode == "replay" and args.recorded is None:
        parser.error("replay needs --recorded")
    if args.mode == "live" and args.data is None:
        parser.error("live needs --data")
    result = replay(args) if args.mode == "replay" else run_live(args)
    bench = {"benchmark": f"drafters {args.mode}", "k": args.k, **result, "bars": BARS}
    print("RESULT " + json.dumps(bench))


if __name__ == "__main__":
    main()
