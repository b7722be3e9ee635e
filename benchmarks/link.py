"""What the link hides and what it costs, on simulated devices: speed by level of drafting ahead, hit rates, its own work.

    python -m benchmarks.link [--quick] [--plot docs/link_levels.png]

Two real processes (draft and verify tier) and their real link; only the forwards are simulated: 8B with 1B, draft 6 ms a
token, verify 28 ms, k = 4, agreement 0.8. All levels decode the same positions with the same guesses (both are keyed), so
a ratio of times is a ratio of speeds. They take turns, and the time of a round is the mean of its kind (level, hit or not) without the slowest
twentieth, weighed by how often it occurs, so that a busy moment of the machine hits all alike and counts little. ``--quick``
leaves out the round trips beyond the first, unless a plot is wanted. ``--slower 5`` lets all devices and wires take five
times as long and divides what is measured by that, so that a busy machine counts a fifth. The last line is
``RESULT {json}``.
"""

import argparse
import asyncio
import contextlib
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from benchmarks.lookahead import hit_rates
from cluster.simulated import simulated
from paceline import codec
from paceline.config import SimulationConfig
from paceline.model_store import resolve_model_dir
from paceline.serving.channel import open_channel
from paceline.simulation import pair_of
from paceline.tokenizer import Tokenizer
from paceline.types import Plan, RoundRecord, SamplingParams
from paceline.v1 import verify_pb2, verify_pb2_grpc

PAIR, K, AGREEMENT = "8b+1b", 4, 0.8
LEVELS = {"0": (0, 0), "1": (1, 0), "2, F=1": (2, 1), "2, F=3": (2, 3), "auto": ("auto", 3)}
ROUND_TRIPS_MS = (0.0, 1.7, 9.7, 24.7)
"""Added to that of loopback (about 0.3 ms on the wire)."""


TURNS = 4


def _without_slowest(times: list[float]) -> float:
    """The mean without the slowest twentieth. No median: a hit has several usual times where the round trip is long."""
    return statistics.fmean(sorted(times)[: max(1, len(times) - len(times) // 20)])


@dataclass(slots=True)
class Measured:
    """All rounds with a block of one setting."""

    rounds: list[RoundRecord]

    @property
    def round_s(self) -> float:
        kinds: dict[tuple[int, bool], list[float]] = {}
        for record in self.rounds:
            kinds.setdefault((record.ahead_level, record.ahead_hit), []).append(record.total_s)
        return sum(len(times) * _without_slowest(times) for times in kinds.values()) / len(self.rounds)

    @property
    def tokens_a_round(self) -> float:
        return statistics.fmean(record.committed for record in self.rounds)

    @property
    def tokens_a_second(self) -> float:
        return self.tokens_a_round / self.round_s

    @property
    def hit_rate(self) -> float:
        return statistics.fmean(record.ahead_hit for record in self.rounds)

    def mean_ms(self, name: str) -> float:
        return 1e3 * statistics.fmean(getattr(record, name) for record in self.rounds)

    def median_ms(self, name: str) -> float:
        return 1e3 * statistics.median(getattr(record, name) for record in self.rounds)


@contextlib.asynccontextmanager
async def tiers(*settings: Sequence[str]) -> AsyncIterator[list[verify_pb2_grpc.VerifyServiceStub]]:
    """A draft process, and a verify process linked to it for each of ``settings``, all started at once."""
    common = [*simulated(PAIR, k=K), f"simulation.agreement={AGREEMENT}"]
    async with contextlib.AsyncExitStack() as stack:
        draft = stack.enter_context(tier("draft_service", ["draft.server.port=0", *common, *settings[0]]))
        endpoint = f'verify.draft_endpoints=["{await asyncio.to_thread(draft.address)}"]'
        verifiers = [
            stack.enter_context(tier("verify_service", ["verify.server.port=0", endpoint, *common, *own]))
            for own in settings
        ]
        stubs = []
        for one in verifiers:
            channel = await stack.enter_async_context(open_channel(await asyncio.to_thread(one.address)))
            stubs.append(verify_pb2_grpc.VerifyServiceStub(channel))
        for stub in stubs:
            await until_linked(stub)
        yield stubs


async def until_linked(stub: Any) -> None:
    """A verify process has its drafter. On a busy machine connecting may take some tries."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            if (await stub.GetModelInfo(verify_pb2.GetModelInfoRequest())).drafters:
                return
        await asyncio.sleep(0.05)


@dataclass(slots=True)
class Tier:
    """A process of one tier."""

    module: str
    process: "subprocess.Popen[str]"
    _address: str = ""

    def address(self) -> str:
        """Where it listens; waits until it does."""
        if not self._address:
            assert self.process.stdout is not None
            said = (line for line in self.process.stdout if line.startswith("listening on "))
            line = next(said, "")
            if not line:
                raise SystemExit(f"{self.module} did not start")
            self._address = line.split()[-1]
        return self._address


@contextlib.contextmanager
def tier(module: str, settings: Sequence[str]) -> Iterator[Tier]:
    """A process of one tier, started; it ends with the block, whatever state it is in."""
    arguments = [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Tier(module, process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


async def decode(stub: Any, number: int, tokens: int, *, plan: Plan) -> list[RoundRecord]:
    tokenizer = Tokenizer.load(resolve_model_dir("simulated"))
    request = verify_pb2.DecodeRequest(
        request_id=str(number),
        prompt_ids=tokenizer.encode(f"The riders {number}"),
        sampling=codec.sampling_to_pb(SamplingParams(temperature=0.7, seed=number)),
        max_tokens=tokens,
        plan=codec.plan_to_pb(plan),
    )
    return [
        codec.round_from_pb(event.run.round)
        async for event in stub.Decode(request)
        if event.HasField("run") and event.run.HasField("round")
    ]


SPECULATIVE = Plan.speculative("simulated", K, "benchmark", k_fixed=True)
PLAIN = Plan.plain("benchmark")


_TIMES = ("draft_s", "network_s", "wait_s", "verify_s", "forward_s", "accept_s", "hidden_draft_s")


async def levels(
    rtt_ms: float, tokens: int, names: Sequence[str], slower: float = 1.0
) -> dict[str, Measured]:
    """The levels and plain decoding take turns, so that a busy moment of the machine hits all alike."""
    found: dict[str, list[RoundRecord]] = {name: [] for name in (*names, "plain")}
    settings = [
        [
            f"simulation.rtt_ms={rtt_ms * slower}",
            f"simulation.time_scale={slower}",
            f'verify.draft_level="{LEVELS[name][0]}"',
            f"verify.draft_fan={max(LEVELS[name][1], 1)}",
        ]
        for name in names
    ]
    async with tiers(*settings) as stubs:
        for stub in stubs:
            await decode(stub, 999, 60, plan=SPECULATIVE)  # warm, and for auto: measured
        for number in range(TURNS):
            plain = await decode(stubs[0], number, tokens // TURNS // 2, plan=PLAIN)
            found["plain"] += plain[1:-2]
            for name, stub in zip(names, stubs, strict=True):
                rounds = await decode(stub, number, 2 * tokens // TURNS, plan=SPECULATIVE)
                # The last rounds are cut by max_tokens, and k with them.
                found[name] += [record for record in rounds[1:-2] if record.drafted == K]
    return {
        name: Measured(
            [one._replace(**{part: getattr(one, part) / slower for part in _TIMES}) for one in rounds]
        )
        for name, rounds in found.items()
    }


def allowed_s(name: str, hit_rate: float, rtt_s: float) -> float:
    """The time of a round that the costs and the hit rate allow; see ``verify_service.pace``."""
    pair = pair_of(SimulationConfig(pair=PAIR))
    step_s = pair.verify.seconds(K + 1)
    waiting_s = step_s + rtt_s + pair.draft_seconds(K)
    level, fan = LEVELS[name]
    if level == 0:
        return waiting_s
    branch_s = pair.draft.seconds(1 if level == 1 else (K + 1) * int(fan))
    ahead_s = branch_s * (K + 1)
    # A verdict that was not foreseen waits for the end of the forward that is running.
    rest_s = math.ceil(step_s / branch_s) * branch_s - step_s if ahead_s > step_s else 0.0
    return hit_rate * max(step_s, ahead_s + rtt_s) + (1 - hit_rate) * (waiting_s + rest_s)


async def link_cost(tokens: int) -> dict[str, float]:
    """p50 of a round without any compute: devices that take no time, at 1 and at 32 sequences, in ms."""
    costs = {}
    async with tiers(["simulation.time_scale=0", 'verify.draft_level="0"']) as (stub,):
        for count in (1, 32):
            await decode(stub, 0, 20, plan=SPECULATIVE)
            runs = await asyncio.gather(*(decode(stub, n, tokens, plan=SPECULATIVE) for n in range(count)))
            rounds = [record for run in runs for record in run if record.drafted]
            costs[f"link_ms_{count}"] = round(1e3 * statistics.median(r.network_s for r in rounds), 3)
            costs[f"link_and_draft_ms_{count}"] = round(
                1e3 * statistics.median(r.network_s + r.draft_s for r in rounds), 3
            )
    return costs


async def measure(*, quick: bool, plot: str, slower: float) -> dict[str, Any]:
    result: dict[str, Any] = {"pair": PAIR, "k": K, "agreement": AGREEMENT, "slower": slower}
    bars: dict[str, bool] = {}
    expected = (1 - AGREEMENT ** (K + 1)) / (1 - AGREEMENT)
    sweep: dict[str, dict[str, float]] = {}
    for rtt_ms in ROUND_TRIPS_MS[: 1 if quick and not plot else None]:
        measured = await levels(rtt_ms, 160 if quick else 400, tuple(LEVELS), slower)
        base, plain = measured["0"], measured.pop("plain")
        rtt_s = base.median_ms("network_s") / 1e3
        # All decode the same positions: a round that came too late shifts one level's rounds, and is no merit of its own.
        tokens = statistics.fmean(record.committed for one in measured.values() for record in one.rounds)
        print(f"round trip {1e3 * rtt_s:.2f} ms ({rtt_ms:g} added); {len(base.rounds)} rounds a level")
        print(
            "level     tok/s  x plain, level 0  hits  ms a round  allowed  ratio  draft exposed, hidden  verify"
        )
        for name, one in measured.items():
            ratio = base.round_s / one.round_s
            allowed = allowed_s(name, one.hit_rate, rtt_s) if name != "auto" else one.round_s
            off = one.round_s / allowed - 1
            print(
                f"{name:<8} {tokens / one.round_s:6.1f}  {tokens / one.round_s / plain.tokens_a_second:7.2f}  {ratio:7.2f}  {one.hit_rate:4.2f}  {1e3 * one.round_s:10.2f}  "
                f"{1e3 * allowed:7.2f}  {1 + off:5.3f}  {one.mean_ms('draft_s'):13.2f}, "
                f"{one.mean_ms('hidden_draft_s'):6.2f}  {one.mean_ms('verify_s'):6.2f}"
            )
            over_plain = tokens / one.round_s / plain.tokens_a_second
            sweep.setdefault(name, {})[f"{1e3 * rtt_s:.2f}"] = round(over_plain, 3)
            if rtt_ms == ROUND_TRIPS_MS[0] and name != "auto":
                result[f"off_{name}"] = round(off, 4)
                bars[f"level {name} within {3 if name == '0' else 5} % of what is allowed"] = off <= (
                    0.03 if name == "0" else 0.05
                )
        best = min(one.round_s for name, one in measured.items() if name != "auto")
        auto = best / measured["auto"].round_s
        bars[f"auto within 3 % of the best at +{rtt_ms:g} ms"] = auto >= 0.97
        result[f"auto_over_best_at_{rtt_ms:g}"] = round(auto, 3)
        if rtt_ms == ROUND_TRIPS_MS[0]:
            gain = base.round_s / measured["2, F=3"].round_s
            result |= {
                "tokens_a_round": round(base.tokens_a_round, 3),
                "closed_form_tokens_a_round": round(expected, 3),
                "level_2_over_level_0": round(gain, 3),
                "hits": {name: round(one.hit_rate, 3) for name, one in measured.items()},
            }
            bars["level 2 at least 1.25 x level 0"] = gain >= 1.25
    result["speed_over_plain_by_round_trip_ms"] = sweep
    if plot:
        draw(sweep, plot)
    costs = await link_cost(100)
    print("the link's own work:", costs)
    result |= costs
    bars["link p50 <= 0.8 ms at 1 sequence"] = costs["link_ms_1"] <= 0.8
    bars["link p50 <= 3 ms at 32 sequences"] = costs["link_ms_32"] <= 3.0
    result["hit_rates"] = hit_rates(positions=400 if quick else 4000)
    print("hit rates, one source and its blurred copy:", json.dumps(result["hit_rates"]))
    result["bars"] = bars
    return result


def draw(sweep: dict[str, dict[str, float]], path: str) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4))
    for name, speeds in sweep.items():
        axes.plot(
            [float(ms) for ms in speeds],
            list(speeds.values()),
            marker="o",
            label=f"level {name}",
            linestyle="--" if name == "auto" else "-",
        )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("round trip between the tiers, ms")
    axes.set_ylabel("speed over plain decoding, one sequence")
    axes.set_title(f"Simulated {PAIR}, k = {K}, agreement {AGREEMENT}", fontsize=10)
    axes.set_ylim(bottom=0.8)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one round trip, fewer rounds: under two minutes"
    )
    parser.add_argument("--plot", default="", help="where to draw the curves over the round trip")
    parser.add_argument("--slower", type=float, default=1.0, help="how much slower than the devices")
    arguments = parser.parse_args()
    started = time.monotonic()
    result = asyncio.run(measure(quick=arguments.quick, plot=arguments.plot, slower=arguments.slower))
    result["seconds"] = round(time.monotonic() - started, 1)
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
