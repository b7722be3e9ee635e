"""The router's end of the ledger: adds up what its own requests did, hands it on, and knows what all routers did.

Deciding reads memory only. While the writer is away the sums wait here and are handed on when it is back; a batch whose
acknowledgement was lost is sent again under its number and counted once.
"""

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol, TypeVar

from paceline.errors import InvalidRequestError
from router.ledger.book import HOUR_S, MINUTE_S, Book
from router.ledger.group import Group
from router.ledger.keeper import Batch, Bins, Keeper, News, Update
from router.ledger.store import Audit
from router.ledger.sums import AT, Row, add_to

_logger = logging.getLogger(__name__)

EXCHANGE_S = 0.25
"""Between two exchanges with the writer; with its own flush it stays under the second that a kill may cost."""
_MAX_PAUSE_S = 5.0
_NO_BINS: Bins = {}
T = TypeVar("T")


class Writer(Protocol):
    """The ledger's writer: a keeper in this process or one behind a socket."""

    async def put_document(self, name: str, expected: str, value: str, audit: Audit) -> tuple[bool, str]:
        """Replace a document if it is ``expected``; whether it was, and what it is now. Raises OSError when away."""

    async def audits(self, limit: int) -> list[Audit]:
        """Newest first. Raises OSError when away."""

    async def exchange(self, batch: Batch | None, epoch: str, since: int) -> News:
        """Hand over ``batch`` and hear what changed behind version ``since`` of ``epoch``. Raises OSError when away."""


class OwnKeeper:
    """The writer is in this process."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def exchange(self, batch: Batch | None, epoch: str, since: int) -> News:
        """See ``Writer``."""
        if batch is not None:
            await _answer(self._keeper.take(batch))
        return await _answer(self._keeper.news(epoch, since))

    async def put_document(self, name: str, expected: str, value: str, audit: Audit) -> tuple[bool, str]:
        """See ``Writer``."""
        return await _answer(self._keeper.replace_document(name, expected, value, [audit]))

    async def audits(self, limit: int) -> list[Audit]:
        """See ``Writer``."""
        return await _answer(self._keeper.audits(limit))


async def _answer(done: "Future[T]") -> T:
    """What the keeper gives. A disk that says no is a writer that is away: what it was given waits there."""
    try:
        return await asyncio.wrap_future(done)
    except sqlite3.Error as error:
        raise OSError(str(error)) from error


class Memory:
    """Sums of all routers as far as this one knows, its own at once. Lives on the event loop."""

    def __init__(self, writer: Writer, *, clock: Callable[[], float] = time.time) -> None:
        self.documents: dict[str, str] = {}
        """State of guard and rules, as the writer told it."""
        self.on_documents: Callable[[Mapping[str, str]], None] = lambda _changed: None
        """Called with those that changed."""
        self.away_since: float | None = None
        """When the writer was first not to be had; None: it is there."""
        self.heard = asyncio.Event()
        """Whether the writer has ever told what it knows."""
        self._writer = writer
        self._clock = clock
        self._source = secrets.token_hex(8)
        self._told = Book()
        self._sent = Book()
        self._new = Book()
        self._sent_bins: dict[Group, dict[tuple[str, int], int]] = {}
        self._new_bins: dict[Group, dict[tuple[str, int], int]] = {}
        self._number = 0
        self._is_refused = False  # the last batch was; said once
        self._epoch, self._version = "", 0
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def now(self) -> float:
        """Unix time."""
        return self._clock()

    def add(self, group: Group, row: Row, bins: Bins = _NO_BINS) -> None:
        """What a request, or a part of it, did just now."""
        self._new.add(group, self._clock(), row)
        if bins:
            counts = self._new_bins.setdefault(group, {})
            for key, requests in bins.items():
                counts[key] = counts.get(key, 0) + requests

    def window(self, name: str, chosen: Callable[[Group], bool]) -> Row:
        """Sums of the groups that ``chosen`` is true of, in the last 5m, 1h, 24h or 7d."""
        now = self._clock()
        books = (self._told, self._sent, self._new)
        row = books[0].window(name, now, books[0].matching(chosen))
        for book in books[1:]:
            add_to(row, book.window(name, now, book.matching(chosen)))
        return row

    def groups(self) -> set[Group]:
        """All that have sums."""
        return {*self._told.groups(), *self._sent.groups(), *self._new.groups()}

    def remembered(self) -> tuple[int, int | None]:
        """Requests of all that is kept, and when the hour of the first of them began; None without any."""
        hours = [
            (cell.start, int(row[AT["requests"]]))
            for book in (self._told, self._sent, self._new)
            for cell, row in book.items()
            if cell.span == HOUR_S
        ]
        return sum(requests for _, requests in hours), min((start for start, _ in hours), default=None)

    def forget(self) -> None:
        """What no window reaches any more, of what could not be handed over, too."""
        for book in (self._told, self._sent, self._new):
            book.forget(self._clock())

    def start(self) -> None:
        """Begin to exchange with the writer."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Hand over what there is, if the writer is there, and end."""
        self._stopping.set()
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def exchange(self) -> None:
        """One exchange. Raises OSError when the writer is away; nothing is lost then."""
        if self._is_empty(self._sent) and not self._is_empty(self._new):
            self._sent, self._new = self._new, Book()
            self._sent_bins, self._new_bins = self._new_bins, {}
            self._number += 1
        batch = None
        if not self._is_empty(self._sent):
            batch = Batch(self._source, self._number, _updates(self._sent, self._sent_bins, self._clock()))
        try:
            news = await self._writer.exchange(batch, self._epoch, self._version)
        except InvalidRequestError as error:
            # Sent again it would be refused again, and everything behind it would wait for ever.
            self._sent, self._sent_bins = Book(), {}
            if not self._is_refused:
                _logger.error(
                    "the ledger refuses this router's sums: they are lost", extra={"problem": str(error)}
                )
            self._is_refused = True
            return
        self._is_refused = self._is_refused and batch is None
        # No await from here on: who reads sees either the sums sent or the ones told back, never both.
        self._sent, self._sent_bins = Book(), {}
        if news.epoch != self._epoch:
            self._told = Book()
        self._epoch, self._version = news.epoch, news.version
        self.heard.set()
        for cell, row in news.rows:
            self._told.put(cell, row)
        if news.documents:
            self.documents.update(news.documents)
            self.on_documents(news.documents)

    async def _run(self) -> None:
        pause_s, forget_at = EXCHANGE_S, 0.0
        while True:
            stopping = self._stopping.is_set()
            try:
                await self.exchange()
                if self.away_since is not None:
                    _logger.info("the ledger is back")
                self.away_since, pause_s = None, EXCHANGE_S
            except Exception as error:  # away, or a fault of ours: it is tried again
                if self.away_since is None:
                    self.away_since = self._clock()
                    _logger.warning(
                        "the ledger is away: deciding from memory",
                        extra={"problem": str(error) or type(error).__name__},
                        exc_info=not isinstance(error, OSError),
                    )
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            if stopping:
                return
            if self._clock() >= forget_at:
                self.forget()
                forget_at = self._clock() + 10 * MINUTE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    @staticmethod
    def _is_empty(book: Book) -> bool:
        return next(book.groups(), None) is None


def _updates(book: Book, bins: Mapping[Group, Bins], now: float) -> list[Update]:
    """The rows of minutes that a window of minutes may still reach, and those of the hours before: together all sums, once.

    So the sums of days without the writer are no more than it can take at once. A group's bins go with its first row.
    """
    minutes_from = (int(now // HOUR_S) - 1) * HOUR_S
    left = dict(bins)
    return [
        Update(cell.group, cell.start, row, left.pop(cell.group, {}))
        for cell, row in book.items()
        if (cell.span == MINUTE_S) == (cell.start >= minutes_from)
    ]
