"""Is `paceline check` right? Three planted situations, and its verdicts against a brute-force A/B of the same traffic.

    python -m benchmarks.check [--quick] [--prompts question.jsonl]

Planted, on simulated devices (8B with 1B; real tiers, real link): a good pair passes all gates; a device too small, a drafter of acceptance 0.3
and a drafter that finds nothing for one request in twelve (at a depth that may not give way) each fail exactly their gate. The A/B decodes the traffic again,
several times each way, and compares means: no task that the check lets in may be slower, none that it keeps out faster.
With `--prompts` (Spec-Bench's file) the A/B is made with the default model as well. The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.check_cli import checked, lines_of
from cluster.check_run import run_pairs
from cluster.check_words import page_lines
from cluster.simulated import simulated
from evaluation.tiers import tier
from gates.check import Check
from gates.pairs import Verdict
from gates.tail_gate import ENOUGH_FOR_P99
from gates.traffic import read_traffic, spread
from paceline.client import Client
from router.ledger.sums import AT

MIXED = {"wind": ("code", 0.85), "hill": ("rag", 0.7), "riddle": ("qa", 0.05)}
SLACK = 0.02
"""Of speed, within which an A/B says neither."""


@contextlib.asynccontextmanager
async def pair(settings: Sequence[str]) -> AsyncIterator[tuple[str, str]]:
    """Router's and verify replica's address."""
    async with (
        tier("draft_service", settings) as (draft, _),
        tier("verify_service", [*settings, f'verify.draft_endpoints=["{draft}"]']) as (verify, _),
        tier("router", [*settings, f'router.verify_endpoints=["{verify}"]', "router.holdout=0"]) as (
            router,
            _,
        ),
    ):
        async with Client(router) as client:
            while not any(one.available for one in (await client.server_info()).drafters):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield router, verify


def write_traffic(path: Path, words: Sequence[str], requests: int, tokens: int) -> None:
    rows = []
    for index in range(requests):
        word = words[index % len(words)]
        rows.append(
            {"text": f"Tell of the {word}, rider {index}", "task_type": MIXED[word][0], "max_tokens": tokens}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


async def check(
    addresses: tuple[str, str],
    traffic: Path,
    *,
    load: int,
    tokens: int,
    repeats: int,
    limit: int = 0,
    **known: float,
) -> Check:
    settings = {"sequences": 0, "device_gb": 0.0, "price": 0.0, "repeats": repeats} | known
    found, _ = await checked(
        *addresses, traffic, lines_of(traffic), [], limit, load, tokens, "", lambda _: None, settings
    )
    print("\n".join(page_lines(found)), "\n", flush=True)
    return found


@dataclass(frozen=True, slots=True)
class Situation:
    """What was planted, and what the gates should say: memory, acceptance, tail."""

    expected: tuple[Verdict, Verdict, Verdict]
    settings: tuple[str, ...]
    load: int
    requests: int
    tokens: int
    device_gb: float = 0.0


async def planted(*, quick: bool, scale: float) -> dict[str, dict[str, object]]:
    """Verdicts on each, and whether they are those expected."""
    requests, tokens, repeats = (120, 32, 1) if quick else (360, 48, 3)
    base = simulated("8b+1b")
    yes, no = Verdict.YES, Verdict.NO
    with tempfile.TemporaryDirectory() as folder:
        # P99 takes 299 requests to be shown to hold (gates/tail_gate.py); the quick run has fewer.
        held = yes if requests >= ENOUGH_FOR_P99 else Verdict.OPEN
        usual = Situation(
            (yes, yes, held), ("simulation.agreement=0.8",), load=4, requests=requests, tokens=tokens
        )
        situations = {
            "good": usual,
            "memory": replace(usual, expected=(no, yes, held), device_gb=19.6),
            # The depth gives way to the drafter, so that the tail holds: alone, since a neighbour that asks is waited for.
            "acceptance": Situation(
                (yes, no, Verdict.OPEN),
                ("simulation.agreement=0.3", "simulation.rtt_ms=2", 'verify.draft_level="0"'),
                load=1,
                requests=24 if quick else 120,
                tokens=96,
            ),
            "tail": replace(
                usual,
                expected=(yes, yes, no),
                settings=(
                    "simulation.agreement=0.9",
                    'simulation.agreement_by_word={"1 "=0.0}',
                    'verify.depth="fixed"',
                ),
            ),
        }
        found: dict[str, dict[str, object]] = {}
        for name, one in situations.items():
            traffic = Path(folder) / f"{name}.jsonl"
            write_traffic(traffic, ["wind"], one.requests, one.tokens)
            if name == "tail":
                _spoil(traffic)
            async with pair([*base, f"simulation.time_scale={scale}", *one.settings]) as addresses:
                result = await check(
                    addresses,
                    traffic,
                    load=one.load,
                    tokens=one.tokens,
                    repeats=repeats,
                    device_gb=one.device_gb,
                )
            verdicts = (result.memory.verdict, result.acceptance, result.tail.verdict)
            found[name] = {
                "verdicts": [verdict.value for verdict in verdicts],
                "as_expected": verdicts == one.expected,
                # A busy machine widens what should hold to "not shown"; what should fail must fail, and nothing else.
                "fails_exactly": [v is no for v in verdicts] == [v is no for v in one.expected],
                "same_output": result.same == result.requests,
            }
            print(name, found[name], flush=True)
    return found


def _spoil(traffic: Path) -> None:
    """One request in twelve holds the word for which the drafter finds nothing."""
    rows = [json.loads(line) for line in traffic.read_text(encoding="utf-8").splitlines()]
    for index, row in enumerate(rows):
        row["text"] = (
            f"Rider {'1 ' if index % 12 == 0 else 'two '} and the wind {'abcdefghijkl'[index % 12]}{index // 12 * 'x'}"
        )
    traffic.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


async def against_brute_force(
    settings: Sequence[str], traffic: Path, *, load: int, tokens: int, limit: int, repeats: int, times: int
) -> dict[str, object]:
    """The check's verdict by task, and what so many further runs each way say."""
    async with pair(settings) as addresses:
        started = time.monotonic()
        one = await check(addresses, traffic, load=load, tokens=tokens, repeats=repeats, limit=limit)
        seconds = time.monotonic() - started
        async with Client(addresses[0]) as client:
            types = (await client.server_info()).task_types
            with traffic.open(encoding="utf-8") as lines:
                requests = spread(read_traffic(lines, types), limit)
            sums: dict[str, list[float]] = {}
            for _ in range(times):
                runs = await run_pairs(
                    client,
                    requests,
                    load=load,
                    repeats=1,
                    max_tokens=tokens,
                    drafter="",
                    progress=lambda _: None,
                )
                for pair_of_runs in runs.pairs:
                    both = sums.setdefault(pair_of_runs.plain.group.task, [0.0, 0.0])
                    both[0] += int(pair_of_runs.plain.row[AT["decode_ns"]])
                    both[1] += int(pair_of_runs.speculative.row[AT["decode_ns"]])
    tasks = {}
    for task in one.tasks:
        plain, after = sums[task.task]
        speed = plain / after if after else 1.0
        wrong = (task.verdict is Verdict.YES and speed < 1 - SLACK) or (
            task.verdict is Verdict.NO and speed > 1 + SLACK
        )
        tasks[task.task] = {
            "requests": task.requests,
            "verdict": task.verdict.value,
            "check_speed": round(task.speed.value, 3) if task.speed else None,
            "brute_force_speed": round(speed, 3),
            "agrees": not wrong,
        }
        print(task.task, tasks[task.task], flush=True)
    return {
        "tasks": tasks,
        "check_seconds": round(seconds, 1),
        "agree": all(t["agrees"] for t in tasks.values()),
    }


async def measure(*, quick: bool, prompts: Path | None) -> dict[str, object]:
    scale = 0.4 if quick else 1.0
    result: dict[str, object] = {"planted": (found := await planted(quick=quick, scale=scale))}
    with tempfile.TemporaryDirectory() as folder:
        traffic = Path(folder) / "mixed.jsonl"
        write_traffic(traffic, list(MIXED), 60 if quick else 180, 32 if quick else 64)
        rates = ", ".join(f'"{word}"={rate}' for word, (_, rate) in MIXED.items())
        settings = [
            *simulated("8b+1b"),
            f"simulation.time_scale={scale}",
            f"simulation.agreement_by_word={{{rates}}}",
        ]
        mixed = await against_brute_force(
            settings, traffic, load=4, tokens=64, limit=0, repeats=1, times=2 if quick else 4
        )
    result["mixed"] = mixed
    bars = {
        "planted situations fail exactly their gate": all(
            bool(one["fails_exactly"]) for one in found.values()
        ),
        "a good pair passes (quick: but for its tail, which so few requests cannot show)": bool(
            found["good"]["as_expected"]
        ),
        "verdicts agree with the A/B, simulated": bool(mixed["agree"]),
    }
    if prompts is not None:
        real = await against_brute_force(
            [f"{tier_name}.server.port=0" for tier_name in ("draft", "verify", "router")],
            prompts,
            load=1,
            tokens=48 if quick else 96,
            limit=60 if quick else 280,
            repeats=1,
            times=2 if quick else 3,
        )
        result["real"] = real
        bars["verdicts agree with the A/B, default pair"] = bool(real["agree"])
        bars["check of the default pair under 12 minutes"] = float(str(real["check_seconds"])) <= 720
    result["bars"] = bars
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests on faster devices: about four minutes"
    )
    parser.add_argument("--prompts", type=Path, help="Spec-Bench, JSONL: check the default pair, too")
    arguments = parser.parse_args()
    started = time.monotonic()
    result = asyncio.run(measure(quick=arguments.quick, prompts=arguments.prompts))
    result["seconds"] = round(time.monotonic() - started, 1)
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
