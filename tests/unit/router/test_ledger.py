"""The ledger: exact sums, one count a batch, the same windows for every router, nothing lost but the last second."""

import asyncio
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import load_config
from paceline.errors import InvalidRequestError
from paceline.types import ProposalOutcome, RoundRecord
from router.ledger.book import RETENTION_S, WINDOWS, Book
from router.ledger.group import Group, batch_bucket, temperature_bucket
from router.ledger.keeper import Batch, Keeper, Update
from router.ledger.memory import Memory, OwnKeeper
from router.ledger.store import KEPT_AUDITS, MIGRATIONS, Audit, Store
from router.ledger.sums import (
    AT,
    FIELDS,
    RoundSums,
    accepted_by_position,
    drafted_by_position,
    nanoseconds,
    no_sums,
)
from router.ledger_set_up import open_keeper

NOW = 1_800_000_000.0


def group(task: str = "code", batch: str = "1", arm: str = "auto") -> Group:
    return Group(task, "", "ngram", "1@x", "coupled", "0", batch, arm)


def record(index: int, rng: random.Random) -> RoundRecord:
    drafted = rng.randrange(9)
    accepted = rng.randint(0, drafted)
    ignored = rng.randint(0, drafted - accepted)
    return RoundRecord(
        index, 10, drafted, accepted, ignored, accepted + 1,
        ProposalOutcome.USED if drafted else rng.choice(list(ProposalOutcome)), "ngram", rng.randint(1, 40), 5,
        *(rng.random() / 7 for _ in range(6)), hidden_draft_s=rng.random() / 9,
    )  # fmt: skip


def one(**values: int) -> np.ndarray:
    row = no_sums()
    for name, value in values.items():
        row[AT[name]] = value
    return row


def test_sums_equal_the_round_records_exactly():
    """Every count, every time to the nanosecond, every position; in whatever order rounds are added."""
    rng = random.Random(1)
    records = [record(index, rng) for index in range(500)]
    sums = RoundSums()
    for one_record in rng.sample(records, len(records)):
        sums.add(one_record)
    row = sums.row()
    spec = [r for r in records if r.drafted]
    expected = {
        "rounds": len(records),
        "spec_rounds": len(spec),
        "drafted": sum(r.drafted for r in records),
        "accepted": sum(r.accepted for r in records),
        "ignored": sum(r.ignored for r in records),
        "emitted": sum(r.committed for r in records),
        "late_rounds": sum(r.outcome is ProposalOutcome.LATE for r in records),
        "exposed_draft_ns": sum(round(r.draft_s * 1e9) for r in records),
        "draft_ns": sum(round(r.draft_s * 1e9) + round(r.hidden_draft_s * 1e9) for r in records),
        "wait_ns": sum(round(r.wait_s * 1e9) for r in records),
        "verify_ns": sum(round(r.verify_s * 1e9) for r in records),
    }
    assert {name: row[AT[name]] for name in expected} == expected
    for position in range(8):
        assert drafted_by_position(row)[position] == sum(r.drafted > position for r in spec)
        assert accepted_by_position(row)[position] == sum(r.accepted > position for r in spec)


@pytest.mark.parametrize(("sequences", "bucket"), [(0, "1"), (1, "1"), (2, "2-4"), (4, "2-4"), (5, "5-10"), (10, "5-10"), (11, "11-31"), (31, "11-31"), (32, "32+"), (900, "32+")])  # fmt: skip
def test_batch_buckets(sequences, bucket):
    """As in the list of buckets, both ends."""
    assert batch_bucket(sequences) == bucket


def test_temperature_buckets():
    """Greedy stands apart."""
    assert [temperature_bucket(t) for t in (0, 0.1, 0.5, 0.7, 1.0, 1.5)] == ["0", "0-0.5", "0-0.5", "0.5-1", "0.5-1", "1+"]  # fmt: skip


def test_windows_hold_what_happened_in_them():
    """Five minutes, an hour, a day, a week."""
    book = Book()
    for age_s in (0, 200, 1800, 7200, 3 * 86400, 30 * 86400):
        book.add(group(), NOW - age_s, one(rounds=1))
    seen = {name: int(book.window(name, NOW, [group()])[AT["rounds"]]) for name in WINDOWS}
    assert seen == {"5m": 2, "1h": 3, "24h": 4, "7d": 5}


def test_what_no_window_reaches_is_forgotten():
    """Minutes after two hours, hours after eight days; groups with them."""
    book = Book()
    book.add(group("old"), NOW - 9 * 86400, one(rounds=1))
    book.add(group("new"), NOW - 3 * 3600, one(rounds=1))
    assert len(book.forget(NOW)) == 3
    assert [g.task for g in book.groups()] == ["new"]
    assert book.window("24h", NOW, [group("new")])[AT["rounds"]] == 1


def running(path: Path | str, **more) -> Keeper:
    keeper = Keeper(str(path), **more)
    keeper.start()
    return keeper


def test_a_ledger_is_the_same_after_a_restart(tmp_path):
    """Rows, documents and audit records come back as they were."""
    path = tmp_path / "ledger.sqlite"
    keeper = running(path)
    rng = random.Random(2)
    updates = []
    for index in range(200):
        sums = RoundSums()
        sums.add(record(index, rng))
        updates.append(
            Update(group(rng.choice("abc"), rng.choice(["1", "2-4"])), time.time() - index, sums.row())
        )
    keeper.take(Batch("router", 1, updates)).result(10)
    keeper.put_document("rules", "{}", [Audit(1.0, "rule", "code", "off by hand", {"x": 1})]).result(10)
    before = {cell: row.tolist() for cell, row in keeper.news().result(10).rows}
    keeper.stop()
    again = running(path)
    news = again.news().result(10)
    assert {cell: row.tolist() for cell, row in news.rows} == before
    assert news.documents["rules"] == "{}"
    assert again.audits(5).result(10)[0].words == "off by hand"
    again.stop()


def test_a_batch_counts_once_however_often_it_is_sent(tmp_path):
    """Also when the writer was restarted between the two."""
    path = tmp_path / "ledger.sqlite"
    batch = Batch("router", 1, [Update(group(), time.time(), one(rounds=3))])
    for _ in range(2):
        keeper = running(path)
        keeper.take(batch).result(10)
        keeper.take(batch).result(10)
        keeper.stop()
    keeper = running(path)
    assert keeper.call(lambda book, now: int(book.window("1h", now, [group()])[AT["rounds"]])).result(10) == 3
    keeper.stop()


def test_a_second_writer_is_refused_the_file_and_goes_on_in_memory(tmp_path):
    """It says why."""
    first = running(tmp_path / "ledger.sqlite")
    second = running(tmp_path / "ledger.sqlite")
    assert "another process" in second.problem
    second.take(Batch("router", 1, [Update(group(), time.time(), one(rounds=1))])).result(10)
    assert first.news().result(10).rows == []
    first.stop()
    second.stop()


def test_a_file_of_a_later_version_is_left_alone(tmp_path):
    """The older program goes on in memory and says so."""
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    keeper = running(path)
    assert "later Paceline" in keeper.problem
    keeper.stop()


def test_every_released_version_can_be_migrated(tmp_path):
    """From each step on, to a store that takes rows."""
    for version in range(len(MIGRATIONS) + 1):
        path = tmp_path / f"{version}.sqlite"
        with sqlite3.connect(path) as db:
            for script in MIGRATIONS[:version]:
                db.executescript(script)
            db.execute(f"PRAGMA user_version = {version}")
        db.close()
        store = Store(str(path))
        store.write([(cell, one(rounds=2)) for cell in Book().add(group(), NOW, one(rounds=2))])
        assert [int(row[AT["rounds"]]) for _, row in store.rows()] == [2, 2]
        store.close()


WRITER = """
import sys, time
from router.ledger.group import Group
from router.ledger.keeper import Batch, Keeper, Update
from router.ledger.sums import AT, no_sums
keeper = Keeper(sys.argv[1]); keeper.start()
row = no_sums(); row[AT["rounds"]] = 1; row[AT["drafted"]] = 4
number = int(sys.argv[2])
while True:
    number += 1
    done = keeper.take(Batch("r", number, [Update(Group(f"task{i}", "", "d", "1", "c", "0", "1", "auto"), time.time(), row) for i in range(5)]))
    if number % 50 == 0:
        done.result(10)
        print(number, flush=True)
"""


def killed(writer: str, path: Path, number: int, *, acknowledgements: int) -> int:
    """The last batch that ``writer`` said was written before kill -9; the file passes its check."""
    with subprocess.Popen(
        [sys.executable, "-c", writer, str(path), str(number)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(acknowledgements)]
        os.kill(process.pid, signal.SIGKILL)
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    return said[-1]


def test_killed_at_any_moment_it_keeps_every_acknowledged_batch_and_is_whole(tmp_path):
    """kill -9 four times in mid-write: acknowledged batches are all there, each exactly once, the file passes its check."""
    path = tmp_path / "ledger.sqlite"
    number = 0
    for round_ in range(4):
        acknowledged = killed(WRITER, path, number, acknowledgements=2 + round_)
        store = Store(str(path))
        number, _ = store.sources()["r"]
        assert number >= acknowledged
        hours = [int(row[AT["rounds"]]) for cell, row in store.rows() if cell.span == 3600]
        assert sum(hours) == 5 * number
        store.close()


def counts(path: Path) -> dict[str, int]:
    """Rows of each table of a ledger's file."""
    with sqlite3.connect(path) as db:
        return {
            name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
            for name in ("groups", "sums", "sources", "audit")
        }


def test_every_table_forgets_what_is_as_old_as_the_sums_that_go(tmp_path, monkeypatch):
    """Groups without rows, sources that are silent, decisions; but not the last ones, nor what is still counted."""
    monkeypatch.setattr("router.ledger.keeper.STEP_S", 0.01)
    path, now = tmp_path / "ledger.sqlite", NOW
    keeper = running(path, clock=lambda: now)
    for number in range(30):
        keeper.take(Batch(f"router{number}", 1, [Update(group(f"t{number}"), NOW, one(rounds=1))]))
    keeper.put_document("rules", "1", [Audit(NOW, "rule", str(n), "", {}) for n in range(300)]).result(10)
    assert counts(path) == {"groups": 30, "sums": 60, "sources": 30, "audit": 300}
    now += RETENTION_S / 2
    again = Batch("router0", 2, [Update(group("t0"), now, one(rounds=1))])
    keeper.take(again).result(10)
    now += RETENTION_S / 2 + 7200
    deadline = time.monotonic() + 10
    while counts(path)["groups"] > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert counts(path) == {"groups": 1, "sums": 1, "sources": 1, "audit": KEPT_AUDITS}
    keeper.take(again).result(10)  # known still
    keeper.take(Batch("router1", 2, [Update(group("t1"), now, one(rounds=1))])).result(
        10
    )  # another's number is free
    keeper.stop()
    store = Store(str(path))
    hours = {cell.group.task: int(row[AT["rounds"]]) for cell, row in store.rows() if cell.span == 3600}
    assert hours == {"t0": 1, "t1": 1}
    assert [audit.subject for audit in store.audits(2)] == ["299", "298"]
    assert store.documents() == {"rules": "1"}
    store.close()


FORGETTING_WRITER = """
import sys
import router.ledger.keeper as module
from router.ledger.group import Group
from router.ledger.keeper import Batch, Keeper, Update
from router.ledger.sums import AT, no_sums
module.FLUSH_S, module.STEP_S, module._FORGET_EVERY_S = 0.005, 0.0, 0.0
path, number = sys.argv[1], int(sys.argv[2])
clock = lambda: 1.8e9 + 3600 * number
keeper = Keeper(path, clock=clock); keeper.start()
row = no_sums(); row[AT["rounds"]] = 1
while True:
    number += 1
    groups = [Group(task, "", "d", "1", "c", "0", "1", "auto") for task in ("always", f"once{number}")]
    done = keeper.take(Batch("r", number, [Update(group, clock(), row) for group in groups]))
    if number % 300 == 0:
        done.result(10)
        print(number, flush=True)
"""


def test_killed_while_it_forgets_nothing_is_lost_that_counts(tmp_path):
    """An hour a batch, kill -9: every row of the last eight days is there once, with its group; what is older is going."""
    path, number = tmp_path / "ledger.sqlite", 0
    kept = RETENTION_S // 3600
    for round_ in range(2):
        acknowledged = killed(FORGETTING_WRITER, path, number, acknowledgements=2 + round_)
        with sqlite3.connect(path) as db:
            lost = "SELECT count(*) FROM sums WHERE group_id NOT IN (SELECT id FROM groups)"
            assert db.execute(lost).fetchone() == (0,)
        db.close()
        store = Store(str(path))
        number, _ = store.sources()["r"]
        assert number >= acknowledged
        hours = {
            (cell.group.task, cell.start): int(row[AT["rounds"]])
            for cell, row in store.rows()
            if cell.span == 3600
        }
        assert set(hours.values()) == {1}
        for n in range(max(1, number - kept + 1), number + 1):
            assert ("always", 1_800_000_000 + 3600 * n) in hours
            assert (f"once{n}", 1_800_000_000 + 3600 * n) in hours
        store.close()
    assert number > 2 * kept
    running(path, clock=lambda: 1.8e9 + 3600 * number).stop()
    assert counts(path)["groups"] <= kept + 3


def test_a_ledger_of_an_earlier_version_can_be_read(tmp_path):
    """Beside the program that wrote it: it is not changed."""
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript(MIGRATIONS[0] + "PRAGMA user_version = 1; INSERT INTO sources VALUES ('r', 7);")
        db.execute("INSERT INTO documents VALUES ('rules', '[]')")
    db.close()
    store = Store.to_read(str(path))
    assert (store.documents(), list(store.rows())) == ({"rules": "[]"}, [])
    store.close()
    store = Store(str(path))
    assert store.sources()["r"] == (7, pytest.approx(time.time(), abs=5))
    store.close()


def test_two_routers_agree_and_decide_from_memory_while_the_writer_is_away():
    """What one did the other knows after an exchange; an away writer loses nothing and adds nothing twice."""

    class Flaky(OwnKeeper):
        """Takes the batch, and says nothing, as long as ``away``."""

        away = False

        async def exchange(self, batch, epoch, since):
            news = await super().exchange(batch, epoch, since)
            if self.away:
                raise OSError("gone")
            return news

    def rounds(memory: Memory) -> int:
        return int(memory.window("1h", lambda g: g.task == "code")[AT["rounds"]])

    async def scenario() -> None:
        keeper = running("")
        writer = Flaky(keeper)
        a, b = Memory(writer), Memory(writer)
        a.add(group(), one(rounds=3))
        assert rounds(a) == 3
        await a.exchange()
        await b.exchange()
        assert rounds(a) == rounds(b) == 3
        writer.away = True
        for memory in (a, b):
            memory.add(group(), one(rounds=1))
            with pytest.raises(OSError, match="gone"):
                await memory.exchange()
            memory.add(group(batch="2-4"), one(rounds=1))
            assert rounds(memory) == 5
        writer.away = False
        for memory in (a, b, a, b, a):
            await memory.exchange()
        assert rounds(a) == rounds(b) == 7
        keeper.stop()

    asyncio.run(scenario())


def test_a_disk_that_is_full_for_a_while_loses_nothing(monkeypatch):
    """The router goes on from memory and hands over what it has once the disk takes it; a rule is refused meanwhile."""
    full = True
    write = Store.write

    def may_fail(store: Store, rows, **more) -> None:
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        write(store, rows, **more)

    async def scenario() -> None:
        nonlocal full
        keeper = running("")
        writer = OwnKeeper(keeper)
        memory = Memory(writer)
        memory.start()
        memory.add(group(), one(rounds=3))
        while memory.away_since is None:
            await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="disk is full"):
            await writer.put_document("rules", "", "[]", Audit(NOW, "rule", "", "", {}))
        memory.add(group(), one(rounds=1))
        full = False
        while memory.away_since is not None:
            await asyncio.sleep(0.01)
        await memory.stop()
        counted = keeper.call(lambda book, now: int(book.window("1h", now, [group()])[AT["rounds"]]))
        assert counted.result(10) == 4
        keeper.stop()

    monkeypatch.setattr(Store, "write", may_fail)
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_writer_that_lost_its_memory_is_believed():
    """A new life of the keeper: what the old one knew is not mixed in."""

    async def scenario() -> None:
        first = running("")
        memory = Memory(OwnKeeper(first))
        memory.add(group(), one(rounds=3))
        await memory.exchange()
        first.stop()
        second = running("")
        memory._writer = OwnKeeper(second)
        memory.add(group(), one(rounds=2))
        await memory.exchange()
        assert memory.window("1h", lambda g: True)[AT["rounds"]] == 2
        second.stop()

    asyncio.run(scenario())


def test_a_batch_that_the_writer_refuses_does_not_hold_up_the_next(caplog):
    """Its sums are lost, which is said once; those behind it are counted."""

    class Refusing(OwnKeeper):
        refused = 0

        async def exchange(self, batch, epoch, since):
            if batch is not None and self.refused < 2:
                self.refused += 1
                raise InvalidRequestError.single("updates[0].at", "ahead")
            return await super().exchange(batch, epoch, since)

    async def scenario() -> None:
        keeper = running("")
        memory = Memory(Refusing(keeper))
        for rounds in (1, 2, 4):
            memory.add(group(), one(rounds=rounds))
            await memory.exchange()
        assert memory.window("1h", lambda g: True)[AT["rounds"]] == 4
        keeper.stop()

    asyncio.run(scenario())
    assert caplog.text.count("they are lost") == 1


def test_days_without_the_writer_are_handed_over_by_the_hour():
    """Of a week only the last two hours go minute by minute, here and on the wire; no sum is missing."""

    async def scenario() -> None:
        now = time.time() - 3 * 86_400
        taken: list[Batch] = []

        class Away(OwnKeeper):
            async def exchange(self, batch, epoch, since):
                if now < time.time() - 60:
                    raise OSError("away")
                taken.append(batch)
                return await super().exchange(batch, epoch, since)

        keeper = running("")
        memory = Memory(Away(keeper), clock=lambda: now)
        minutes = 3 * 1440
        for minute in range(minutes):
            now += 60
            memory.add(group(), one(rounds=1), {("ttft", 3): 1})
            if not minute % 60:
                memory.forget()
        memory.add(group(), one(rounds=1))
        await memory.exchange()
        assert memory.window("7d", lambda g: True)[AT["rounds"]] == minutes + 1
        assert len(taken[0].updates) < 72 + 121
        assert sum(sum(update.bins.values()) for update in taken[0].updates) == minutes
        keeper.stop()

    asyncio.run(scenario())


def test_a_time_that_cannot_be_counts_as_one_that_can():
    """A difference of clock readings that rounding has made negative must not have a router's sums refused, nor nonsense end a request."""
    assert [nanoseconds(seconds) for seconds in (-1e-9, 0.0, 1e-9, math.nan)] == [0, 0, 1, 0]
    assert nanoseconds(1e300) == nanoseconds(math.inf) == 10**18


def test_sums_beyond_what_can_be_counted_stay_there():
    """They do not become negative, in a row or in a window."""
    book = Book()
    for task in "abc":
        for _ in range(3):
            book.add(group(task), NOW, one(rounds=2**62 - 1))
    assert book.window("1h", NOW, [group(task) for task in "abc"])[AT["rounds"]] == 2**62 - 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**40)), max_size=40), st.randoms())
def test_the_order_of_updates_does_not_matter(updates, rng):
    """Sums are whole numbers: two books that heard the same in another order are equal."""
    shuffled = list(updates)
    rng.shuffle(shuffled)
    books = (Book(), Book())
    for book, order in zip(books, (updates, shuffled), strict=True):
        for task, value in order:
            book.add(group(str(task)), NOW, one(verify_ns=value))
    seen = [{cell: row.tolist() for cell, row in book.items()} for book in books]
    assert seen[0] == seen[1]


def test_fields_have_one_name_each():
    """A row's columns are named once."""
    assert len(set(FIELDS)) == len(FIELDS)


class Stumbling:
    """A judge that raises whatever it is asked."""

    name = "stumbling"

    def __getattr__(self, name: str):
        raise RuntimeError(f"stumbled at {name}")


def test_no_judge_ends_the_ledger(tmp_path, caplog, monkeypatch):
    """Restoring, hearing, observing, stepping: what fails in it is said once, all else is counted and written."""
    monkeypatch.setattr("router.ledger.keeper.STEP_S", 0.01)
    path = tmp_path / "ledger.sqlite"
    first = running(path)
    first.put_document("stumbling", "{}").result(10)
    first.stop()
    keeper = running(path, judges=[Stumbling()])
    for number in (1, 2):
        keeper.take(Batch("router", number, [Update(group(), time.time(), one(rounds=1))])).result(10)
        keeper.put_document("rules", "[]").result(10)
    assert sum(int(row[AT["rounds"]]) for _, row in keeper.news().result(10).rows) == 4  # minute and hour
    keeper.stop()
    assert caplog.text.count("a judge failed") == 1


GUARDED = {
    "task": "qa", "drafter": "x", "state": "on", "since": 1.0, "reason": "", "switches": 1, "recent_offs": [], "cooled": 0,
}  # fmt: skip
WAY = {"speed": {}, "bins": {"gap": [], "ttft": []}, "requests": 0}
ROLLED = {
    "task": "qa", "drafter": "x", "stage": "canary", "share": 0.5, "since": 1.0, "reason": "", "windows": 0, "looked_at": 0,
    "window": WAY, "speculative": WAY, "plain": WAY,
}  # fmt: skip
BAD_DOCUMENTS = [
    ("rules", "x"),
    ("rules", "{}"),
    ("rules", '[{"action": "nope"}]'),
    ("rules", '[{"action": "plain", "k": "4"}]'),
    ("rules", '[{"action": "plain", "other": 4}]'),
    ("rollout_orders", "{"),
    ("rollout_orders", "[5]"),
    ("rollout_orders", '[{"number": 1, "said": "stop", "task": "code"}]'),
    ("rollout_orders", '[{"number": "1", "said": "stop", "task": "code", "drafter": "ngram"}]'),
    ("rollout_orders", '[{"number": 1, "said": "set", "task": "a", "drafter": "b", "share": NaN}]'),
    ("rollout_orders", '[{"number": 1, "said": "set", "task": "a", "drafter": "b", "share": 2}]'),
    ("rollout", "{}"),
    ("guard", "{}x"),
    ("guard", "[1]"),
    ("holdout", "[1]"),
    ("holdout", '[["qa", "auto", "gap", [[1, "x"]]]]'),
    ("holdout", '[["qa", "auto", "gap", [[1, -5]]]]'),
    ("holdout", '[[5, "auto", "gap", [[1, 1]]]]'),
    ("rules", f'[{{"action": "plain", "k": {2**70}}}]'),
    ("rules", '[{"action": "plain", "note": "\\ud800"}]'),
    ("rollout_orders", '[{"number": 1, "said": "stop", "task": "a", "drafter": "b", "note": "\\ud800"}]'),
    ("rollout_orders", '[{"number": 1, "said": "stop", "task": "a", "drafter": "b", "at": 1e300}]'),
    *(
        ("guard", json.dumps([GUARDED | wrong]))
        for wrong in ({"since": "x"}, {"reason": 5}, {"drafter": None})
    ),
    *(("guard", json.dumps([GUARDED | wrong])) for wrong in ({"switches": 2**70}, {"recent_offs": ["a"]})),
    *(
        ("rollout", json.dumps({"applied": 0, "lines": [ROLLED | wrong]}))
        for wrong in ({"share": "a"}, {"task": 5})
    ),
    ("rollout", '{"applied": "x", "lines": []}'),
]


def test_a_document_that_nobody_could_read_is_refused(tmp_path):
    """Whether it replaces one or is the first; the thread goes on, the next one is taken."""
    keeper = open_keeper(load_config(None, ["router.rollout.gate=on"]).router)
    keeper.start()
    try:
        for name, value in BAD_DOCUMENTS:
            with pytest.raises(InvalidRequestError, match=name):
                keeper.put_document(name, value).result(10)
            with pytest.raises(InvalidRequestError, match=name):
                keeper.replace_document(name, "", value, []).result(10)
        assert keeper.replace_document("rules", "", "[]", []).result(10) == (True, "[]")
        assert dict(keeper.news().result(10).documents) == {"rules": "[]"}
    finally:
        keeper.stop()


def test_documents_in_the_file_that_nobody_can_read_are_gone_on_without(tmp_path, caplog):
    """They are named; the ledger and what can be read of it are there, and a new document takes the place."""
    path = tmp_path / "ledger.sqlite"
    store = Store(str(path))
    for name, value in BAD_DOCUMENTS:
        store.write([], documents={name: value})
    store.close()
    keeper = open_keeper(load_config(None, [f"router.ledger.path='{path}'"]).router)
    assert keeper.problem == ""
    for name in {name for name, _ in BAD_DOCUMENTS}:
        assert name in {getattr(record, "document", "") for record in caplog.records}
    keeper.start()
    assert keeper.news().result(10).documents == {}
    assert keeper.replace_document("rules", "", "[]", []).result(10)[0]
    keeper.stop()
    store = Store.to_read(str(path))
    assert store.documents()["rules"] == "[]"
    store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE sums SET accepted_by_position = '[1, '",
        "UPDATE sums SET accepted_by_position = x'90'",
        "UPDATE sums SET drafted_by_position = '7'",
        "UPDATE sums SET drafted = 'many'",
        "UPDATE sums SET span = 7",
        "UPDATE sources SET batch = 'last'",
        "UPDATE sources SET at = 'yesterday'",
    ],
)
def test_a_damaged_file_is_gone_on_without(tmp_path, damage):
    """As one that cannot be opened: the router starts, and says why it counts in memory; the file stays as it is."""
    path = tmp_path / "ledger.sqlite"
    update = Update(group(), time.time(), one(rounds=3))
    keeper = running(path)
    keeper.take(Batch("router", 1, [update])).result(10)
    keeper.stop()
    with sqlite3.connect(path) as db:
        db.execute(damage)
    db.close()
    keeper = running(path)
    assert str(path) in keeper.problem
    keeper.take(Batch("router", 1, [update])).result(10)
    keeper.stop()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM sums").fetchone() == (2,)
    db.close()


def test_who_does_not_wait_any_longer_stops_nothing():
    """Cancelled before its turn: looked up, put or taken, the next one is answered."""
    keeper = Keeper("")
    for done in (keeper.news(), keeper.put_document("a", "b"), keeper.replace_document("a", "", "c", [])):
        assert done.cancel()
    keeper.start()
    assert keeper.news().result(10).documents == {"a": "b"}
    keeper.stop()


def test_who_gives_up_in_the_moment_of_the_answer_stops_nothing():
    """The writer's thread is everybody's."""

    class GivesUp(Future):
        def cancelled(self):
            found = super().cancelled()
            self.cancel()
            return found

        def set_result(self, result):
            self.cancel()
            super().set_result(result)

    keeper = running("")
    keeper.call(lambda _book, _now: keeper._unwritten.append(GivesUp())).result(10)
    keeper.take(Batch("router", 1, [Update(group(), time.time(), one(rounds=1))])).result(10)
    keeper.stop()


def test_nothing_is_put_beside_or_into_a_file_that_is_no_ledger(tmp_path):
    """A text, a directory, another program's database: kept in memory instead, and all is as it was."""
    (tmp_path / "text").write_text("dear" * 2000)
    (tmp_path / "directory").mkdir()
    db = sqlite3.connect(tmp_path / "other")
    db.execute("CREATE TABLE mine (a int)")
    db.commit()
    db.close()
    before = {path.name: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    for name in before:
        keeper = Keeper(str(tmp_path / name))
        assert name in keeper.problem
        keeper.start()
        keeper.put_document("rules", "[]").result(10)
        keeper.stop()
    assert {path.name: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before
