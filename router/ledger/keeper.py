"""The one writer of the ledger: takes batches of sums, keeps them on disk, tells what changed.

Everything happens on the keeper's own thread; callers get futures. A batch is acknowledged when it is on disk, and is
counted once however often it is sent: each source numbers its batches.
"""

import contextlib
import itertools
import logging
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from paceline.errors import InvalidRequestError
from router.ledger.book import RETENTION_S, Book, Cell
from router.ledger.group import Group
from router.ledger.store import Audit, LedgerBusyError, Store
from router.ledger.sums import Row

_logger = logging.getLogger(__name__)

FLUSH_S = 0.2
"""Longest time between a batch and the disk: the most that a killed process can lose."""
STEP_S = 1.0
"""Between two looks of the judges."""
_FORGET_EVERY_S = 600.0

T = TypeVar("T")
Bins = Mapping[tuple[str, int], int]
"""How many requests had a time in a bin: (name of the time, bin)."""


@dataclass(frozen=True, slots=True)
class Update:
    """Sums to add to a group at a time (unix seconds)."""

    group: Group
    at: float
    row: Row
    bins: Bins = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """Updates of one source, which numbers its batches from 1 on."""

    source: str
    number: int
    updates: Sequence[Update]


@dataclass(frozen=True, slots=True)
class News:
    """What a reader who knows all up to some version has to hear to know all up to ``version``.

    Versions count within one ``epoch``, a life of the keeper: a reader of another epoch forgets what it knew.
    """

    epoch: str
    version: int
    rows: Sequence[tuple[Cell, Row]]
    documents: Mapping[str, str]


class Judge(Protocol):
    """Looks at the sums now and then and decides something that must outlive the process."""

    name: str
    """Of the document that holds its state."""

    def restore(self, document: str) -> None:
        """Go on from a state that ``step`` gave once."""

    def heard(self, name: str, value: str) -> None:
        """A document was written, by whomever."""

    def observe(self, group: Group, row: Row, bins: Bins) -> None:
        """Sums of one request or several."""

    def step(self, book: Book, now: float) -> tuple[str, Sequence[Audit]] | None:
        """The new state and what was decided; None where nothing changed."""


class Keeper:
    """Owner of store and book."""

    def __init__(
        self,
        path: str,
        *,
        judges: Sequence[Judge] = (),
        readers: Mapping[str, Callable[[str], object]] = {},
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``path`` empty: kept in memory. So it is where the file cannot be used, too: ``problem`` then says why.

        ``readers``: by name of a document what raises where one cannot be read; such a one is refused, and one that the file
        holds is gone on without.
        """
        self.problem = ""
        self._clock = clock
        self._readers = readers
        self.for_operators = frozenset(readers) - {judge.name for judge in judges}
        """Names of the documents that others write; the judges write their own."""
        self._failing: set[str] = set()
        """Judges that failed when they were last asked: said once."""
        self._store, kept = self._open(path)
        self._book = Book()
        self._judges = judges
        self._sources = kept.sources  # the last batch of each, and when it came
        self._documents = self._readable(kept.documents)
        self._epoch = secrets.token_hex(8)
        self._version = 1
        self._row_versions: dict[Cell, int] = {}
        """In rising order: of a week's rows only those that changed are looked at."""
        self._document_versions = dict.fromkeys(self._documents, self._version)
        for cell, row in kept.rows:
            self._book.put(cell, row)
            self._row_versions[cell] = self._version
        for judge in judges:
            if judge.name in self._documents:
                with self._survived(judge):
                    judge.restore(self._documents[judge.name])
            for name, value in self._documents.items():
                with self._survived(judge):
                    judge.heard(name, value)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # What is not on disk yet.
        self._dirty: set[Cell] = set()
        self._dirty_sources: set[str] = set()
        self._dirty_documents: set[str] = set()
        self._gone: list[Cell] = []
        self._forget_before: float | None = None
        self._audits: list[Audit] = []
        self._unwritten: list[Future[None]] = []
        self._unwritable = False
        self._next_flush = self._next_step = self._next_forget = 0.0
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)

    def _open(self, path: str) -> tuple[Store, "_Kept"]:
        try:
            return _opened(path)
        except (LedgerBusyError, sqlite3.Error, OSError) as error:
            self.problem = f"{path}: {error}"
            _logger.error("the ledger is kept in memory only", extra={"problem": self.problem})
            return _opened("")

    def _readable(self, documents: Mapping[str, str]) -> dict[str, str]:
        kept = {}
        for name, value in documents.items():
            if why := self._why_unreadable(name, value):
                _logger.error(
                    "a document of the ledger cannot be read; going on without",
                    extra={"document": name, "why": why},
                )
            else:
                kept[name] = value
        return kept

    def _why_unreadable(self, name: str, value: str) -> str:
        try:
            self._readers.get(name, str)(value)
        except Exception as error:  # whatever a reader stumbles over
            return f"{type(error).__name__}: {error}"
        return ""

    @contextlib.contextmanager
    def _survived(self, judge: Judge) -> Iterator[None]:
        """One judge's fault is not the ledger's."""
        try:
            yield
        except Exception:
            if judge.name not in self._failing:
                self._failing.add(judge.name)
                _logger.exception("a judge failed; the ledger goes on", extra={"judge": judge.name})
        else:
            self._failing.discard(judge.name)

    def start(self) -> None:
        """Begin to take batches."""
        self._thread.start()

    def stop(self) -> None:
        """Write what there is and close the file. Once, after ``start``."""
        self._inbox.put(None)
        self._thread.join()

    # --- from any thread ---

    def take(self, batch: Batch) -> "Future[None]":
        """Count ``batch``, unless it was counted before; done when it is on disk."""
        done: Future[None] = Future()
        self._inbox.put(lambda: self._take(batch, done))
        return done

    def news(self, epoch: str = "", since: int = 0) -> "Future[News]":
        """What changed behind version ``since`` of ``epoch``; everything where the epoch is another."""
        return self.call(lambda _book, _now: self._news(since if epoch == self._epoch else 0))

    def put_document(self, name: str, value: str, audits: Sequence[Audit] = ()) -> "Future[None]":
        """Replace a document and put down why; done when it is on disk. InvalidRequestError: nobody could read it."""
        done: Future[None] = Future()

        def put() -> None:
            if why := self._why_unreadable(name, value):
                _fail(done, _unreadable(name, why))
                return
            self._put_document(name, value, audits)
            self._unwritten.append(done)

        self._inbox.put(put)
        return done

    def replace_document(
        self, name: str, expected: str, value: str, audits: Sequence[Audit]
    ) -> "Future[tuple[bool, str]]":
        """Replace a document if it is ``expected`` ("" if there is none); whether it was, and what it is now, on disk.

        Where ``value`` is what it is already, nothing happens, and ``audits``, which would say that it did, are not kept.
        InvalidRequestError: nobody could read ``value``.
        """
        done: Future[tuple[bool, str]] = Future()

        def told(written: "Future[None]") -> None:
            error = written.exception()
            if error is None:
                done.set_result((True, value))
            else:
                done.set_exception(error)

        def replace() -> None:
            if value == expected == self._documents.get(name, ""):
                done.set_result((True, value))
                return
            if why := self._why_unreadable(name, value):
                _fail(done, _unreadable(name, why))
                return
            if self._documents.get(name, "") != expected:
                done.set_result((False, self._documents.get(name, "")))
                return
            self._put_document(name, value, audits)
            written: Future[None] = Future()
            written.add_done_callback(told)
            self._unwritten.append(written)

        self._inbox.put(replace)
        return done

    def audits(self, limit: int) -> "Future[list[Audit]]":
        """Newest first, those on disk."""
        return self.call(lambda _book, _now: self._store.audits(limit))

    def call(self, work: Callable[[Book, float], T]) -> "Future[T]":
        """``work(book, now)`` on the keeper's thread; it may not keep the book."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                done.set_result(work(self._book, self._clock()))
            except Exception as error:
                done.set_exception(error)

        self._inbox.put(run)
        return done

    # --- on the keeper's thread ---

    def _run(self) -> None:
        while True:
            wait_s = FLUSH_S if self._dirty or self._unwritten else STEP_S
            try:
                work = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                pass
            else:
                if work is None:
                    break
                self._do(work)
            now = time.monotonic()
            if now >= self._next_step:
                self._do(self._step)
                self._next_step = now + STEP_S
            if now >= self._next_flush:
                self._flush()
                self._next_flush = now + FLUSH_S
        self._flush()
        self._store.close()

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # the thread is everybody's: it goes on
            _logger.exception("the ledger failed at a piece of work")

    def _take(self, batch: Batch, done: "Future[None]") -> None:
        try:
            self._count(batch)
        except Exception as error:
            _logger.exception("the ledger failed at a batch", extra={"source": batch.source})
            _fail(done, error)
        else:
            self._unwritten.append(done)

    def _count(self, batch: Batch) -> None:
        if batch.number > self._sources.get(batch.source, (0, 0.0))[0]:
            self._version += 1
            for update in batch.updates:
                for cell in self._book.add(update.group, update.at, update.row):
                    self._row_versions.pop(cell, None)
                    self._row_versions[cell] = self._version
                    self._dirty.add(cell)
                for judge in self._judges:
                    with self._survived(judge):
                        judge.observe(update.group, update.row, update.bins)
            self._sources[batch.source] = batch.number, self._clock()
            self._dirty_sources.add(batch.source)

    def _put_document(self, name: str, value: str, audits: Sequence[Audit]) -> None:
        self._version += 1
        self._documents[name] = value
        self._document_versions[name] = self._version
        self._dirty_documents.add(name)
        self._audits += audits
        for judge in self._judges:
            with self._survived(judge):
                judge.heard(name, value)

    def _news(self, since: int) -> News:
        return News(
            self._epoch,
            self._version,
            [(cell, self._book.row(cell)) for cell in self._changed(since)],
            {name: self._documents[name] for name, at in self._document_versions.items() if at > since},
        )

    def _changed(self, since: int) -> Iterator[Cell]:
        newest_first = reversed(self._row_versions.items())
        return (cell for cell, _ in itertools.takewhile(lambda entry: entry[1] > since, newest_first))

    def _step(self) -> None:
        """Let the judges look, and drop what no window reaches."""
        now = self._clock()
        for judge in self._judges:
            decided = None
            with self._survived(judge):
                decided = judge.step(self._book, now)
            if decided is not None:
                self._put_document(judge.name, *decided)
        if now >= self._next_forget:
            self._next_forget = now + _FORGET_EVERY_S
            self._forget(now)

    def _forget(self, now: float) -> None:
        """Rows that no window reaches, and sources that were silent as long: who sends again does so within seconds."""
        for cell in self._book.forget(now):
            self._row_versions.pop(cell, None)
            self._dirty.discard(cell)
            self._gone.append(cell)
        self._forget_before = now - RETENTION_S
        silent = [name for name, (_, at) in self._sources.items() if at < self._forget_before]
        for name in silent:
            del self._sources[name]
            self._dirty_sources.discard(name)

    def _flush(self) -> None:
        waiting, self._unwritten = self._unwritten, []
        changed = self._dirty or self._dirty_sources or self._dirty_documents or self._gone or self._audits
        if changed or self._forget_before is not None:
            try:
                self._store.write(
                    [(cell, self._book.row(cell)) for cell in self._dirty],
                    gone=self._gone,
                    sources={name: self._sources[name] for name in self._dirty_sources},
                    documents={name: self._documents[name] for name in self._dirty_documents},
                    audits=self._audits,
                    since=self._forget_before,
                )
            except Exception as error:  # a full disk, say: all stays dirty and is tried again
                if not self._unwritable:
                    self._unwritable = True
                    _logger.exception("the ledger cannot be written; it is tried again and again")
                for done in waiting:
                    _fail(done, error)
                return
            if self._unwritable:
                self._unwritable = False
                _logger.info("the ledger is written again")
            self._dirty.clear()
            self._dirty_sources.clear()
            self._dirty_documents.clear()
            self._gone, self._audits, self._forget_before = [], [], None
        for done in waiting:
            with contextlib.suppress(InvalidStateError):  # given up meanwhile, by another thread
                done.set_result(None)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the file holds."""

    sources: dict[str, tuple[int, float]]
    documents: dict[str, str]
    rows: list[tuple[Cell, Row]]


def _opened(path: str) -> tuple[Store, _Kept]:
    """All of it is read here: a damaged file is one that cannot be used, and shows it only where it is damaged."""
    store = Store.opened(path)
    try:
        return store, _Kept(store.sources(), store.documents(), [*store.rows()])
    except BaseException:
        store.close()
        raise


def _unreadable(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError.single("value", f"it cannot be read as the document {name!r}: {why}")


def _fail(done: "Future[T]", error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
        done.set_exception(error)
