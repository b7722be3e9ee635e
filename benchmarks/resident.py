"""Is memory what was promised? Resident set of a verify replica against weights + KV budget + 600 MB.

    python -m benchmarks.resident [--quick] [--model smollm2] [--slots 4] [--context 1024]

The replica is a process of its own, measured when it is loaded and again when requests have filled every slot to its end. Weights
count as they lie in memory (blocks of four bits as blocks), which the same model loaded here afterwards tells; the KV
budget is slots x context, whether a page has been touched or not, and is kept small so that the bar means something. Whether
memory stays flat is asked by ``benchmarks.soak``. The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import json
from typing import Any

from benchmarks.soak import resident_mb
from evaluation.tiers import tier
from paceline import codec
from paceline.config import ModelConfig
from paceline.engine import load_runner
from paceline.serving.channel import open_channel
from paceline.types import Plan, SamplingParams
from paceline.v1 import verify_pb2, verify_pb2_grpc

ALLOWANCE_MB = 600


async def fill(stub: Any, number: int, prompt: int, tokens: int, vocab: int) -> None:
    request = verify_pb2.DecodeRequest(
        request_id=str(number),
        prompt_ids=[3 + (number * 104729 + i * 7919) % (vocab - 3) for i in range(prompt)],
        sampling=codec.sampling_to_pb(SamplingParams(temperature=0.8, seed=number)),
        max_tokens=tokens,
        plan=codec.plan_to_pb(Plan.plain("benchmark")),
        tenant=str(number),
    )
    async for _ in stub.Decode(request):
        pass


async def measure(args: argparse.Namespace) -> tuple[float, float]:
    """MB when loaded, MB when every slot has been full."""
    settings = [
        f'model.name="{args.model}"',
        f"verify.kv_slots={args.slots}",
        f"verify.max_context={args.context}",
    ]
    async with tier("verify_service", settings) as (address, pid), open_channel(address) as channel:
        loaded = resident_mb(pid)
        stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
        info = (await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).model
        tokens = 16
        rounds = 1 if args.quick else 4
        for first in range(0, rounds * args.slots, args.slots):
            numbers = range(first, first + args.slots)
            await asyncio.gather(
                *(fill(stub, n, args.context - tokens, tokens, info.vocab_size) for n in numbers)
            )
        return loaded, resident_mb(pid)


def weights_mb(model: str) -> tuple[float, int]:
    """MB of the weights as the runner holds them, and bytes of KV for one token."""
    runner: Any = load_runner(ModelConfig(name=model), kv_slots=1, max_context=64)
    body = getattr(runner, "_body", None)
    nbytes = getattr(body, "weight_bytes", 0)
    if not nbytes:  # the reference runner: a module
        nbytes = sum(weight.nbytes for weight in runner._model.parameters())
    return nbytes / 2**20, runner.kv.nbytes // runner.kv.stride


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every slot filled once instead of four times")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    loaded, under_traffic = asyncio.run(measure(args))
    weights, token_bytes = weights_mb(args.model)
    kv = args.slots * args.context * token_bytes / 2**20
    figures = {
        "loaded_mb": loaded,
        "under_traffic_mb": under_traffic,
        "weights_mb": weights,
        "kv_budget_mb": kv,
    }
    print({name: round(value) for name, value in figures.items()})
    bars = {
        "loaded, beyond weights, MB": loaded
        - weights,  # no page of KV is touched yet, but for the self-check
        "under traffic, beyond weights and KV budget, MB": under_traffic - weights - kv,
    }
    for text, value in bars.items():
        print(f"{'met ' if value <= ALLOWANCE_MB else 'MISSED'} {text}: {value:.0f} (<= {ALLOWANCE_MB})")
    result = {
        "benchmark": "resident",
        "quick": args.quick,
        "model": args.model,
        "slots": args.slots,
        "context": args.context,
        **{name: round(value, 1) for name, value in figures.items()},
        "bars": {
            text: {"value": round(value, 1), "sign": "<=", "bar": ALLOWANCE_MB}
            for text, value in bars.items()
        },
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
