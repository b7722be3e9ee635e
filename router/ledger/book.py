"""The ledger in memory: rows by group and time, and sums over windows of the last minutes to days.

A row of one minute serves the short windows, a row of one hour the long ones; every update goes into both. The writer
of the ledger and every router hold such a book; rows travel whole, so two books that have heard the same are equal.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from router.ledger.group import Group
from router.ledger.sums import Row, add_to, no_sums, total

MINUTE_S, HOUR_S = 60, 3600
WINDOWS: Mapping[str, int] = {"5m": 300, "1h": HOUR_S, "24h": 24 * HOUR_S, "7d": 7 * 24 * HOUR_S}
RETENTION_S = 8 * 24 * HOUR_S
"""How long the ledger remembers."""
_KEPT_S = {MINUTE_S: 2 * HOUR_S, HOUR_S: RETENTION_S}


@dataclass(frozen=True, slots=True)
class Cell:
    """Where a row stands: its group, and ``span`` seconds from ``start`` (unix time)."""

    group: Group
    span: int
    start: int


def cells(group: Group, at: float) -> tuple[Cell, Cell]:
    """The minute's and the hour's."""
    return (
        Cell(group, MINUTE_S, int(at // MINUTE_S) * MINUTE_S),
        Cell(group, HOUR_S, int(at // HOUR_S) * HOUR_S),
    )


class Book:
    """Rows by cell. Has one owner; nothing here is locked."""

    def __init__(self) -> None:
        self._rows: dict[Group, dict[int, dict[int, Row]]] = {}  # group, span, start

    def add(self, group: Group, at: float, row: Row) -> tuple[Cell, Cell]:
        """Add to the minute and the hour of ``at``; the cells that changed."""
        changed = cells(group, at)
        for cell in changed:
            by_start = self._by_start(cell)
            known = by_start.get(cell.start)
            if known is None:
                by_start[cell.start] = row.copy()
            else:
                add_to(known, row)
        return changed

    def put(self, cell: Cell, row: Row) -> None:
        """Replace a row by one that was sent or stored."""
        self._by_start(cell)[cell.start] = row

    def row(self, cell: Cell) -> Row:
        """A copy; zeros where nothing is known."""
        known = self._rows.get(cell.group, {}).get(cell.span, {}).get(cell.start)
        return no_sums() if known is None else known.copy()

    def groups(self) -> Iterator[Group]:
        """All that have a row."""
        return iter(self._rows)

    def items(self) -> Iterator[tuple[Cell, Row]]:
        """Every row, not copied."""
        for group, by_span in self._rows.items():
            for span, by_start in by_span.items():
                for start, row in by_start.items():
                    yield Cell(group, span, start), row

    def window(self, name: str, now: float, chosen: Iterable[Group]) -> Row:
        """Sums over ``chosen`` in the last 5m, 1h, 24h or 7d.

        The window begins at a full minute (5m, 1h) or hour (24h, 7d) and holds the current one, so it is up to one of
        them shorter than its name.
        """
        length = WINDOWS[name]
        span = MINUTE_S if length <= HOUR_S else HOUR_S
        first = (int(now // span) + 1) * span - length
        return total(
            row
            for group in chosen
            for start, row in self._rows.get(group, {}).get(span, {}).items()
            if start >= first
        )

    def matching(self, wanted: Callable[[Group], bool]) -> list[Group]:
        """The groups of which ``wanted`` is true."""
        return [group for group in self._rows if wanted(group)]

    def forget(self, now: float) -> list[Cell]:
        """Drop what no window reaches any more; gives the cells."""
        gone = [cell for cell, _ in self.items() if cell.start + cell.span < now - _KEPT_S[cell.span]]
        for cell in gone:
            del self._rows[cell.group][cell.span][cell.start]
        for group in {cell.group for cell in gone}:
            if not any(self._rows[group].values()):
                del self._rows[group]
        return gone

    def _by_start(self, cell: Cell) -> dict[int, Row]:
        return self._rows.setdefault(cell.group, {}).setdefault(cell.span, {})
