"""Scenarios in virtual time: what steps and questions cost, and where a guess would be right. For ``benchmarks.regret``.

Whether a guess at a position of a stream would be right is fixed beforehand by keyed draws, so that all policies meet the same luck.
Guesses come over the link, from a drafter that has to be asked, or from a look-up beside the target (docs/adr/0008), which
is there before the decision and says how sure it is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.sampling.noise import mix64
from paceline.step_costs import CostTable, table_of

_ORDER = (1 << 64) - 1
LOOK_UP_STEP_S, LOOK_UP_S = 1e-4, 4e-5
"""A step with look-ups, and each of them (docs/log.md, 2026-11-30: 20 to 60 us in a loop, 0.1 ms with cold caches)."""
LOOK_S = 1e-4
"""A step in which some drafter is asked without being waited for: the message."""
_DOUBT = 0.5  # a look-up's word is off by up to a factor e^0.5 in odds, at random

# What is true at a position: chance of a guess, and of each guess being right where those before it are.
Truth = Callable[[int, int], tuple[float, Callable[[int], float]]]


def draw(*key: int) -> float:
    """Uniform in [0, 1), by key."""
    word = 0x243F6A8885A308D3
    for part in key:
        word = mix64(((word ^ part) * 0x9E3779B97F4A7C15) & _ORDER)
    return (word >> 11) * 2.0**-53


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
    truth: Truth | None  # of the drafter behind the link; None: there is none
    streams: tuple[Stream, ...]
    exposed_s: Callable[[int], float]  # by depth
    noise: float = 0.05  # of step times
    error: tuple[float, float] = (1.0, 1.0)  # the true table is so much dearer: plain rows, further rows
    quiet_s: float = 0.0002
    concurrency: int = (
        0  # so many at a time, the next one when one ends, until the first ``tokens`` are out; 0: by arrival
    )
    tokens: int = 0
    beside: Truth | None = None  # of what is looked up beside the target
    luck: int = 0  # of the draws
    moved: bool = False  # look-ups behind the link: ``place = "draft"``, as they ran before docs/adr/0008

    def step_s(self, rows: int, sequences: int) -> float:
        """The true time."""
        base_s = self.table.step_s(sequences, sequences)
        return self.error[0] * base_s + self.error[1] * (self.table.step_s(rows, sequences) - base_s)


def block_at(world: World, truth: Truth, stream: Stream, at: int, k: int) -> tuple[int, int]:
    """(length, agreed) of the block that the drafter, or the look-up, gives at a position."""
    kind = 10 if truth is world.beside else 0
    fill, right = truth(stream.key, at)
    if draw(1 + kind, stream.key, at, world.luck) >= fill:
        return 0, 0
    agreed = 0
    while agreed < k and draw(2 + kind, stream.key, at + agreed, world.luck) < right(agreed):
        agreed += 1
    return k, agreed


def said(world: World, truth: Truth, stream: Stream, at: int, length: int) -> tuple[float, ...]:
    """What a look-up says of the guesses that it found: the truth, off by a random factor in odds."""
    _, right = truth(stream.key, at)
    factor = math.exp(_DOUBT * (2.0 * draw(5, stream.key, at, world.luck) - 1.0))
    alive, found = 1.0, []
    for position in range(length):
        odds = right(position) / (1.0 - right(position)) * factor
        alive *= odds / (1.0 + odds)
        found.append(alive)
    return tuple(found)


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
    """A drafter that answers at once, behind a link."""
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

    nobody: dict[str, Any] = {"truth": None, "exposed_s": lookup_s}

    def one_by_one(count: int, tokens: int) -> dict[str, Any]:
        return {"streams": tuple(Stream(i, 0.0, tokens) for i in range(int(count * scale))), "concurrency": 1}

    return [
        World("one stream, a=.2", DEAR_ROWS, constant(0.2), one(2000), lookup_s),
        World("one stream, a=.5", DEAR_ROWS, constant(0.5), one(2000), lookup_s),
        World("one stream, a=.7, falling along the block", DEAR_ROWS, constant(0.7, 0.9), one(2000), lookup_s),
        World("one stream, a=.9", DEAR_ROWS, constant(0.9), one(3000), lookup_s),
        World("one stream, a=.9, cheap rows", CHEAP_ROWS, constant(0.9), one(3000), lookup_s),
        World("nothing is ever right", DEAR_ROWS, constant(0.01), one(2000), lookup_s),
        World("hardly any guess", DEAR_ROWS, constant(0.6, fill=0.05), one(2000), lookup_s, moved=True),
        World("a guess every third round", DEAR_ROWS, constant(0.7, fill=0.35), one(2000), lookup_s, moved=True),
        World("bursts of copying", DEAR_ROWS, bursts(40, 80), one(4000), lookup_s, moved=True),
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
        World("32 streams, bursts, cheap rows", CHEAP_ROWS, bursts(40, 80), exposed_s=lookup_s, moved=True,
              **endless(32, 9000)),
        World("table too cheap by a third", DEAR_ROWS, constant(0.6), one(2000), lookup_s, error=(1.0, 1.4)),
        World("machine twice as slow", DEAR_ROWS, constant(0.6), one(2000), lookup_s, error=(2.0, 2.0)),
        World("short requests, one at a time", DEAR_ROWS, by_stream((0.75, 0.1, 0.6, 0.85)),
              exposed_s=lookup_s, **one_by_one(50, 80)),
        World("task mix drifts", DEAR_ROWS, mix_drift(scale), exposed_s=lookup_s, **one_by_one(60, 100)),
        World("load 1, 32, 1", DEAR_ROWS, by_stream((0.8, 0.7, 0.5, 0.9)), load_step(), lookup_s),
        World("load 1, 32, 1, cheap rows", CHEAP_ROWS, by_stream((0.8, 0.7, 0.5, 0.9)), load_step(), lookup_s),
        World("beside: hardly any guess", DEAR_ROWS, beside=constant(0.6, fill=0.05), streams=one(2000), **nobody),
        World("beside: a guess every third round", DEAR_ROWS, beside=constant(0.7, fill=0.35), streams=one(2000),
              **nobody),
        World("beside: nothing is ever right", DEAR_ROWS, beside=constant(0.02, fill=0.5), streams=one(2000),
              **nobody),
        World("beside: bursts of copying", DEAR_ROWS, beside=bursts(40, 80), streams=one(4000), **nobody),
        World("beside: 8 streams, bursts", DEAR_ROWS, beside=bursts(40, 80), **nobody, **endless(8, 6000)),
        World("beside: 32 streams, bursts, cheap rows", CHEAP_ROWS, beside=bursts(40, 80), **nobody,
              **endless(32, 9000)),
        World("beside: load 1, 32, 1", DEAR_ROWS, beside=bursts(40, 80), streams=load_step(), **nobody),
        World("cascade: bursts, else a small model", CHEAP_ROWS, constant(0.6), one(4000), small_model_s,
              beside=bursts(40, 80)),
    ]  # fmt: skip
