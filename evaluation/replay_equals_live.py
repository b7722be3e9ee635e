"""Does a replay give the rounds of a live run, token count by token count? Zero differences is the bar, on the real tiers.

    python -m evaluation.replay_equals_live --prompts question.jsonl [--quick]

Router, verify and draft tier are started as processes of their own. Real prompts are decoded with one drafter and k, one
after the other, at temperatures 0 and 0.8, and recorded. Then the same requests are decoded live with each of several other
drafters and ks, recorded again, and replayed from the *first* recording alone, by drafters built afresh in this process. Of every
round the tokens drafted, accepted and committed are compared, and how its block came.

Requests that name k are held to it, and ``verify.draft_wait_least_s`` makes a round wait for its drafter however busy the
machine is, so that time decides nothing; rounds without an answer all the same are counted, and count as different. A
cascade is not among these drafters: it decides by time, and so does the controller; ``--estimates`` shows how near a replay
comes to them. The last line is ``RESULT {json}``; the exit status is 0 iff all are equal.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from draft_service.drafters import build_drafters
from evaluation.direct_link import VirtualClock
from evaluation.recordings import Recorded, Recording, load_recording
from evaluation.replay import Replay, always
from evaluation.replay_table import Figures, only, table
from evaluation.tiers import tier
from evaluation.workload import Prompt, load_spec_bench
from paceline.client import Client, generate_request
from paceline.config import PacelineConfig, load_config
from paceline.errors import PeerLostError
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import Law, Mode
from verify_service.beside import build_beside

RECORDED = ("ngram", 4)
LIVE = (("distilled", 3), ("suffix", 6), ("ngram", 8), ("far", 8), ("self", 5), ("random", 2))
DRAFTERS = {
    "ngram": "{kind='ngram'}",
    "suffix": "{kind='suffix'}",
    "far": "{kind='suffix', place='draft'}",
    "distilled": "{kind='distilled'}",
    "self": "{kind='model'}",
    "random": "{kind='random'}",
    "pool": "{kind='suffix'}",
    "mix": "{kind='cascade', members=['pool', 'distilled']}",
}
ESTIMATED = ("distilled", "mix")
TEMPERATURES = (0.0, 0.8)
TENANTS = 2


async def serve(
    address: str, prompts: Sequence[Prompt], drafter: str, k: int | None, max_tokens: int
) -> None:
    """Every prompt at every temperature, one after the other: a drafter that remembers sees them in this order."""
    async with Client(address) as client:
        for temperature in TEMPERATURES:
            for number, prompt in enumerate(prompts):
                request = generate_request(
                    messages=[("user", prompt.text)],
                    temperature=temperature,
                    seed=int(prompt.id),
                    max_tokens=max_tokens,
                    mode=Mode.SPECULATIVE,
                    drafter=drafter,
                    k=k,
                    law=Law.COUPLED,
                    tenant=f"tenant {number % TENANTS}",
                )
                async for _ in client.generate(request):
                    pass


async def serve_all(args: argparse.Namespace, settings: Sequence[str], prompts: Sequence[Prompt]) -> None:
    """The pass that is replayed, then those it is compared with."""
    async with AsyncExitStack() as stack:
        draft, _ = await stack.enter_async_context(tier("draft_service", settings))
        verify, _ = await stack.enter_async_context(
            tier("verify_service", [*settings, f'verify.draft_endpoints=["{draft}"]'])
        )
        router, _ = await stack.enter_async_context(
            tier("router", [*settings, f'router.verify_endpoints=["{verify}"]'])
        )
        await _until_linked(router)
        estimated = [(drafter, None) for drafter in ESTIMATED] if args.estimates else []
        for drafter, k in (RECORDED, *LIVE, *estimated):
            began = time.monotonic()
            await serve(router, prompts, drafter, k, args.max_tokens)
            depth = "by the controller" if k is None else f"k={k}"
            print(f"served by {drafter}, {depth}: {time.monotonic() - began:.0f} s", flush=True)


async def _until_linked(router: str) -> None:
    async with Client(router) as client, asyncio.timeout(60):
        while True:
            with suppress(PeerLostError):  # on a busy machine the first connection may take several tries
                info = await client.server_info()
                if sum(one.available for one in info.drafters) == len(DRAFTERS):
                    return
            await asyncio.sleep(0.2)


def compare(
    config: PacelineConfig, recording: Recording, live: Sequence[Recorded], drafter: str, k: int
) -> dict[str, Any]:
    """One drafter and k: replayed, and held against the live run."""
    tokenizer = Tokenizer.load(resolve_model_dir(config.model.name))
    own = only(config, [drafter])
    replayed = Replay(
        recording,
        build_drafters(own, tokenizer),
        always(drafter, k, k_fixed=True),
        beside=build_beside(own.draft, tokenizer.fingerprint),
    ).run()
    assert len(replayed) == len(live) == len(recording.requests), "one to one"
    different = []
    for number, (recorded, again, real) in enumerate(zip(recording.requests, replayed, live, strict=True)):
        if again.rounds != real.rounds or recorded.output_ids != real.output_ids:
            at = next(
                (at for at, (a, b) in enumerate(zip(again.rounds, real.rounds, strict=False)) if a != b), -1
            )
            different.append(
                {
                    "request": number,
                    "same_output": recorded.output_ids == real.output_ids,
                    "round": at,
                    "replayed": str(again.rounds[at]),
                    "live": str(real.rounds[at]),
                }
            )
    outcomes = Counter(one.outcome for request in live for one in request.rounds)
    rounds = sum(len(request.rounds) for request in live)
    tokens = sum(one.committed for request in live for one in request.rounds)
    drafted = sum(one.drafted for request in live for one in request.rounds)
    accepted = sum(one.accepted for request in live for one in request.rounds)
    print(
        f"{drafter}, k={k}: {len(live) - len(different)}/{len(live)} requests equal, {rounds} rounds, "
        f"{tokens / rounds:.3f} tokens a round, acceptance {accepted / drafted if drafted else 0:.3f}, {dict(outcomes)}",
        flush=True,
    )
    for one in different[:5]:
        print("  different:", one)
    return {
        "drafter": drafter,
        "k": k,
        "requests": len(live),
        "equal": len(live) - len(different),
        "rounds": rounds,
        "tokens_per_round": round(tokens / rounds, 4),
        "drafted": drafted,
        "accepted": accepted,
        "without_an_answer": outcomes["late"] + outcomes["unavailable"],
        "different": different,
    }


def estimate(
    config: PacelineConfig, recording: Recording, live: Sequence[Recorded], drafter: str
) -> dict[str, Any]:
    """A drafter under the controller: how near the replay comes, whose time is made of recorded costs."""
    tokenizer = Tokenizer.load(resolve_model_dir(config.model.name))
    own, clock = only(config, [drafter]), VirtualClock()
    replayed = Replay(
        recording,
        build_drafters(own, tokenizer, clock=clock),
        always(drafter, live[0].plan.k_max, k_fixed=False),
        beside=build_beside(own.draft, tokenizer.fingerprint),
        clock=clock,
    ).run()
    figures = {
        name: Figures.of(name, [one.rounds for one in requests])
        for name, requests in (("live", live), ("replayed", replayed))
    }
    print(f"{drafter}, by the controller (an estimate):")
    for line in table(list(figures.values())):
        print(f"  {line}", flush=True)
    return {"drafter": drafter, **{name: one.to_json() for name, one in figures.items()}}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench questions, JSONL")
    parser.add_argument("--quick", action="store_true", help="8 prompts x 24 tokens")
    parser.add_argument("--limit", type=int, default=0, help="prompts; default 50")
    parser.add_argument("--max-tokens", type=int, default=0, help="tokens of each; default 64")
    parser.add_argument(
        "--estimates",
        action="store_true",
        help="also drafters under the controller, live and replayed: near, not equal",
    )
    parser.add_argument(
        "--keep", type=Path, help="directory for the recordings, which are kept; default: none is"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    args.limit = args.limit or (8 if args.quick else 50)
    args.max_tokens = args.max_tokens or (24 if args.quick else 64)
    prompts = load_spec_bench(args.prompts, -(-args.limit // 6))[: args.limit]
    with tempfile.TemporaryDirectory() if args.keep is None else nullcontext(args.keep) as directory:
        settings = [
            f'model.name="{args.model}"',
            f'model.dtype="{args.dtype}"',
            "model.threads=1",
            "verify.draft_wait_s=120.0",
            "verify.draft_wait_least_s=120.0",
            f'verify.records.dir="{directory}"',
            "verify.records.token_ids=true",
            *(f"draft.drafters.{name}={entry}" for name, entry in DRAFTERS.items()),
        ]
        asyncio.run(serve_all(args, settings, prompts))
        everything = load_recording([Path(directory)])
    passes = {
        (drafter, k): [
            one
            for one in everything.requests
            if (one.plan.drafter, one.plan.k_max, one.plan.k_fixed) == (drafter, k, True)
        ]
        for drafter, k in (RECORDED, *LIVE)
    }
    recording = replace(everything, requests=tuple(passes[RECORDED]))
    config = load_config(None, settings)
    rows = [compare(config, recording, passes[drafter, k], drafter, k) for drafter, k in LIVE]
    under_controller = {
        drafter: [one for one in everything.requests if one.plan.drafter == drafter and not one.plan.k_fixed]
        for drafter in ESTIMATED
    }
    estimates = [
        estimate(config, recording, requests, drafter)
        for drafter, requests in under_controller.items()
        if requests
    ]
    unequal = sum(row["requests"] - row["equal"] for row in rows)
    result = {
        "benchmark": "replay_equals_live",
        "quick": args.quick,
        "model": args.model,
        "prompts": len(prompts),
        "temperatures": TEMPERATURES,
        "max_tokens": args.max_tokens,
        "recorded": {"drafter": RECORDED[0], "k": RECORDED[1], "requests": len(recording.requests)},
        "rows": rows,
        "estimates": estimates,
        "bars": {"requests_that_differ": {"value": unequal, "sign": "<=", "bar": 0}},
    }
    print("RESULT " + json.dumps(result))
    sys.exit(1 if unequal else 0)


if __name__ == "__main__":
    main()
