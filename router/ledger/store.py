"""The ledger on disk: SQLite in WAL mode, one writer.

A transaction is there whole or not at all, whenever the process is killed. Only the operating system going down can take
the last transactions with it (``synchronous = NORMAL``); it does not damage the file either.
"""

# ruff: noqa: S608  # only our own column names are put into statements
import contextlib
import fcntl
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np

from router.ledger.book import HOUR_S, MINUTE_S, Cell
from router.ledger.group import GROUP_FIELDS, Group
from router.ledger.sums import (
    COUNTS,
    SPEED,
    TIMES,
    YIELD,
    Row,
    accepted_by_position,
    drafted_by_position,
    no_sums,
)

_logger = logging.getLogger(__name__)

_SCALARS = (*COUNTS, *TIMES, *SPEED, *YIELD)

# Step i takes a file of version i to version i + 1. Steps that were released are never changed.
MIGRATIONS: tuple[str, ...] = (
    f"""
    CREATE TABLE groups (id INTEGER PRIMARY KEY, {", ".join(f"{name} TEXT NOT NULL" for name in GROUP_FIELDS)},
        UNIQUE ({", ".join(GROUP_FIELDS)}));
    CREATE TABLE sums (group_id INTEGER NOT NULL REFERENCES groups (id), span INTEGER NOT NULL, start INTEGER NOT NULL,
        {", ".join(f"{name} INTEGER NOT NULL" for name in _SCALARS)},
        drafted_by_position TEXT NOT NULL, accepted_by_position TEXT NOT NULL,
        PRIMARY KEY (group_id, span, start)) WITHOUT ROWID;
    CREATE TABLE sources (name TEXT PRIMARY KEY, batch INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE documents (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE audit (id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL,
        words TEXT NOT NULL, facts TEXT NOT NULL);
    """,
    # Sources known so far count as heard now.
    """
    ALTER TABLE sources ADD COLUMN at REAL NOT NULL DEFAULT 0;
    UPDATE sources SET at = strftime('%s', 'now');
    """,
)
KEPT_AUDITS = 200
"""So many of the newest decisions stay however old they are: what is in force was decided by one of them."""


class LedgerBusyError(Exception):
    """Another process writes this ledger."""


@dataclass(frozen=True, slots=True)
class Audit:
    """One decision that changed what is decided: who, what, when, why."""

    at: float
    kind: str
    subject: str
    words: str
    facts: Mapping[str, float | int | str]


class Store:
    """The open file. Belongs to one thread at a time. An empty path keeps all in memory."""

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        """Raises LedgerBusyError where another writer has the file, sqlite3.Error or OSError where it cannot be used."""
        self._lock: TextIO | None = None
        self._ids: dict[Group, int] = {}
        if read_only:
            self._db = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)
            self._check_version()
            return
        self._db = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        try:
            with _sound():  # of a damaged file sqlite3 cannot even read what is wrong
                self._check_not_anothers()  # first: nothing is written into, or put beside, what is somebody else's
            self._lock = _locked(path) if path else None
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._migrate()
        except BaseException:
            self.close()
            raise

    @classmethod
    def to_read(cls, path: str) -> Self:
        """The store at ``path`` beside its writer, for looking only. Raises sqlite3.Error where it is no ledger."""
        return cls(path, read_only=True)

    @classmethod
    def opened(cls, path: str) -> Self:
        """The store at ``path``, its directory made."""
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        return cls(path)

    def close(self) -> None:
        """Idempotent."""
        self._db.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # --- reading, at the start ---

    def rows(self) -> Iterator[tuple[Cell, Row]]:
        """Everything that is kept. Raises sqlite3.Error where the file is damaged."""
        columns = ", ".join(
            (*GROUP_FIELDS, "span", "start", *_SCALARS, "drafted_by_position", "accepted_by_position")
        )
        for found in self._db.execute(f"SELECT {columns} FROM sums JOIN groups ON groups.id = group_id"):
            with _sound():
                cell, row = _read(found)
            yield cell, row

    def sources(self) -> dict[str, tuple[int, float]]:
        """The last batch taken from each source, and when."""
        with _sound():
            return {
                str(name): (int(batch), float(at))
                for name, batch, at in self._db.execute("SELECT * FROM sources")
            }

    def documents(self) -> dict[str, str]:
        """State of guard and rules, as their owners wrote it."""
        return dict(self._db.execute("SELECT name, value FROM documents"))

    def audits(self, limit: int) -> list[Audit]:
        """Newest first."""
        found = self._db.execute(
            "SELECT at, kind, subject, words, facts FROM audit ORDER BY id DESC LIMIT ?", (limit,)
        )
        return [
            Audit(at, kind, subject, words, json.loads(facts)) for at, kind, subject, words, facts in found
        ]

    # --- writing ---

    def write(
        self,
        rows: Iterable[tuple[Cell, Row]],
        *,
        gone: Iterable[Cell] = (),
        sources: Mapping[str, tuple[int, float]] = {},
        documents: Mapping[str, str] = {},
        audits: Iterable[Audit] = (),
        since: float | None = None,
    ) -> None:
        """All of it, or nothing, in one transaction. Rows replace those of their cells.

        ``since``: sources and decisions of before it go as well, and groups that have no row any more.
        """
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(_PUT_ROW, (self._values(cell, row) for cell, row in rows))
            self._db.executemany(
                "DELETE FROM sums WHERE group_id = ? AND span = ? AND start = ?",
                ((self._id(cell.group), cell.span, cell.start) for cell in gone),
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO sources VALUES (?, ?, ?)",
                ((name, batch, at) for name, (batch, at) in sources.items()),
            )
            self._db.executemany("INSERT OR REPLACE INTO documents VALUES (?, ?)", documents.items())
            self._db.executemany(
                "INSERT INTO audit (at, kind, subject, words, facts) VALUES (?, ?, ?, ?, ?)",
                ((a.at, a.kind, a.subject, a.words, json.dumps(dict(a.facts))) for a in audits),
            )
            if since is not None:
                self._prune(since)
            self._db.execute("COMMIT")
        except BaseException:
            self._ids.clear()  # some may have been given out in the transaction that is undone
            self._db.execute("ROLLBACK")
            raise

    def _prune(self, since: float) -> None:
        self._db.execute("DELETE FROM sources WHERE at < ?", (since,))
        self._db.execute(
            "DELETE FROM audit WHERE at < ? AND id NOT IN (SELECT id FROM audit ORDER BY id DESC LIMIT ?)",
            (since, KEPT_AUDITS),
        )
        self._db.execute(
            "DELETE FROM groups WHERE NOT EXISTS (SELECT 1 FROM sums WHERE group_id = groups.id)"
        )
        self._ids.clear()  # a number that is free again may be given to another group

    def _values(self, cell: Cell, row: Row) -> tuple[int | str, ...]:
        return (
            self._id(cell.group),
            cell.span,
            cell.start,
            *row[: len(_SCALARS)].tolist(),
            _trimmed(drafted_by_position(row)),
            _trimmed(accepted_by_position(row)),
        )

    def _id(self, group: Group) -> int:
        known = self._ids.get(group)
        if known is None:
            marks = ", ".join("?" * len(GROUP_FIELDS))
            self._db.execute(
                f"INSERT OR IGNORE INTO groups ({', '.join(GROUP_FIELDS)}) VALUES ({marks})", group.values
            )
            where = " AND ".join(f"{name} = ?" for name in GROUP_FIELDS)
            (known,) = self._db.execute(f"SELECT id FROM groups WHERE {where}", group.values).fetchone()
            self._ids[group] = known
        return int(known)

    def _check_version(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if not 1 <= version <= len(MIGRATIONS):  # what is read beside the writer is in all of them
            self._db.close()
            raise sqlite3.DatabaseError(
                f"version {version} where {len(MIGRATIONS)} is expected: no ledger, or one of another Paceline"
            )

    def _check_not_anothers(self) -> None:
        # In this order: another writer may be making its tables, which come with their version.
        (things,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if things and not version:
            raise sqlite3.DatabaseError("a database of something else: no ledger")

    def _migrate(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise sqlite3.DatabaseError(
                f"the ledger has version {version}, written by a later Paceline; this one knows {len(MIGRATIONS)}"
            )
        for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
            self._db.executescript(f"BEGIN; {script} PRAGMA user_version = {number}; COMMIT;")
            if version:
                _logger.info("ledger migrated", extra={"version": number})


_PUT_ROW = f"INSERT OR REPLACE INTO sums VALUES ({', '.join('?' * (5 + len(_SCALARS)))})"


@contextlib.contextmanager
def _sound() -> Iterator[None]:
    """What a damaged file holds may be of any kind. Raises sqlite3.DatabaseError."""
    try:
        yield
    except (ValueError, TypeError, OverflowError) as error:
        raise sqlite3.DatabaseError(f"damaged: {error}") from error


def _read(found: Sequence[Any]) -> tuple[Cell, Row]:
    names, rest = found[: len(GROUP_FIELDS)], found[len(GROUP_FIELDS) :]
    row = no_sums()
    row[: len(_SCALARS)] = rest[2:-2]
    for part, text in ((drafted_by_position(row), rest[-2]), (accepted_by_position(row), rest[-1])):
        values = json.loads(text)
        part[: len(values)] = values
    if (span := int(rest[0])) not in (MINUTE_S, HOUR_S):
        raise ValueError(f"a row of {span} s")
    return Cell(Group(*map(str, names)), span, int(rest[1])), row


def _trimmed(values: Row) -> str:
    """As JSON, without the zeros behind the last one that counts."""
    last = np.flatnonzero(values)
    return json.dumps(values[: last[-1] + 1].tolist() if len(last) else [])


def _locked(path: str) -> TextIO:
    """A lock on the ledger that ends with the process, however it ends."""
    lock = Path(f"{path}.lock").open("w", encoding="ascii")  # noqa: SIM115  # held until close
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise LedgerBusyError(f"{path} is written by another process") from error
    return lock
