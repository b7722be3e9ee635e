"""Are served tokens the same whatever happens to a request? Zero divergences is the bar, over the real protocol.

    python -m evaluation.numerics --prompts question.jsonl [--quick] [--dtype bfloat16] [--model smollm2]

Two verify replicas and a draft replica are started as processes of their own. One verify replica has room and takes prompts
whole; the other has three slots and takes prompts in pieces of 29 tokens. Every prompt is decoded plainly, alone, from
nothing; that is the answer. Then again

- speculatively, by prompt lookup and by a drafter that is always wrong, each with 1, 4 and 8 tokens a round;
- in a batch of eight with long prompts coming in beside it, plain and speculative mixed;
- from a prefix in memory; its prompt in pieces;
- interrupted after some tokens and sent again with them as committed (what the router does when a replica dies), where
  nothing of it is in memory, and where its own remains are;
- in too little memory, giving way to requests of higher priority again and again;

and token ids are compared. Prompts with odd numbers are sampled at temperature 0.8, the others greedy. A divergence is listed with
the gap between the two best choices at the position where it began. The last line is ``RESULT {json}``; the exit status is 0
iff there is none, or, on a device whose numerics are best-effort, none above the gap of rounding.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.tiers import tier
from evaluation.workload import load_spec_bench
from paceline import codec
from paceline.config import ModelConfig
from paceline.model_store import resolve_model_dir
from paceline.serving.channel import open_channel
from paceline.tokenizer import Tokenizer
from paceline.types import Plan, SamplingParams
from paceline.v1 import verify_pb2, verify_pb2_grpc

KS = (1, 4, 8)
BATCH = 8
GAP_BOUND = {"float32": 1e-4, "bfloat16": 6e-2, "w4a8": 6e-2}
PLAIN = Plan.plain("evaluation")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, how it is sampled, and how many tokens are wanted."""

    number: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What a replica committed, without what was committed before."""

    tokens: tuple[int, ...]
    cached: int
    drafted: int
    accepted: int
    preempted: bool


@dataclass(slots=True)
class Pass:
    """One way to decode all requests, and what came of it."""

    name: str
    requests: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    seconds: float = 0.0
    divergences: list[dict[str, Any]] = field(default_factory=list)


class Replica:
    """A verify replica at the other end of the protocol."""

    def __init__(self, stub: Any, info: verify_pb2.GetModelInfoResponse) -> None:
        self.stub = stub
        self.info = info

    async def decode(
        self,
        request: Request,
        *,
        plan: Plan = PLAIN,
        tenant: str = "",
        priority: int = 0,
        committed: Sequence[int] = (),
        leave_after: int = 0,
    ) -> Reply:
        """One call to its end, or until so many tokens have come."""
        message = verify_pb2.DecodeRequest(
            request_id=str(request.number),
            prompt_ids=request.prompt_ids,
            committed_ids=committed,
            sampling=codec.sampling_to_pb(request.sampling),
            max_tokens=request.max_tokens,
            stop_token_ids=self.info.eos_token_ids,
            plan=codec.plan_to_pb(plan),
            tenant=tenant,
            priority=priority,
        )
        tokens: list[int] = []
        cached = drafted = accepted = without_round = 0
        call = self.stub.Decode(message)
        async for event in call:
            match event.WhichOneof("event"):
                case "admitted":
                    cached = event.admitted.cached_tokens
                case "run":
                    tokens += event.run.token_ids
                    without_round += not event.run.HasField("round")
                    if leave_after and len(tokens) >= leave_after:
                        call.cancel()
                        break
                case "finished":
                    drafted = event.finished.speculative.num_draft_tokens
                    accepted = event.finished.speculative.num_accepted_draft_tokens
        return Reply(tuple(tokens), cached, drafted, accepted, without_round > 1)


class Comparison:
    """All requests, the answer to each, and the passes so far."""

    def __init__(self, requests: Sequence[Request], roomy: Replica, tight: Replica) -> None:
        self.requests = requests
        self.roomy, self.tight = roomy, tight
        self.answers: dict[int, tuple[int, ...]] = {}
        self.passes: list[Pass] = []

    async def run(
        self, name: str, one: Callable[[Request], Awaitable[tuple[int, Reply]]], streams: int = 1
    ) -> Pass:
        """Send every request by ``one``, so many at a time; it gives where its tokens begin, and the reply."""
        found = Pass(name)
        began = time.monotonic()
        waiting = iter(self.requests)

        async def stream() -> None:
            for request in waiting:
                first, reply = await one(request)
                self._judge(found, request, first, reply)

        await asyncio.gather(*(stream() for _ in range(streams)))
        found.seconds = round(time.monotonic() - began, 1)
        self.passes.append(found)
        acceptance = f", acceptance {found.accepted / found.drafted:.2f}" if found.drafted else ""
        cached = f", {found.cached} tokens from memory" if found.cached else ""
        equal = found.requests - len(found.divergences)
        print(
            f"{name}: {equal}/{found.requests} equal, {found.tokens} tokens{acceptance}{cached}, {found.seconds} s",
            flush=True,
        )
        return found

    def _judge(self, found: Pass, request: Request, first: int, reply: Reply) -> None:
        answer = self.answers.setdefault(request.number, reply.tokens)
        found.requests += 1
        found.tokens += len(reply.tokens)
        found.drafted += reply.drafted
        found.accepted += reply.accepted
        found.cached += reply.cached
        for index, (own, other) in enumerate(itertools.zip_longest(answer[first:], reply.tokens)):
            if own != other:
                found.divergences.append(
                    {"request": request.number, "position": first + index, "plain": own, "got": other}
                )
                return

    # --- the passes ---------------------------------------------------------------------------------------------

    async def plain(self, request: Request) -> tuple[int, Reply]:
        """The answer."""
        return 0, await self.roomy.decode(request, tenant=f"plain {request.number}")

    def speculative(self, drafter: str, k: int) -> Callable[[Request], Awaitable[tuple[int, Reply]]]:
        plan = Plan.speculative(drafter, k, "evaluation", k_fixed=True)

        async def one(request: Request) -> tuple[int, Reply]:
            tenant = f"{drafter} {k} {request.number}"
            return 0, await self.roomy.decode(request, plan=plan, tenant=tenant)

        return one

    async def batched(self) -> None:
        """Eight at a time, every other one speculative, while one long prompt after the other comes in."""
        over = asyncio.Event()

        async def prompts() -> None:
            text = [token for request in self.requests for token in request.prompt_ids]
            for number in itertools.count():
                if over.is_set():
                    return
                ids = tuple((text[number * 97 :] + text)[:900])
                long = Request(-1, ids, SamplingParams(temperature=0.0), 2)
                await self.roomy.decode(long, tenant=f"long {number}")

        async def one(request: Request) -> tuple[int, Reply]:
            plan = (
                PLAIN if request.number // 2 % 2 else Plan.speculative("ngram", 4, "evaluation", k_fixed=True)
            )
            return 0, await self.roomy.decode(request, plan=plan, tenant=f"batch {request.number}")

        beside = asyncio.create_task(prompts())
        await self.run(f"in a batch of {BATCH}, beside prompts", one, BATCH)
        over.set()
        await beside

    async def warm(self, request: Request) -> tuple[int, Reply]:
        """The prompt has been there before."""
        tenant = f"warm {request.number}"
        await self.roomy.decode(request, tenant=tenant, leave_after=1)
        return 0, await self.roomy.decode(request, tenant=tenant)

    async def in_pieces(self, request: Request) -> tuple[int, Reply]:
        """The tight replica's chunks."""
        return 0, await self.tight.decode(request, tenant=f"pieces {request.number}")

    async def elsewhere(self, request: Request) -> tuple[int, Reply]:
        """A committed prefix comes to a replica that has never seen the request."""
        first = self._cut(request)
        committed = self.answers[request.number][:first]
        tenant = f"elsewhere {request.number}"
        return first, await self.tight.decode(request, tenant=tenant, committed=committed)

    async def back_again(self, request: Request) -> tuple[int, Reply]:
        """Interrupted, and sent again to where its remains are, speculatively now."""
        tenant = f"back {request.number}"
        head = await self.roomy.decode(request, tenant=tenant, leave_after=self._cut(request))
        if len(head.tokens) >= len(self.answers[request.number]):
            return 0, head
        plan = Plan.speculative("ngram", 4, "evaluation", k_fixed=True)
        rest = await self.roomy.decode(request, plan=plan, tenant=tenant, committed=head.tokens)
        tokens = head.tokens + rest.tokens
        return 0, Reply(tokens, rest.cached, rest.drafted, rest.accepted, rest.preempted)

    def _cut(self, request: Request) -> int:
        """After how many tokens the request is interrupted: any number, always the same."""
        return request.number * 37 % max(1, len(self.answers[request.number]) - 1)

    async def giving_way(self) -> int:
        """Three low streams and one urgent request after the other in three slots; gives how often memory was taken."""
        over = asyncio.Event()

        async def urgent() -> None:
            for number in itertools.count():
                if over.is_set():
                    return
                request = self.requests[number % len(self.requests)]
                short = Request(-1, request.prompt_ids[:40], request.sampling, 4)
                await self.tight.decode(short, tenant="urgent", priority=1)
                await asyncio.sleep(0.15)

        async def one(request: Request) -> tuple[int, Reply]:
            plan = PLAIN if request.number % 3 else Plan.speculative("ngram", 4, "evaluation", k_fixed=True)
            return 0, await self.tight.decode(request, plan=plan, tenant=f"low {request.number}")

        before = (await self.tight.stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).preemptions
        beside = asyncio.create_task(urgent())
        await self.run("giving way in three slots", one, 3)
        over.set()
        await beside
        after = (await self.tight.stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).preemptions
        return int(after - before)


def load_requests(args: argparse.Namespace) -> list[Request]:
    """The prompts, categories in turn."""
    tokenizer = Tokenizer.load(resolve_model_dir(args.model))
    prompts = load_spec_bench(args.prompts, -(-args.limit // 6))[: args.limit]
    return [
        Request(
            number,
            tuple(tokenizer.encode_chat([("user", prompt.text)])),
            SamplingParams(temperature=0.8 if number % 2 else 0.0, seed=number),
            args.max_tokens,
        )
        for number, prompt in enumerate(prompts)
    ]


async def compare(args: argparse.Namespace) -> int:
    """All passes; gives the exit status."""
    requests = load_requests(args)
    model = [f'model.name="{args.model}"', f'model.dtype="{args.dtype}"']
    async with AsyncExitStack() as stack:
        drafters = ["draft.drafters.ngram={kind='ngram'}", "draft.drafters.random={kind='random'}"]
        draft, _ = await stack.enter_async_context(tier("draft_service", [*model, *drafters]))
        patient = ["verify.draft_wait_s=60.0", "verify.draft_wait_least_s=60.0"]
        shared = [*model, *drafters, f'verify.draft_endpoints=["{draft}"]', *patient]
        roomy = await _replica(stack, [*shared, "verify.kv_slots=16", "verify.prefill_chunk=2048"])
        tight = await _replica(stack, [*shared, "verify.kv_slots=3", "verify.prefill_chunk=29"])
        info = roomy.info.model
        print(
            f"{info.name} {info.dtype}, {info.runner} runner ({info.runner_reason}), numerics {info.numerics}; "
            f"{len(requests)} prompts x {args.max_tokens} tokens"
        )
        work = Comparison(requests, roomy, tight)
        await work.run("plain, alone, cold, whole: the answer", work.plain)
        for drafter, k in itertools.product(("ngram", "random"), KS):
            await work.run(f"{drafter} k={k}", work.speculative(drafter, k), args.streams)
        await work.batched()
        await work.run("warm prefix", work.warm, args.streams)
        await work.run("prompt in pieces of 29", work.in_pieces, args.streams)
        await work.run("committed prefix on another replica", work.elsewhere, args.streams)
        await work.run("interrupted and sent again", work.back_again, args.streams)
        preemptions = await work.giving_way()
        print(f"memory was taken {preemptions} times")
    divergences = [d | {"pass": one.name} for one in work.passes for d in one.divergences]
    for divergence in divergences:
        divergence["gap"] = _gap(args, requests[divergence["request"]], work, divergence["position"])
        print("divergence:", divergence)
    bound = GAP_BOUND[info.dtype] if info.numerics == "best-effort" else 0.0
    bad = [d for d in divergences if not d["gap"] < bound]
    result = {
        "benchmark": "numerics",
        "quick": args.quick,
        "model": info.name,
        "dtype": info.dtype,
        "kernels": info.runner_reason,
        "numerics": info.numerics,
        "prompts": len(requests),
        "max_tokens": args.max_tokens,
        "streams": args.streams,
        "passes": {
            one.name: {"requests": one.requests, "tokens": one.tokens, "divergences": len(one.divergences)}
            for one in work.passes
        },
        "preemptions": preemptions,
        "divergences": divergences,
        "bars": {
            "divergences": {"value": len(bad), "sign": "<=", "bar": 0},
            "preemptions": {"value": preemptions, "sign": ">=", "bar": 1},
        },
    }
    print("RESULT " + json.dumps(result))
    return 1 if bad or not preemptions else 0


async def _replica(stack: AsyncExitStack, settings: Sequence[str]) -> Replica:
    address, _ = await stack.enter_async_context(tier("verify_service", settings))
    channel = await stack.enter_async_context(open_channel(address))
    stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
    async with asyncio.timeout(30):
        while True:
            info = await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())
            if {drafter.name for drafter in info.drafters if drafter.available} >= {"ngram", "random"}:
                return Replica(stub, info)
            await asyncio.sleep(0.1)


def _gap(args: argparse.Namespace, request: Request, work: Comparison, position: int) -> float:
    from evaluation.gap import choice_gap

    output = work.answers[request.number][:position]
    model = ModelConfig.model_validate({"name": args.model, "dtype": args.dtype})
    return choice_gap(model, request.prompt_ids, output, request.sampling)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench questions, JSONL")
    parser.add_argument("--quick", action="store_true", help="12 prompts x 24 tokens")
    parser.add_argument("--limit", type=int, default=0, help="prompts; default 200")
    parser.add_argument("--max-tokens", type=int, default=0, help="tokens of each; default 128")
    parser.add_argument(
        "--streams", type=int, default=1, help="requests at a time in all passes but the first; faster"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    args.limit = args.limit or (12 if args.quick else 200)
    args.max_tokens = args.max_tokens or (24 if args.quick else 128)
    sys.exit(asyncio.run(compare(args)))


if __name__ == "__main__":
    main()
