"""What a step costs: T(rows, sequences, context), measured when the engine starts, kept in a file, interpolated.

Nothing about a machine or a kernel is written down in the code: whether five rows cost what one costs is what the
controller has to know and what differs most. The file is keyed by everything that could change the figures (weights,
precision, runner and its sources, threads, processor), so that the next start with the same key reads it and one with
another key measures anew. What steps really take while serving corrects the table (``controller``).
"""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

import paceline.engine
from paceline.engine import Runner, Segment
from paceline.model_store import cache_dir
from paceline.simulation import DeviceCost
from paceline.step_costs import CONTEXT, CostTable, table_of

log = logging.getLogger(__name__)

_SCHEMA = 1
_FAR_CONTEXT = 1024
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
_EXTRA_ROWS = (0, 1, 2, 3, 4, 6, 8, 12, 16)  # beyond one a sequence
_ROWS_EACH = (2, 3, 5, 9)
_MOST_ROWS = 160
_ENOUGH_REPEATS = 5
_LONGEST_STEP_S = 60.0
_OTHER_DAYS = 2.0
"""A plain step that differs from the file's by such a factor: the machine was busy then, or is now."""


__all__ = [
    "CostTable",
    "cost_key",
    "load_or_measure",
    "measure",
    "read_table",
    "simulated_table",
    "table_of",
    "write_table",
]


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(
    runner: Runner, budget_s: float, clock: Callable[[], float] = time.perf_counter
) -> CostTable | None:
    """The table of ``runner``, whose slots must all be free, and are again afterwards; None when nothing could be run.

    Points take turns, small steps first, and each keeps its least time, so that a neighbour on the machine disturbs
    all alike. What the budget does not reach is extrapolated.
    """
    until = clock() + budget_s
    stand = _Stand(runner, clock)
    try:
        points = [
            point
            for sequences in _SEQUENCES
            if sequences <= stand.most_sequences
            for point in _points(sequences, stand.room)
        ]
        points.sort(key=lambda point: (point[1], point[0]))
        if not points:
            return None
        stand.step_s(1, 1, stand.context)  # buffers, pages: the first forward is not like the others
        least = stand.rounds(points, stand.context, until)
        row_key_s, sequence_key_s = stand.key_costs(until + 0.25 * budget_s)
    finally:
        stand.close()
    return table_of(
        [(sequences, rows, step_s) for (sequences, rows), step_s in least.items()],
        context=stand.context,
        row_key_s=row_key_s,
        sequence_key_s=sequence_key_s,
        origin="measured at start",
    )


def _points(sequences: int, room: int) -> list[tuple[int, int]]:
    """(sequences, rows), ``room`` tokens fitting behind the context of each sequence."""
    rows = {sequences + extra for extra in _EXTRA_ROWS} if sequences <= 4 else {sequences, sequences + 4}
    rows |= {sequences * each for each in _ROWS_EACH}
    return [(sequences, count) for count in sorted(rows) if count <= min(_MOST_ROWS, sequences * room)]


class _Stand:
    """Slots filled up to a length with whatever lies in memory: the time of a step does not depend on values."""

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        kv = runner.kv
        capacity = kv.capacity
        self.context = min(CONTEXT, capacity // 2)
        self.far_context = min(_FAR_CONTEXT, capacity - 32)
        self.room = min(17, capacity - self.context)
        self.most_sequences = kv.num_slots
        self._slots: list[int] = []

    def close(self) -> None:
        for slot in self._slots:
            self._runner.kv.release(slot)

    def step_s(self, sequences: int, rows: int, context: int) -> float:
        kv = self._runner.kv
        while len(self._slots) < sequences:
            slot = kv.acquire()
            assert slot is not None, "all slots are free when the engine starts"
            self._slots.append(slot)
        segments = []
        for index, slot in enumerate(self._slots[:sequences]):
            kv.truncate(slot, 0)
            kv.extend(slot, context)
            count = rows // sequences + (index < rows % sequences)
            segments.append(Segment(slot, context, [(7 * index + j) % 50 + 1 for j in range(count)], count))
        started = self._clock()
        logits = self._runner.forward(segments)
        float(logits[0, 0])  # a GPU has finished when its result is here
        return self._clock() - started

    def rounds(
        self, points: list[tuple[int, int]], context: int, until: float
    ) -> dict[tuple[int, int], float]:
        """Least times; points that no longer fit before ``until`` are left out, the first few never."""
        least: dict[tuple[int, int], float] = {}
        for repeat in range(_ENOUGH_REPEATS):
            for sequences, rows in points:
                known_s = least.get((sequences, rows))
                if known_s is None and repeat:
                    continue
                # The smallest steps are measured whatever the budget: without them there is no table.
                if rows > 5 and self._clock() + 1.2 * (known_s or _guess(least, rows)) > until:
                    continue
                if repeat and self._clock() > until:
                    return least
                found_s = self.step_s(sequences, rows, context)
                least[sequences, rows] = found_s if known_s is None else min(known_s, found_s)
        return least

    def key_costs(self, until: float) -> tuple[float, float]:
        """Seconds per token looked back on, by row and by sequence, from steps far down the context."""
        far = self.far_context - self.context
        many = min(5, self.room)
        if far < 64 or many < 2:
            return 0.0, 0.0
        least: dict[tuple[int, int], float] = {}
        for _ in range(_ENOUGH_REPEATS):
            for rows in (1, many):
                for context in (self.context, self.far_context):
                    found_s = self.step_s(1, rows, context)
                    least[rows, context] = min(found_s, least.get((rows, context), found_s))
            if self._clock() > until:
                break
        # Nothing grows faster with the context than in proportion to it: what seems to was disturbed.
        for rows in (1, many):
            most_s = least[rows, self.context] * self.far_context / self.context
            least[rows, self.far_context] = min(least[rows, self.far_context], most_s)
        more_one = (least[1, self.far_context] - least[1, self.context]) / far
        more_many = (least[many, self.far_context] - least[many, self.context]) / far
        row_key_s = max(0.0, (more_many - more_one) / (many - 1))
        return row_key_s, max(0.0, more_one - row_key_s)


def _guess(least: dict[tuple[int, int], float], rows: int) -> float:
    """A time that a step of ``rows`` should not exceed, from the largest known one."""
    if not least:
        return 0.0
    (_, known_rows), known_s = max(least.items(), key=lambda item: item[0][1])
    return known_s * max(1.0, rows / known_rows)


def simulated_table(cost: DeviceCost) -> CostTable:
    """The table of a simulated device, which says itself what it costs."""
    return table_of(
        [
            (sequences, rows, cost.seconds(rows, sequences * CONTEXT))
            for sequences in _SEQUENCES
            for rows in (sequences, *(r for r in (cost.free_rows, cost.free_rows + 64) if r > sequences))
        ],
        sequence_key_s=cost.context_s,
        origin="as simulated",
    )


# --- the file -------------------------------------------------------------------------------------------------------


def cost_key(runner: Runner) -> dict[str, str]:
    """All that the figures depend on."""
    info = runner.info
    return {
        "model": info.fingerprint,
        "dtype": info.dtype,
        "device": _device_name(runner.device),
        "runner": f"{info.runner}: {info.runner_reason}",
        "engine": _engine_sources(),
        "threads": str(torch.get_num_threads()),
        "slots": f"{runner.kv.num_slots} of {runner.kv.capacity}",
        "machine": _machine(),
    }


def load_or_measure(runner: Runner, budget_s: float) -> CostTable | None:
    """The table of the file with this runner's key if it can be believed, else measured now and kept.

    What disturbs only lengthens. So a file that tells longer times than steps take now is measured again, and where they take longer
    now it stays: its ratios hold, and the controller follows the machine's pace.

    ``budget_s`` 0: only the file. None: no table; the controller then starts from what it sees.
    """
    key = cost_key(runner)
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    path = cache_dir() / "costs" / f"{name}.json"
    kept = read_table(path, key)
    if kept is not None:
        found_s = _plain_step_s(runner) or kept.step_s(1, 1)
        told_s = kept.step_s(1, 1)
        seen = {"path": str(path), "told_ms": round(1e3 * told_s, 3), "found_ms": round(1e3 * found_s, 3)}
        if found_s * _OTHER_DAYS < told_s:
            log.warning(
                "kept step costs do not fit a machine as fast as it is now: measured again", extra=seen
            )
        elif found_s > told_s * _OTHER_DAYS:
            log.warning(
                "steps take longer than kept step costs tell: the machine is busy or slower, their ratios are kept",
                extra=seen,
            )
            return kept
        else:
            return kept
    if budget_s <= 0:
        return kept
    started = time.perf_counter()
    table = measure(runner, budget_s)
    if table is not None:
        log.info(
            "step costs measured",
            extra={"path": str(path), "seconds": round(time.perf_counter() - started, 2)},
        )
        write_table(path, key, table)
    return table


def read_table(path: Path, key: dict[str, str]) -> CostTable | None:
    """The table of a file; None, with a line in the log, for one that is broken, foreign or absurd."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        log.warning("cost table ignored", extra={"path": str(path), "why": str(error)})
        return None
    try:
        return _table_from(json.loads(text), key)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning(
            "cost table ignored", extra={"path": str(path), "why": f"{type(error).__name__}: {error}"}
        )
        return None


def write_table(path: Path, key: dict[str, str], table: CostTable) -> None:
    """Keep the table; a cache that cannot be written is no failure."""
    content = {
        "schema": _SCHEMA,
        "key": key,
        "context": table.context,
        "row_key_s": table.row_key_s,
        "sequence_key_s": table.sequence_key_s,
        "points": [[count, rows, step_s] for count, curve in table.curves for rows, step_s in curve],
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        log.warning("cost table not kept", extra={"path": str(path), "why": str(error)})


def _table_from(content: dict[str, object], key: dict[str, str]) -> CostTable:
    if content["schema"] != _SCHEMA:
        raise ValueError(f"schema {content['schema']}, expected {_SCHEMA}")
    if content["key"] != key:
        raise ValueError("it belongs to another model, runner or machine")
    listed = content["points"]
    if not isinstance(listed, list) or not 1 <= len(listed) <= 1000:
        raise ValueError("points: expected a list")
    points = []
    for sequences, rows, step_s in listed:
        if type(sequences) is not int or type(rows) is not int or not 1 <= sequences <= rows <= 1 << 20:
            raise ValueError(f"{rows!r} rows in {sequences!r} sequences")
        points.append((sequences, rows, _seconds(step_s, _LONGEST_STEP_S)))
    if len({point[:2] for point in points}) != len(points):
        raise ValueError("points: one is named twice")
    if min(points)[:2] != (1, 1):
        raise ValueError("points: a step of one row is missing")
    context = content["context"]
    if type(context) is not int or context < 1:
        raise ValueError(f"context {context!r}")
    row_key_s, sequence_key_s = (
        _seconds(content[name], 1e-3, zero=True) for name in ("row_key_s", "sequence_key_s")
    )
    return table_of(
        points,
        context=context,
        row_key_s=row_key_s,
        sequence_key_s=sequence_key_s,
        origin="measured at an earlier start",
    )


def _seconds(value: object, most: float, *, zero: bool = False) -> float:
    if type(value) not in {int, float} or not 0 <= value <= most:  # type: ignore[operator]  # neither is NaN
        raise ValueError(f"{value!r} is no time")
    if not zero and not value:
        raise ValueError("a step that takes no time")
    return float(value)  # type: ignore[arg-type]


def _plain_step_s(runner: Runner) -> float | None:
    stand = _Stand(runner, time.perf_counter)
    try:
        if stand.room < 1:
            return None
        return min(stand.step_s(1, 1, stand.context) for _ in range(_ENOUGH_REPEATS))
    finally:
        stand.close()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _engine_sources() -> str:
    """Hash of the code that computes: a faster kernel makes the old figures wrong."""
    found = hashlib.sha256()
    root = Path(paceline.engine.__file__).parent
    for path in sorted(root.rglob("*")):
        if path.suffix in {".py", ".cpp", ".h"}:
            found.update(path.relative_to(root).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _machine() -> str:
    """Processor and how many of it this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {model or platform.processor()}, {cores} cores"
