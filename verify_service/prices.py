"""What a step takes now: the table that was measured at start, corrected by what steps have taken since."""

from paceline.step_costs import LEAST_SHARE
from verify_service.costs import CostTable, table_of
from verify_service.facts import COUNT_EDGES, EXTRA_EDGES, Remembered

_DEFAULT_TABLE = table_of(
    [(1, 1, 0.010), (1, 2, 0.011), (1, 5, 0.015), (1, 9, 0.022), (8, 8, 0.020), (8, 40, 0.055)],
    origin="a guess: nothing was measured",
)


class Model:
    """The cost table with what was looked up in it before. Holds no state: the same questions, the same answers."""

    def __init__(self, table: CostTable | None) -> None:
        self.table = table or _DEFAULT_TABLE
        self._curves: dict[int, list[float]] = {}
        self._region_lists: dict[int, list[int]] = {}

    def curve(self, sequences: int, rows: int) -> list[float]:
        """Table times of ``sequences`` with 0, 1, ... further rows, up to ``rows`` in all at least."""
        curve = self._curves.setdefault(sequences, [])
        regions = self._region_lists.setdefault(sequences, [])
        for extra in range(len(curve), rows - sequences + 2):
            curve.append(self.table.step_s(sequences + extra, sequences))
            regions.append(_region(sequences, extra))
        return curve

    def regions(self, sequences: int) -> list[int]:
        """Region of each entry of ``curve``."""
        return self._region_lists[sequences]

    def prices(self, state: Remembered, sequences: int, rows: int) -> "Prices":
        """What steps of ``sequences`` take now, up to ``rows`` rows."""
        return Prices(self, state, sequences, rows)

    def times(self, state: Remembered, sequences: int, rows: int) -> list[float]:
        """The same as a list, by further rows."""
        prices = Prices(self, state, sequences, rows)
        return [prices.step_s(extra) for extra in range(rows - sequences + 1)]


class Prices:
    """What a step of so many sequences takes now, by further rows: forward and accept."""

    __slots__ = ("_curve", "_each_s", "_factors", "_first_s", "_pace", "_regions", "_row_s", "_sequences")

    def __init__(self, model: Model, state: Remembered, sequences: int, rows: int) -> None:
        self._curve = model.curve(sequences, rows)
        self._regions = model.regions(sequences)
        table = model.table
        beyond = state.context - table.context
        self._first_s = beyond * sequences * (table.row_key_s + table.sequence_key_s)
        self._each_s = beyond * table.row_key_s
        self._pace, self._factors, self._row_s = state.pace, state.regions, state.accept_row_s
        self._sequences = sequences

    def step_s(self, extra: int) -> float:
        """With so many rows beyond one a sequence."""
        measured_s = self._curve[extra]
        table_s = measured_s + self._first_s + extra * self._each_s
        if table_s < (least_s := LEAST_SHARE * measured_s):
            table_s = least_s
        return (
            table_s * self._pace * self._factors[self._regions[extra]]
            + (self._sequences + extra) * self._row_s
        )


def _region(sequences: int, extra: float) -> int:
    count = 0
    while count < len(COUNT_EDGES) and sequences > COUNT_EDGES[count]:
        count += 1
    depth = 0
    each = extra / sequences
    while depth < len(EXTRA_EDGES) and each > EXTRA_EDGES[depth]:
        depth += 1
    return count * (len(EXTRA_EDGES) + 1) + depth
