"""What a stream loses while its drafter is late by 200 ms, hangs, or is dead, and how soon it drafts again. Simulated devices.

    python -m benchmarks.link_faults [--quick]

8B with 1B (draft 6 ms a token, verify 28 ms), k = 4 asked for in every round, real processes and their real link. A stream
runs; then every message takes 200 ms longer, or the draft process is stopped (SIGSTOP) or killed; then it is well again
(or started anew on its port). Gaps between tokens while the fault lasts are compared with those of a plain stream that
another process decodes at the same time, so that a busy machine disturbs both; tokens too. The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.link import AGREEMENT, PAIR, SPECULATIVE, K, Tier, tier, until_linked
from cluster.simulated import simulated
from paceline import codec
from paceline.model_store import resolve_model_dir
from paceline.serving.channel import open_channel
from paceline.serving.delay_line import DelayLine
from paceline.tokenizer import Tokenizer
from paceline.types import Plan, SamplingParams
from paceline.v1 import common_pb2, verify_pb2, verify_pb2_grpc

FAULTS = ("late", "hung", "killed")
LATE_S = 0.2
BAR = 1.10
BACK_S = 5.0


@dataclass(slots=True)
class Stream:
    """One request as it comes: each run of tokens with its time."""

    at: list[float] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    in_vain: list[tuple[float, float]] = field(default_factory=list)
    """When a round ended that had waited for a block which did not come, and for how long it had waited."""

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Between consecutive tokens that came within; tokens of one run come together."""
        found = []
        for before, now, count in zip(self.at[:-1], self.at[1:], self.runs[1:], strict=True):
            if begin < now <= end:
                found += [1e3 * (now - before)] + [0.0] * (count - 1)
        return found

    def first_drafted(self, since: float) -> float | None:
        """When the first run with a verified block came."""
        rounds = zip(self.at, self.drafted, strict=True)
        return next((at for at, drafted in rounds if at > since and drafted), None)


@dataclass(slots=True)
class World:
    """A verify process, a draft process and the wire between them, and a verify process that has no drafter."""

    stub: Any
    plain: Any
    line: DelayLine
    draft: Tier
    draft_settings: list[str]

    def begin(self, fault: str) -> None:
        """From now on."""
        if fault == "late":
            self.line.rtt_s += LATE_S
        else:
            self.draft.process.send_signal(signal.SIGSTOP if fault == "hung" else signal.SIGKILL)

    def end(self, fault: str, stack: contextlib.ExitStack) -> None:
        """Well again; blocks while a new process starts."""
        if fault == "late":
            self.line.rtt_s -= LATE_S
        elif fault == "hung":
            self.draft.process.send_signal(signal.SIGCONT)
        else:
            port = self.draft.address().rsplit(":", 1)[1]
            self.draft = stack.enter_context(
                tier("draft_service", [*self.draft_settings, f"draft.server.port={port}"])
            )
            self.draft.address()


@contextlib.asynccontextmanager
async def world(level: int) -> AsyncIterator[tuple[World, contextlib.ExitStack]]:
    common = [*simulated(PAIR, k=K), f"simulation.agreement={AGREEMENT}"]
    with contextlib.ExitStack() as stack:
        draft = stack.enter_context(tier("draft_service", [*common, "draft.server.port=0"]))
        line = stack.enter_context(DelayLine(await asyncio.to_thread(draft.address), rtt_s=0.0))
        own = [f'verify.draft_endpoints=["{line.address}"]', f'verify.draft_level="{level}"']
        verifiers = [
            stack.enter_context(tier("verify_service", ["verify.server.port=0", *common, *more]))
            for more in (own, [])
        ]
        async with (
            open_channel(await asyncio.to_thread(verifiers[0].address)) as channel,
            open_channel(await asyncio.to_thread(verifiers[1].address)) as plain_channel,
        ):
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            await until_linked(stub)
            yield World(stub, verify_pb2_grpc.VerifyServiceStub(plain_channel), line, draft, common), stack


async def follow(stub: Any, plan: Plan, stream: Stream, done: asyncio.Event) -> None:
    """Fill ``stream`` until ``done``."""
    tokenizer = Tokenizer.load(resolve_model_dir("simulated"))
    call = stub.Decode(
        verify_pb2.DecodeRequest(
            request_id="faults",
            prompt_ids=tokenizer.encode("The riders take turns"),
            sampling=codec.sampling_to_pb(SamplingParams(temperature=0.7, seed=11)),
            max_tokens=1900,
            plan=codec.plan_to_pb(plan),
        )
    )
    async for event in call:
        if event.HasField("run"):
            stream.at.append(time.monotonic())
            stream.runs.append(len(event.run.token_ids))
            stream.drafted.append(event.run.round.drafted)
            stream.token_ids += event.run.token_ids
            if event.run.round.outcome == common_pb2.PROPOSAL_OUTCOME_LATE:
                stream.in_vain.append((stream.at[-1], event.run.round.wait_s))
        if done.is_set():
            break
    call.cancel()


async def faulty(one: World, stack: contextlib.ExitStack, fault: str, seconds: float) -> dict[str, Any]:
    """A stream that speculates, then the fault, then until it speculates again."""
    stream, plain, done = Stream(), Stream(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow(one.stub, SPECULATIVE, stream, done))
        tasks.create_task(follow(one.plain, Plan.plain("benchmark"), plain, done))
        while sum(map(bool, stream.drafted)) < 40:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        began = time.monotonic()
        one.begin(fault)
        await asyncio.sleep(seconds)
        ended = time.monotonic()
        await asyncio.to_thread(one.end, fault, stack)
        back, used = time.monotonic(), None
        while used is None and time.monotonic() < back + 2 * BACK_S:
            await asyncio.sleep(0.02)
            used = stream.first_drafted(back)
        done.set()
    gaps, plain_gaps = stream.gaps_ms(began, ended), plain.gaps_ms(began, ended)
    length = min(len(stream.token_ids), len(plain.token_ids))
    return {
        "p99_over_plain": round(p99(gaps) / p99(plain_gaps), 3),
        "total_over_plain": round(len(plain_gaps) / len(gaps), 3),
        "back_s": None if used is None else round(used - back, 2),
        "waited_in_vain_ms": [round(1e3 * s, 1) for at, s in stream.in_vain if began < at <= ended],
        "longest_ms": [round(ms) for ms in sorted(gaps)[-4:]],
        "longest_plain_ms": [round(ms) for ms in sorted(plain_gaps)[-4:]],
        "same_tokens": stream.token_ids[:length] == plain.token_ids[:length],
    }


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


async def measure(*, quick: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"pair": PAIR, "k": K, "agreement": AGREEMENT}
    bars: dict[str, bool] = {}
    seconds = 9.0 if quick else 25.0
    print(
        "level  fault   p99 gap, time a token over plain  longest gaps, plain's, ms    back after, s; waits in vain, ms"
    )
    for level in (0, 2) if quick else (0, 1, 2):
        async with world(level) as (one, stack):
            for fault in FAULTS:
                found = await faulty(one, stack, fault, seconds)
                longest, plain = (
                    " ".join(map(str, found[name])) for name in ("longest_ms", "longest_plain_ms")
                )
                print(
                    f"{level:<6} {fault:<7} {found['p99_over_plain']:8.3f} {found['total_over_plain']:8.3f}  "
                    f"{longest:>26}, {plain:<16} {found['back_s']}; {found['waited_in_vain_ms']}",
                    flush=True,
                )
                name = f"level {level}, {fault}"
                result[name] = found
                worst = max(found["p99_over_plain"], found["total_over_plain"])
                bars[f"{name}: p99 and total at most {BAR} x plain"] = worst <= BAR
                bars[f"{name}: tokens as plain"] = found["same_tokens"]
                bars[f"{name}: drafts again within {BACK_S:g} s"] = (
                    found["back_s"] is not None and found["back_s"] <= BACK_S
                )
    result["bars"] = bars
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="levels 0 and 2, 9 s a fault: under two minutes")
    arguments = parser.parse_args()
    started = time.monotonic()
    result = asyncio.run(measure(quick=arguments.quick))
    result["seconds"] = round(time.monotonic() - started, 1)
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
