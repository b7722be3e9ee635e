"""What the controller loses against one who knows: simulated streams in virtual time, no model, no sleeping.

    python -m benchmarks.regret [--quick] [--only NAME]

Each scenario is a world: a cost table, what asking exposes, and for every position of every sequence whether a guess there
would be right, fixed beforehand by keyed draws, so that all policies meet the same luck. Policies: the controller, which learns
everything by itself; static k for everybody; the oracle, which is told the true chances of every round before it and the
true costs, and takes the depths of most expected tokens per second. Goodput is tokens a second over the whole scenario. The last
line is `RESULT {json}`.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.sampling.noise import mix64
from verify_service.controller import decide
from verify_service.costs import CostTable, table_of
from verify_service.facts import Ready, RowFact, State, StepFacts
from verify_service.prices import Model
from verify_service.trimming import trim

STATIC = (0, 1, 2, 4, 8)
K_MAX = 8
BARS = {"oracle": 0.96, "static": 0.98}
_ORDER = (1 << 64) - 1


def draw(*key: int) -> float:
    """Uniform in [0, 1), by key."""
    word = 0x243F6A8885A308D3
    for part in key:
        word = mix64(((word ^ part) * 0x9E3779B97F4A7C15) & _ORDER)
    return (word >> 11) * 2.0**-53


# What is true at a position: chance of a guess, and of each guess being right where those before it are.
Truth = Callable[[int, int], tuple[float, Callable[[int], float]]]


@dataclass(frozen=True)
class Stream:
    """A request: arrives, decodes so many tokens, leaves."""

    key: int
    arrives_s: float
    tokens: int
    plain: bool = False
    drafter: str = "d"


@dataclass(frozen=True)
class World:
    """A scenario."""

    name: str
    table: CostTable
    truth: Truth
    streams: tuple[Stream, ...]
    exposed_s: Callable[[int], float]  # by depth
    noise: float = 0.05  # of step times
    error: tuple[float, float] = (1.0, 1.0)  # the true table is so much dearer: plain rows, further rows
    quiet_s: float = 0.0002
    concurrency: int = (
        0  # so many at a time, the next one when one ends, until the first ``tokens`` are out; 0: by arrival
    )
    tokens: int = 0

    def step_s(self, rows: int, sequences: int) -> float:
        """The true time."""
        base_s = self.table.step_s(sequences, sequences)
        return self.error[0] * base_s + self.error[1] * (self.table.step_s(rows, sequences) - base_s)


@dataclass
class Running:
    """A stream on its way."""

    stream: Stream
    done: int = 0
    k: int = 0
    wait: bool = False
    look_at: int = 0
    look: tuple[int, int] | None = None


@dataclass
class Outcome:
    """What a policy got."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    decide_s: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Tokens a second, over the time in which somebody decodes."""
        return self.tokens / self.seconds


def block_at(world: World, stream: Stream, at: int, k: int) -> tuple[int, int]:
    """(length, agreed) of the block that a drafter gives at a position."""
    fill, right = world.truth(stream.key, at)
    if draw(1, stream.key, at) >= fill:
        return 0, 0
    agreed = 0
    while agreed < k and draw(2, stream.key, at + agreed) < right(agreed):
        agreed += 1
    return k, agreed


def run(
    world: World,
    policy: str,
    static: int = 0,
    *,
    k_max: int = K_MAX,
    clock: Callable[[], float] = time.thread_time,
    facts: list[Any] | None = None,
) -> Outcome:
    """One policy through the world. ``facts`` takes what the controller was told and what it decided."""
    outcome = Outcome()
    model, state = Model(world.table), State()
    waiting = sorted(world.streams, key=lambda stream: (stream.arrives_s, stream.key), reverse=True)
    most = world.concurrency or len(waiting)
    running: dict[int, Running] = {}
    now = 0.0
    step = 0
    while (waiting or running) and not 0 < world.tokens <= outcome.tokens:
        if not running and waiting[-1].arrives_s > now:
            now = waiting[-1].arrives_s
        while waiting and waiting[-1].arrives_s <= now and len(running) < most:
            stream = waiting.pop()
            one = running[stream.key] = Running(stream)
            if policy == "static":
                one.k, one.wait = (0 if stream.plain else static), True
        if policy == "oracle":
            oracle(world, list(running.values()))
        # Blocks come, the controller cuts them.
        blocks = {
            key: block_at(world, one.stream, one.done, min(one.k, one.stream.tokens - one.done - 1))
            for key, one in running.items()
            if one.wait and one.k
        }
        kept = {key: length for key, (length, _) in blocks.items()}
        begun = clock()
        if policy == "controller":
            ready = [Ready(key, length, fixed=False) for key, (length, _) in blocks.items() if length]
            num_plain = sum(
                one.stream.plain or (key in state.tracks and state.tracks[key].suspended)
                for key, one in running.items()
            )
            cut = trim(model, state, ready, len(running), 0, num_plain)
            kept |= {key: k for key, (k, _) in cut.items()}
        controlled_s = clock() - begun
        rows = len(running) + sum(kept.values())
        deepest = max((one.k for one in running.values() if one.wait), default=0)
        gap_s = world.quiet_s + (world.exposed_s(deepest) if deepest else 0.0)
        forward_s = world.step_s(rows, len(running)) * math.exp(world.noise * (2 * draw(3, step) - 1))
        now += gap_s + forward_s
        outcome.seconds += gap_s + forward_s
        rows_told = []
        for key, one in list(running.items()):
            length, agreed = blocks.get(key, (-1, 0))
            drafted = kept.get(key, 0)
            agreed = min(agreed, drafted)
            base = one.done
            one.done = min(base + agreed + 1, one.stream.tokens)
            outcome.tokens += one.done - base
            outcome.rounds += 1
            outcome.drafted += drafted
            outcome.accepted += agreed
            look = None
            if one.look is not None:
                guess, right = one.look
                checked = min(guess, one.done - one.look_at)
                look, one.look = (guess, checked, min(right, checked)), None
            finished = one.done >= one.stream.tokens
            rows_told.append(
                RowFact(
                    key, "" if one.stream.plain else one.stream.drafter,
                    k_max, one.stream.tokens - one.done - 1, False,
                    one.k if one.wait else 0, length, drafted, agreed, look, None, finished,
                )
            )  # fmt: skip
            if finished:
                del running[key]
        step += 1
        if policy != "controller":
            continue
        told = StepFacts(
            step, tuple(rows_told), len(rows_told), rows, 0, 256.0, forward_s, 0.0, gap_s,
            world.exposed_s(deepest) - 0.0006 if deepest else 0.0,
            len(running), sum(one.stream.plain for one in running.values()),
        )  # fmt: skip
        begun = clock()
        state, decisions = decide(model, state, told)
        outcome.decide_s.append(controlled_s + clock() - begun)
        if facts is not None:
            facts.append((told, decisions))
        for key, decision in decisions.items():
            one = running[key]
            one.k, one.wait = decision.k, decision.wait
            if decision.k and not decision.wait:
                one.look_at = one.done
                one.look = block_at(world, one.stream, one.done, decision.k)
    return outcome


def oracle(world: World, running: Sequence[Running]) -> None:
    """Depths of most expected tokens per second, everything being known but the draws."""
    entries = []
    for index, one in enumerate(running):
        one.k, one.wait = 0, False
        if one.stream.plain:
            continue
        fill, right = world.truth(one.stream.key, one.done)
        alive = 1.0
        for position in range(min(K_MAX, one.stream.tokens - one.done - 1)):
            alive *= right(position)
            entries.append((-alive, index, position, fill))
    entries.sort()
    count = len(running)
    best = (count / (world.step_s(count, count) + world.quiet_s), -1, 0)
    for deepest in range(1, K_MAX + 1):
        tokens, rows, taken = float(count), float(count), 0
        for negative, _, position, fill in entries:
            if position >= deepest:
                continue
            tokens -= negative * fill
            rows += fill
            taken += 1
            low = int(rows)
            step_s = world.step_s(low, count)
            step_s += (rows - low) * (world.step_s(low + 1, count) - step_s)
            rate = tokens / (step_s + world.quiet_s + world.exposed_s(deepest))
            if rate > best[0]:
                best = (rate, deepest, taken)
    _, deepest, taken = best
    for _, index, position, _ in [entry for entry in entries if entry[2] < deepest][:taken]:
        running[index].k, running[index].wait = position + 1, True


# --- worlds ---------------------------------------------------------------------------------------------------------

# ms by (sequences, rows): two cores with 4-bit weights, where a row is dear; the same with cheap rows; a GPU.
DEAR_ROWS = table_of(
    [(1, r, (6.0 + 0.95 * (r - 1)) / 1e3) for r in (1, 2, 4, 5, 9, 17)]
    + [(4, r, (9.0 + 0.95 * (r - 4)) / 1e3) for r in (4, 8, 20, 36)]
    + [(8, r, (13.0 + 0.95 * (r - 8)) / 1e3) for r in (8, 16, 40, 72)]
    + [(32, r, (36.0 + 0.95 * (r - 32)) / 1e3) for r in (32, 64, 160)]
)
CHEAP_ROWS = table_of(
    [(1, r, (6.0 + 0.25 * (r - 1)) / 1e3) for r in (1, 2, 4, 5, 9, 17)]
    + [(8, r, (9.0 + 0.3 * (r - 8)) / 1e3) for r in (8, 16, 40, 72)]
    + [(32, r, (18.0 + 0.35 * (r - 32)) / 1e3) for r in (32, 64, 160)]
)
GPU = table_of(
    [(1, 1, 0.028), (1, 9, 0.028), (32, 32, 0.030), (32, 64, 0.030), (32, 288, 0.052)],
)


def lookup_s(depth: int) -> float:
    """Prompt lookup behind a link."""
    return 0.0008


def small_model_s(depth: int) -> float:
    """A small model on the same cores."""
    return 0.0006 + 0.0009 * depth


def gpu_model_s(depth: int) -> float:
    """DESIGN section 6: 6 ms a token."""
    return 0.001 + 0.006 * depth


def constant(rate: float, decay: float = 1.0, fill: float = 1.0) -> Truth:
    """The same everywhere; along a block each position is ``decay`` times as good."""
    return lambda key, at: (fill, lambda position: rate * decay**position)


def by_stream(rates: Sequence[float], decay: float = 0.97, fill: float = 1.0) -> Truth:
    """Streams differ."""
    return lambda key, at: (fill, lambda position: rates[key % len(rates)] * decay**position)


def drifting(length: int, rates: Sequence[float], fill: float = 1.0) -> Truth:
    """The rate changes every ``length`` tokens."""
    return lambda key, at: (fill, lambda position: rates[(at // length) % len(rates)])


def bursts(copied: int, own: int) -> Truth:
    """Stretches that are copied from the prompt, between those that are not."""

    def truth(key: int, at: int) -> tuple[float, Callable[[int], float]]:
        inside = (at + 37 * key) % (copied + own) < copied
        return (0.97, lambda position: 0.95) if inside else (0.15, lambda position: 0.25)

    return truth


def mix_drift(scale: float) -> Truth:
    """The mix of tasks changes from copying to creative and back, request by request."""

    def truth(key: int, at: int) -> tuple[float, Callable[[int], float]]:
        rate, fill = ((0.85, 0.9), (0.15, 0.25), (0.85, 0.9))[min(int(key / (20 * scale)), 2)]
        return fill, lambda position: rate * 0.98**position

    return truth


def worlds(scale: float) -> list[World]:
    """All scenarios; ``scale`` times as many tokens."""

    def one(tokens: int) -> tuple[Stream, ...]:
        return (Stream(0, 0.0, int(tokens * scale)),)

    def endless(count: int, tokens: int) -> dict[str, Any]:
        """``count`` at a time, requests of about 200 tokens, no tail in which a few are left."""
        lengths = [40 + 37 * i % 320 for i in range(8 * count + int(tokens * scale) // 40)]
        streams = tuple(Stream(i, 0.0, length) for i, length in enumerate(lengths))
        return {"streams": streams, "concurrency": count, "tokens": int(tokens * scale)}

    def load_step() -> tuple[Stream, ...]:
        first = [Stream(0, 0.0, int(1500 * scale))]
        crowd = [Stream(1 + i, 2.0 * scale + 0.01 * i, int(160 * scale)) for i in range(31)]
        return (*first, *crowd)

    def one_by_one(count: int, tokens: int) -> dict[str, Any]:
        return {"streams": tuple(Stream(i, 0.0, tokens) for i in range(int(count * scale))), "concurrency": 1}

    return [
        World("one stream, a=.2", DEAR_ROWS, constant(0.2), one(2000), lookup_s),
        World("one stream, a=.5", DEAR_ROWS, constant(0.5), one(2000), lookup_s),
        World("one stream, a=.7, falling along the block", DEAR_ROWS, constant(0.7, 0.9), one(2000), lookup_s),
        World("one stream, a=.9", DEAR_ROWS, constant(0.9), one(3000), lookup_s),
        World("one stream, a=.9, cheap rows", CHEAP_ROWS, constant(0.9), one(3000), lookup_s),
        World("nothing is ever right", DEAR_ROWS, constant(0.01), one(2000), lookup_s),
        World("hardly any guess", DEAR_ROWS, constant(0.6, fill=0.05), one(2000), lookup_s),
        World("a guess every third round", DEAR_ROWS, constant(0.7, fill=0.35), one(2000), lookup_s),
        World("bursts of copying", DEAR_ROWS, bursts(40, 80), one(4000), lookup_s),
        World("drift .85, .1", DEAR_ROWS, drifting(400, (0.85, 0.1)), one(4000), lookup_s),
        World("small model", DEAR_ROWS, constant(0.75, 0.97), one(2000), small_model_s),
        World("small model, cheap rows", CHEAP_ROWS, constant(0.75, 0.97), one(2000), small_model_s),
        World("small model that guesses badly", DEAR_ROWS, constant(0.3), one(2000), small_model_s),
        World("GPU, a=.7", GPU, constant(0.7), one(1500), gpu_model_s),
        World("GPU, a=.4", GPU, constant(0.4), one(1500), gpu_model_s),
        World("8 streams that differ", DEAR_ROWS, by_stream((0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.6)),
              exposed_s=lookup_s, **endless(8, 6000)),
        World("16 streams that differ, cheap rows", CHEAP_ROWS, by_stream((0.1, 0.4, 0.7, 0.9)),
              exposed_s=lookup_s, **endless(16, 8000)),
        World("32 streams, GPU", GPU, by_stream((0.3, 0.5, 0.7, 0.9)), exposed_s=gpu_model_s, **endless(32, 12000)),
        World("32 streams, bursts, cheap rows", CHEAP_ROWS, bursts(40, 80), exposed_s=lookup_s, **endless(32, 9000)),
        World("table too cheap by a third", DEAR_ROWS, constant(0.6), one(2000), lookup_s, error=(1.0, 1.4)),
        World("machine twice as slow", DEAR_ROWS, constant(0.6), one(2000), lookup_s, error=(2.0, 2.0)),
        World("short requests, one at a time", DEAR_ROWS, by_stream((0.75, 0.1, 0.6, 0.85)),
              exposed_s=lookup_s, **one_by_one(50, 80)),
        World("task mix drifts", DEAR_ROWS, mix_drift(scale), exposed_s=lookup_s, **one_by_one(60, 100)),
        World("load 1, 32, 1", DEAR_ROWS, by_stream((0.8, 0.7, 0.5, 0.9)), load_step(), lookup_s),
        World("load 1, 32, 1, cheap rows", CHEAP_ROWS, by_stream((0.8, 0.7, 0.5, 0.9)), load_step(), lookup_s),
    ]  # fmt: skip


def compare(world: World) -> dict[str, float | int]:
    """Goodput of the controller relative to the oracle, to the best static depth and to plain."""
    own = run(world, "controller")
    static = {k: run(world, "static", k).goodput for k in STATIC}
    best = max(static, key=lambda k: static[k])
    known = run(world, "oracle").goodput
    took = sorted(own.decide_s)
    return {
        "vs_oracle": own.goodput / known,
        "vs_static": own.goodput / static[best],
        "best_static_k": best,
        "vs_plain": own.goodput / static[0],
        "drafted": own.drafted / own.rounds,
        "decide_ms_p99": 1e3 * took[int(0.99 * (len(took) - 1))],
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    args = parser.parse_args()
    rows = {}
    print(f"{'':<44}{'oracle':>8}{'static':>8}{'(k)':>4}{'plain':>8}{'k/round':>8}")
    for world in worlds(1.0 if args.quick else 3.0):
        if args.only not in world.name:
            continue
        row = rows[world.name] = compare(world)
        print(
            f"{world.name:<44}{row['vs_oracle']:>8.3f}{row['vs_static']:>8.3f}{row['best_static_k']:>4}"
            f"{row['vs_plain']:>8.3f}{row['drafted']:>8.2f}"
        )
    result = {
        "benchmark": "regret",
        "worst_vs_oracle": round(min(row["vs_oracle"] for row in rows.values()), 4),
        "worst_vs_static": round(min(row["vs_static"] for row in rows.values()), 4),
        "worst_vs_plain": round(min(row["vs_plain"] for row in rows.values()), 4),
        "bars": BARS,
        "scenarios": {
            name: {key: round(value, 4) for key, value in row.items()} for name, row in rows.items()
        },
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
