"""What the controller loses against one who knows: simulated streams in virtual time, no model, no sleeping.

    python -m benchmarks.regret [--quick] [--only NAME]

Policies meet the same luck (``benchmarks.worlds``): the controller, which learns everything by itself; static k for everybody; and two
who are told the true costs and the true chances of acceptance, never what will be drawn, and take the depths of most expected tokens
per second. The *oracle* knows the chances that hold where each round begins: it sees a change of the text before the text has changed.
The *timely oracle* knows those that held where the round before began: what somebody could know who judged perfectly
all that has been decoded. Both know what was looked up beside the target, as the controller does. Goodput is tokens a second over the
whole scenario. The last line is `RESULT {json}`.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import regret_real
from benchmarks.worlds import LOOK_S, LOOK_UP_S, LOOK_UP_STEP_S, Stream, World, block_at, draw, said, worlds
from verify_service.belief import Look
from verify_service.controller import decide
from verify_service.facts import Ready, RowFact, State, StepFacts
from verify_service.prices import Model
from verify_service.trimming import trim

STATIC = (0, 1, 2, 4, 8)
K_MAX = 8
BARS = {"oracle": 0.96, "static": 0.98}


@dataclass
class Running:
    """A stream on its way."""

    stream: Stream
    done: int = 0
    before: int = 0  # where the round before began
    k: int = 0
    wait: bool = False
    look_at: int = 0
    look: tuple[int, int] | None = None
    rest: bool = False
    found: tuple[float, ...] | None = None  # looked up beside the target for the next round
    right: int = 0  # of it


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


def run(
    world: World,
    policy: str,
    static: int = 0,
    *,
    k_max: int = K_MAX,
    clock: Callable[[], float] = time.thread_time,
    calls: list[Any] | None = None,
) -> Outcome:
    """One policy through the world. ``calls`` takes what the controller was asked and what it answered, step by step."""
    outcome = Outcome()
    model, state = Model(world.table), State()
    waiting = sorted(world.streams, key=lambda stream: (stream.arrives_s, stream.key), reverse=True)
    most = world.concurrency or len(waiting)
    running: dict[int, Running] = {}
    now = 0.0
    step = 0
    looks_up = world.beside is not None and (policy != "static" or static > 0)

    def fact(one: Running, asked: int, length: int, drafted: int, agreed: int, look: Any) -> RowFact:
        looked, one.found = one.found is not None, None
        room = one.stream.tokens - one.done - 1
        finished = room < 0
        if looks_up and not one.rest and not finished and not one.stream.plain:
            look_up(world, one, min(k_max, room))
        drafter = "" if one.stream.plain else one.stream.drafter
        return RowFact(
            one.stream.key, drafter, k_max, room, False, asked, length, drafted, agreed, look, None, finished,
            one.found, world.truth is None, looked,
        )  # fmt: skip

    def admit() -> list[RowFact]:
        """Those who have arrived; a prompt's end is told like a round's."""
        told = []
        while waiting and waiting[-1].arrives_s <= now and len(running) < most:
            stream = waiting.pop()
            one = running[stream.key] = Running(stream)
            told.append(fact(one, 0, -1, 0, 0, None))
            if policy == "static" and world.truth is not None:
                one.k, one.wait = (0 if stream.plain else static), True
        return told

    def control(told: StepFacts, spent_s: float, asked: Any) -> None:
        nonlocal state
        begun = clock()
        state, decisions = decide(model, state, told)
        spent_s += clock() - begun
        if told.num_sequences:
            outcome.decide_s.append(spent_s)
        if calls is not None:
            calls.append((asked, told, decisions))
        for key, decision in decisions.items():
            one = running[key]
            one.k, one.wait, one.rest = decision.k, decision.wait, decision.rest
            if decision.k and not decision.wait:
                assert world.truth is not None, "nobody is there to be looked at"
                one.look_at = one.done
                one.look = block_at(world, world.truth, one.stream, one.done, decision.k)

    while (waiting or running) and not 0 < world.tokens <= outcome.tokens:
        if not running:
            now = max(now, waiting[-1].arrives_s)
            arrived = tuple(admit())
            if policy == "controller":
                plain = sum(one.stream.plain for one in running.values())
                told = StepFacts(step, arrived, 0, 0, 0, 256.0, 0.0, 0.0, -1.0, 0.0, len(running), plain)
                control(told, 0.0, None)
        if policy in ("oracle", "timely"):
            oracle(world, list(running.values()), timely=policy == "timely")
        # Blocks come, the controller cuts them.
        blocks: dict[int, tuple[int, int]] = {}
        survival: dict[int, tuple[float, ...] | None] = {}
        answers: dict[int, int] = {}
        for key, one in running.items():
            room = one.stream.tokens - one.done - 1
            if one.wait and one.k and world.truth is not None:
                blocks[key] = block_at(world, world.truth, one.stream, one.done, min(one.k, room))
                answers[key] = blocks[key][0]
                survival[key] = None
            if one.found and not blocks.get(key, (0, 0))[0]:
                length = min(len(one.found), static if policy == "static" else K_MAX)
                if policy in ("oracle", "timely"):
                    length = one.k
                blocks[key] = length, min(one.right, length)
                survival[key] = one.found
        kept = {key: length for key, (length, _) in blocks.items()}
        asked_s, asked = 0.0, None
        if policy == "controller":
            ready = [
                Ready(key, length, False, survival[key]) for key, (length, _) in blocks.items() if length
            ]
            num_plain = sum(
                one.stream.plain or (key in state.tracks and state.tracks[key].suspended)
                for key, one in running.items()
            )
            begun = clock()
            cut = trim(model, state, ready, len(running), 0, num_plain)
            asked_s = clock() - begun
            asked = (ready, len(running), 0, num_plain, cut)
            kept |= {key: k for key, (k, _) in cut.items()}
        rows = len(running) + sum(kept.values())
        deepest = max((one.k for one in running.values() if one.wait), default=0)
        looked = any(one.look is not None for one in running.values())
        looked_up = sum(one.found is not None for one in running.values())
        gap_s = world.quiet_s + (world.exposed_s(deepest) if deepest else 0.0)
        gap_s += LOOK_S if looked else 0.0
        gap_s += LOOK_UP_STEP_S + looked_up * LOOK_UP_S if looked_up else 0.0
        forward_s = world.step_s(rows, len(running)) * math.exp(
            world.noise * (2 * draw(3, step, world.luck) - 1)
        )
        now += gap_s + forward_s
        outcome.seconds += gap_s + forward_s
        told_rows = []
        count = len(running)
        for key, one in list(running.items()):
            length, agreed = blocks.get(key, (-1, 0))
            drafted = kept.get(key, 0)
            agreed = min(agreed, drafted)
            one.before = one.done
            one.done = min(one.before + agreed + 1, one.stream.tokens)
            outcome.tokens += one.done - one.before
            outcome.rounds += 1
            outcome.drafted += drafted
            outcome.accepted += agreed
            look = None
            if one.look is not None:
                guess, right = one.look
                checked = min(guess, one.done - one.look_at)
                look, one.look = Look(guess, checked, min(right, checked)), None
            asked_k = one.k if one.wait and policy == "controller" else 0
            told_rows.append(fact(one, asked_k, answers.get(key, -1), drafted, agreed, look))
            if one.done >= one.stream.tokens:
                del running[key]
        if running:
            told_rows += admit()
        step += 1
        if policy == "controller":
            told = StepFacts(
                step, tuple(told_rows), count, rows, 0, 256.0, forward_s, 0.0, gap_s,
                world.exposed_s(deepest) - 0.0006 if deepest else 0.0,
                len(running), sum(one.stream.plain for one in running.values()),
            )  # fmt: skip
            control(told, asked_s, asked)
    return outcome


def look_up(world: World, one: Running, k: int) -> None:
    """What is found beside the target for the stream's next round."""
    assert world.beside is not None
    length, one.right = block_at(world, world.beside, one.stream, one.done, k)
    one.found = said(world, world.beside, one.stream, one.done, length)


def oracle(world: World, running: Sequence[Running], *, timely: bool) -> None:
    """Depths of most expected tokens per second, everything being known but the draws."""
    count = len(running)
    looked_up = sum(one.found is not None for one in running)
    quiet_s = world.quiet_s + (LOOK_UP_STEP_S + looked_up * LOOK_UP_S if looked_up else 0.0)
    best: tuple[float, list[tuple[int, int]], bool] = (0.0, [], False)
    for asks in (False, True) if world.truth is not None else (False,):
        entries = []
        for index, one in enumerate(running):
            if one.stream.plain:
                continue
            if one.found:
                assert world.beside is not None
                fill, (_, right) = 1.0, world.beside(one.stream.key, one.done)
            elif asks and world.truth is not None:
                fill, right = world.truth(one.stream.key, one.before if timely else one.done)
            else:
                continue
            alive = 1.0
            for position in range(min(K_MAX, one.stream.tokens - one.done - 1)):
                alive *= right(position)
                entries.append((-alive, index, position, fill))
        entries.sort()
        for deepest in range(1, K_MAX + 1) if entries else ():
            tokens, rows = float(count), float(count)
            among = [entry for entry in entries if entry[2] < deepest]
            exposed_s = quiet_s + (world.exposed_s(deepest) if asks else 0.0)
            for taken in range(len(among) + 1):
                if taken:
                    negative, _, _, fill = among[taken - 1]
                    tokens -= negative * fill
                    rows += fill
                low = int(rows)
                step_s = world.step_s(low, count)
                step_s += (rows - low) * (world.step_s(low + 1, count) - step_s)
                rate = tokens / (step_s + (exposed_s if taken else quiet_s))
                if rate > best[0]:
                    best = rate, [entry[1:3] for entry in among[:taken]], asks
    for one in running:
        one.k, one.wait = 0, False
    for index, position in best[1]:
        running[index].k, running[index].wait = position + 1, not running[index].found


def compare(world: World, lucks: int = 1) -> dict[str, float | int]:
    """Goodput of the controller relative to the oracles, to the best static depth and to plain, over so many draws of luck."""
    ways = ["controller", "oracle", "timely", *STATIC]
    tokens, seconds = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    drafted = rounds = 0
    took: list[float] = []
    for luck in range(lucks):
        for way in ways:
            lucky = replace(world, luck=luck)
            outcome = run(lucky, "static", way) if isinstance(way, int) else run(lucky, way)
            tokens[way] += outcome.tokens
            seconds[way] += outcome.seconds
            if way == "controller":
                drafted, rounds = drafted + outcome.drafted, rounds + outcome.rounds
                took += outcome.decide_s
    goodput = {way: tokens[way] / seconds[way] for way in ways}
    own, plain = goodput["controller"], goodput[0]
    best = max(STATIC, key=lambda k: goodput[k])
    took.sort()
    return {
        # Who knows that looking up does not pay would not do it.
        "vs_oracle": own / max(goodput["oracle"], plain),
        "vs_timely": own / max(goodput["timely"], plain),
        "vs_static": own / goodput[best],
        "best_static_k": best,
        "vs_plain": own / plain,
        "drafted": drafted / rounds,
        "decide_ms_p99": 1e3 * took[int(0.99 * (len(took) - 1))],
    }


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument(
        "--lucks", type=int, default=0, help="draws of luck, each a run; default 5, 2 with --quick"
    )
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--real", action="store_true", help="on the real model, through the tiers")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="holds spec_bench (with --real)"
    )
    parser.add_argument("--model", default="smollm2", help="with --real")
    args = parser.parse_args()
    if args.real:
        regret_real.run(args.data, quick=args.quick, model=args.model)
        return
    rows: dict[str, dict[str, float | int]] = {}
    moved: set[str] = set()
    print(f"{'':<44}{'oracle':>8}{'timely':>8}{'static':>8}{'(k)':>4}{'plain':>8}{'k/round':>8}")
    for world in worlds(1.0):
        if args.only not in world.name:
            continue
        row = rows[world.name] = compare(world, args.lucks or (2 if args.quick else 5))
        if world.moved:
            moved.add(world.name)
        print(
            f"{world.name:<44}{row['vs_oracle']:>8.3f}{row['vs_timely']:>8.3f}{row['vs_static']:>8.3f}"
            f"{row['best_static_k']:>4}{row['vs_plain']:>8.3f}{row['drafted']:>8.2f}"
            + (" look-ups moved to the draft tier" if world.moved else ""),
            flush=True,
        )
    result: dict[str, Any] = {"benchmark": "regret", "bars": BARS}
    for key in ("vs_oracle", "vs_timely", "vs_static", "vs_plain"):
        result[f"worst_{key}"] = worst(row[key] for row in rows.values())
        result[f"worst_{key}_as_shipped"] = worst(row[key] for name, row in rows.items() if name not in moved)
    result["scenarios"] = {
        name: {key: round(value, 4) for key, value in row.items()} for name, row in rows.items()
    }
    print("RESULT " + json.dumps(result))


def worst(values: Any) -> float | None:
    """The least one, rounded; None of none."""
    return min((round(value, 4) for value in values), default=None)


if __name__ == "__main__":
    main()
