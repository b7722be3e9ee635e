"""Does a long prompt make running streams stutter? Inter-token gaps of four streams while 4,096 prompt tokens come in.

    python -m benchmarks.gap [--quick] [--model smollm2] [--prompt 4096] [--streams 4]

A verify replica is started as a process of its own, with room for 8,192 tokens a sequence (the default is 2,048). Gaps are
taken at the client, over gRPC: without the prompt, before and after it, which gives the median, and from the moment the prompt is
sent until its first token is there. The streams' own contexts grow by a thousand tokens meanwhile, and a step with them: a gap is held
against the median as it stands at that length, on the line between before and after. Beside the gaps stands what the prompt takes
alone. The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import time
from typing import Any

import numpy as np

from evaluation.tiers import tier
from paceline import codec
from paceline.serving.channel import open_channel
from paceline.types import Plan, SamplingParams
from paceline.v1 import verify_pb2, verify_pb2_grpc

BAR = 2.5
CONTEXT = 8192


def decode_request(prompt: list[int], max_tokens: int, tenant: str) -> verify_pb2.DecodeRequest:
    return verify_pb2.DecodeRequest(
        request_id=tenant,
        prompt_ids=prompt,
        sampling=codec.sampling_to_pb(SamplingParams(temperature=0.0)),
        max_tokens=max_tokens,
        plan=codec.plan_to_pb(Plan.plain("benchmark")),
        tenant=tenant,
    )


async def arrivals(stub: Any, prompt: list[int], max_tokens: int, tenant: str, times: list[float]) -> None:
    """Decode, and note when each token came; a token id does not end the output."""
    async for event in stub.Decode(decode_request(prompt, max_tokens, tenant)):
        if event.HasField("run"):
            times.extend([time.monotonic()] * len(event.run.token_ids))


async def time_of_prompt(stub: Any, prompt: list[int], tenant: str) -> float:
    began = time.monotonic()
    await arrivals(stub, prompt, 1, tenant, [])
    return time.monotonic() - began


async def until(streams: list[list[float]], tokens: int) -> None:
    """So many tokens of each have come."""
    while min(map(len, streams)) < tokens:  # noqa: ASYNC110  # a look now and then disturbs less than a wake-up a token
        await asyncio.sleep(0.05)


def gaps_within(streams: list[list[float]], begin: float, end: float) -> tuple[list[float], list[int]]:
    """Gaps that end between the two times, and how many tokens the stream had then."""
    found = [
        (after - before, at)
        for times in streams
        for at, (before, after) in enumerate(itertools.pairwise(times), start=1)
        if begin < after <= end
    ]
    return [gap for gap, _ in found], [at for _, at in found]


async def measure(stub: Any, args: argparse.Namespace, vocab: int, repeat: int) -> dict[str, float]:
    """One run: streams alone for a while, then with the prompt."""

    def ids(length: int, key: int) -> list[int]:
        return [3 + (i * 7919 + key * 104729) % (vocab - 3) for i in range(length)]

    alone_s = await time_of_prompt(stub, ids(args.prompt, 1000 + repeat), f"alone {repeat}")
    streams: list[list[float]] = [[] for _ in range(args.streams)]
    tasks = [
        asyncio.create_task(
            arrivals(stub, ids(100 + number, number), CONTEXT - 200, f"stream {repeat} {number}", times)
        )
        for number, times in enumerate(streams)
    ]
    await until(streams, 20)
    begin = time.monotonic()
    await until(streams, min(map(len, streams)) + args.tokens)
    sent = time.monotonic()
    beside_s = await time_of_prompt(stub, ids(args.prompt, 2000 + repeat), f"beside {repeat}")
    done = time.monotonic()
    await until(streams, min(map(len, streams)) + args.tokens)
    end = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    without, at_before = gaps_within(streams, begin, sent)
    beside, at = gaps_within(streams, sent, done)
    later, at_after = gaps_within(streams, done, end)
    before_s, after_s = statistics.median(without), statistics.median(later)
    first, last = statistics.median(at_before), statistics.median(at_after)
    usual = before_s + (after_s - before_s) * (np.array(at) - first) / (last - first)
    ratios = np.array(beside) / usual
    return {
        "before_ms": 1e3 * before_s,
        "after_ms": 1e3 * after_s,
        "tokens_between": last - first,
        "without_p99": float(np.percentile(without, 99)) / before_s,
        "without_worst": max(without) / before_s,
        "fastest_tenth": float(np.percentile(ratios, 5)),  # steps without prompt tokens, in the same minute
        "median": float(np.median(ratios)),
        "p99": float(np.percentile(ratios, 99)),
        "worst": float(ratios.max()),
        "gaps": len(beside),
        "prompt_alone_s": alone_s,
        "prompt_beside_s": beside_s,
    }


async def run(args: argparse.Namespace) -> None:
    settings = [
        f'model.name="{args.model}"',
        f"verify.kv_slots={args.streams + 2}",
        f"verify.max_context={CONTEXT}",
    ]
    async with tier("verify_service", settings) as (address, _), open_channel(address) as channel:
        stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
        info = (await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).model
        print(
            f"{info.name} {info.dtype}, {info.runner}; {args.streams} streams, a prompt of {args.prompt} tokens, "
            f"room for {info.max_context} tokens; gaps over the streams' median without the prompt"
        )
        runs = []
        for repeat in range(args.repeats):
            runs.append(await measure(stub, args, info.vocab_size, repeat))
            print({name: round(value, 2) for name, value in runs[-1].items()}, flush=True)
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    bars = {
        "p99 gap over the median": {"value": found["p99"], "sign": "<=", "bar": BAR},
        "worst gap over the median, of the calmest run": {
            "value": min(run["worst"] for run in runs),
            "sign": "<=",
            "bar": BAR,
        },
    }
    for text, bar in bars.items():
        print(f"{'met ' if bar['value'] <= bar['bar'] else 'MISSED'} {text}: {bar['value']:.2f} (<= {BAR})")
    result = {
        "benchmark": "gap",
        "quick": args.quick,
        "model": info.name,
        "max_context": info.max_context,
        "prompt": args.prompt,
        "streams": args.streams,
        "runs": runs,
        "bars": bars,
    }
    print("RESULT " + json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one run instead of five")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream before the prompt")
    args = parser.parse_args()
    args.repeats = 1 if args.quick else 5
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
