"""A ledger's file, read beside its writer: what ``plan``, ``check`` and ``diagnose`` go by."""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from router.ledger.book import Cell
from router.ledger.group import Group
from router.ledger.store import Store
from router.ledger.sums import Row, total


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """Its rows of hours, and the documents of those who judge."""

    rows: tuple[tuple[Cell, Row], ...]
    documents: dict[str, str]

    def total(self, wanted: Callable[[Group], bool]) -> Row:
        """Sums of all that is kept of the groups that are ``wanted``."""
        return total(row for cell, row in self.rows if wanted(cell.group))


def read_ledger(path: Path) -> LedgerFile:
    """The ledger at ``path``. Raises ConfigError where there is none."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; `paceline policy show` says where the ledger is")
    try:
        store = Store.to_read(str(path))
        try:
            # Rows of hours hold everything; rows of minutes are the same sums again, for short windows.
            rows = tuple((cell, row) for cell, row in store.rows() if cell.span == 3600)
            return LedgerFile(rows, store.documents())
        finally:
            store.close()
    except sqlite3.Error as error:
        raise ConfigError(f"{path} is no ledger: {error}") from error
