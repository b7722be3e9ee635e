"""The ledger: updates a second through its one writer to disk, what a look costs, and that two readers agree.

    python -m benchmarks.ledger --quick

Sixteen sources send batches of their own, each waiting until its last one is on disk, as routers do. Figures are wall
clock on the whole and processor time of this process beside it.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

from router.guard import Guard
from router.holdout import Holdout
from router.ledger.book import WINDOWS
from router.ledger.group import Group
from router.ledger.keeper import Batch, Keeper, Update
from router.ledger.memory import Memory, OwnKeeper
from router.ledger.sums import AT, Row, add_speed, no_sums

BAR_UPDATES = 5000
SOURCES = 16
UPDATES_A_BATCH = 400


def one(rng: random.Random) -> Row:
    row = no_sums()
    for name, value in {
        "requests": 1,
        "rounds": 20,
        "spec_rounds": 10,
        "drafted": 40,
        "accepted": 22,
        "emitted": 42,
    }.items():
        row[AT[name]] = value
    add_speed(row, 42, rng.uniform(0.5, 2))
    return row


def groups(number: int) -> list[Group]:
    rng = random.Random(1)
    tasks = ("code", "rag", "qa", "summarization", "rewriting", "extraction")
    return [
        Group(
            rng.choice(tasks),
            "",
            "ngram",
            "1@x",
            "coupled",
            rng.choice(["0", "0.5-1"]),
            rng.choice(["1", "2-4", "5-10"]),
            "auto",
        )
        for _ in range(number)
    ]


async def updates_a_second(path: str, seconds: float) -> tuple[float, float, int]:
    """Updates a second by wall clock and by processor time, and how many there were."""
    keeper = Keeper(path, judges=[Guard(), Holdout()])
    keeper.start()
    rng, where = random.Random(2), groups(60)
    rows = [one(rng) for _ in range(50)]
    sent = 0
    until = time.perf_counter() + seconds

    async def source(name: str) -> None:
        nonlocal sent
        number = 0
        while time.perf_counter() < until:
            number += 1
            updates = [
                Update(rng.choice(where), time.time(), rng.choice(rows)) for _ in range(UPDATES_A_BATCH)
            ]
            await asyncio.wrap_future(keeper.take(Batch(name, number, updates)))
            sent += len(updates)

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(source(f"router-{i}") for i in range(SOURCES)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    counted = keeper.call(
        lambda book, now: int(book.window("24h", now, book.groups())[AT["requests"]])
    ).result()
    keeper.stop()
    assert counted == sent, f"{counted} counted of {sent}"
    return sent / wall, sent / cpu, sent


async def two_agree() -> bool:
    """Two memories over one keeper show the same sums in every window."""
    keeper = Keeper("")
    keeper.start()
    a, b = Memory(OwnKeeper(keeper)), Memory(OwnKeeper(keeper))
    rng = random.Random(3)
    for group in groups(500):
        rng.choice((a, b)).add(group, one(rng))
    for memory in (a, b, a):
        await memory.exchange()
    same = all((a.window(w, lambda g: True) == b.window(w, lambda g: True)).all() for w in WINDOWS)
    keeper.stop()
    return same


def look_us() -> float:
    """Processor time of one look at a week of one task's sums, 30 groups of it, in microseconds."""
    memory = Memory(OwnKeeper(Keeper("")))
    now = time.time()
    rng = random.Random(4)
    for group in groups(60):
        for hour in range(168):
            memory._told.add(group, now - 3600 * hour, one(rng))
    started = time.process_time()
    for _ in range(20):
        memory.window("7d", lambda group: group.task == "code")
    return (time.process_time() - started) / 20 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="seconds instead of a minute")
    seconds = 5.0 if parser.parse_args().quick else 60.0
    with tempfile.TemporaryDirectory() as directory:
        wall, cpu, sent = asyncio.run(updates_a_second(str(Path(directory) / "ledger.sqlite"), seconds))
    agree = asyncio.run(two_agree())
    look = look_us()
    print(
        f"{sent} updates: {wall:.0f} a second by the clock, {cpu:.0f} a second of processor time; all counted"
    )
    print(f"two routers agree: {agree}; a look at a week of one task: {look:.0f} us")
    figures = {
        "updates_per_s": round(wall), "updates_per_cpu_s": round(cpu), "bar_updates_per_s": BAR_UPDATES,
        "two_routers_agree": agree, "look_us": round(look),
        "met": wall >= BAR_UPDATES and agree,
    }  # fmt: skip
    print("RESULT " + json.dumps(figures))


if __name__ == "__main__":
    main()
