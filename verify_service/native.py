"""The compiled controller (``compiled/controller.cpp``): packs a step's facts, asks once, unpacks the decisions.

The same decisions and the same state as ``controller`` and ``trimming`` give, to the last bit. What it has no room for (a block of a
thousand tokens, a time that is no number where an order is needed) it leaves to them: state and step are then Python's, and
the next step is compiled again.
"""

import ctypes
import logging
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from struct import Struct
from struct import error as StructError  # noqa: N812  # its name says nothing
from typing import Any

from paceline.compiled import NotCompiledError, load_compiled
from paceline.types import DepthReason
from verify_service import controller
from verify_service.facts import Decision, Ready, Remembered, State, StepFacts
from verify_service.native_check import decides_as_python
from verify_service.native_state import REASONS, CompiledState
from verify_service.prices import Model

log = logging.getLogger(__name__)

# As in compiled/facts.h. Most rows have no look: what they lack of a row is zeros.
_ROW, _ROW_WITH_LOOK = Struct("@3q8i4?44x"), Struct("@3q8i4?i4qd")
_STEP, _COUNT_AT = Struct("@5q5dq"), 80
_DECISION = Struct("@q3d2i2?6x")
_READY, _KEPT = Struct("@q2i?7x"), Struct("@q2i")
_KEPT_REASONS = (*REASONS, None)  # the last one by -1
_UNPACKABLE = (StructError, TypeError, ValueError, OverflowError)


class InconsistentError(RuntimeError):
    """Compiled code gave an answer that cannot be one."""


class _Room:
    """Memory for so many records, which compiled code reads or writes: used again and again."""

    __slots__ = ("_each", "_pinned", "at", "data")

    def __init__(self, each: int) -> None:
        self._each = each
        self._take(32)

    def _take(self, count: int) -> None:
        self.data = bytearray(self._each * count)
        self._pinned = (ctypes.c_char * len(self.data)).from_buffer(self.data)
        self.at = ctypes.addressof(self._pinned)

    def fit(self, count: int) -> bytearray:
        """The same, larger if it is too small for ``count``."""
        if self._each * count > len(self.data):
            self._take(2 * count)
        return self.data


class CompiledController:
    """A ``steering.Policy``. One thread at a time. Its states are ``CompiledState``s; it takes Python's too."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._model: Model | None = None
        self._table: _Table | None = None  # of ``_model``
        self._rows, self._decisions = _Room(_ROW.size), _Room(_DECISION.size)
        self._ready, self._kept = _Room(_READY.size), _Room(_KEPT.size)
        self._step = _Room(_STEP.size)
        self._names: dict[str, int] = {}
        self._text, self._lengths = b"", array("q")  # of ``_names``

    def decide(
        self, model: Model, state: Remembered, facts: StepFacts
    ) -> tuple[State | CompiledState, dict[int, Decision]]:
        """See ``controller.decide``. Raises InconsistentError."""
        before = state if isinstance(state, CompiledState) else self._taken(state)
        found = self._decide(model, before, facts) if before is not None else None
        return found if found is not None else controller.decide(model, _plain(state), facts)

    def trim(
        self,
        model: Model,
        state: Remembered,
        ready: Sequence[Ready],
        num_sequences: int,
        prompt_rows: int,
        num_plain: int,
    ) -> dict[int, tuple[int, DepthReason | None]]:
        """See ``trimming.trim``."""
        if isinstance(state, CompiledState):
            kept = self._trim(model, state, ready, num_sequences, prompt_rows, num_plain)
            if kept is not None:
                return kept
        return controller.trim(model, _plain(state), ready, num_sequences, prompt_rows, num_plain)

    def _taken(self, state: Remembered) -> CompiledState | None:
        return CompiledState.of(self._library, _plain(state))

    def _decide(
        self, model: Model, before: CompiledState, facts: StepFacts
    ) -> tuple[CompiledState, dict[int, Decision]] | None:
        table = self._table if model is self._model else self._looked_into(model)
        if table is None:
            return None
        rows = facts.rows
        data = self._rows.fit(len(rows))
        self._decisions.fit(len(rows))
        names: dict[str, int] = {}
        numbers: list[float] = []
        at, size, pack, num_finished = 0, _ROW.size, _ROW.pack_into, 0
        # The loop is most of what deciding takes.
        try:
            for (
                id_, name, k_max, room, fixed, asked, proposed, drafted, agreed, look, prior, finished,
                found, alone, looked, unread,
            ) in rows:  # fmt: skip
                drafter = names.setdefault(name, len(names)) if name else -1
                if found is None:
                    num_found = -1
                else:
                    num_found = len(found)
                    numbers += found
                if prior is None:
                    positions = -1
                else:
                    positions = len(prior.by_position)
                    numbers += (prior.mean, prior.strength, *prior.by_position)
                if look is None:
                    pack(
                        data, at, id_, room, unread, drafter, k_max, asked, proposed, drafted, agreed,
                        num_found, positions, fixed, finished, alone, looked,
                    )  # fmt: skip
                else:
                    _ROW_WITH_LOOK.pack_into(
                        data, at, id_, room, unread, drafter, k_max, asked, proposed, drafted, agreed,
                        num_found, positions, fixed, finished, alone, looked, 1, *look,
                    )  # fmt: skip
                at += size
                num_finished += finished
            _STEP.pack_into(
                self._step.data, 0, facts.num_sequences, facts.num_rows, facts.prompt_rows, facts.running,
                facts.running_plain, facts.context, facts.forward_s, facts.accept_s, facts.gap_s, facts.draft_s, 0,
            )  # fmt: skip
            exact = array("d", numbers)
            if names != self._names:
                self._name(names)
        except _UNPACKABLE:
            return None
        pointer = self._library.state_decide(
            table.pointer, before.pointer, self._step.at, self._rows.at, len(rows),
            self._text, self._lengths.buffer_info()[0], len(names), exact.buffer_info()[0], len(exact), self._decisions.at,
        )  # fmt: skip
        if not pointer:
            return None
        (count,) = _COUNT.unpack_from(self._step.data, _COUNT_AT)
        made = memoryview(self._decisions.data)[: count * _DECISION.size]
        decisions = {
            id_: Decision(k, wait, REASONS[reason], expected, worth_s, cost_s, rest)
            for id_, expected, worth_s, cost_s, k, reason, wait, rest in _DECISION.iter_unpack(made)
        }
        state = CompiledState(self._library, pointer)
        if len(decisions) != len(rows) - num_finished:
            raise InconsistentError(f"{len(decisions)} decisions on {len(rows) - num_finished} rows")
        return state, decisions

    def _trim(
        self,
        model: Model,
        state: CompiledState,
        ready: Sequence[Ready],
        num_sequences: int,
        prompt_rows: int,
        num_plain: int,
    ) -> dict[int, tuple[int, DepthReason | None]] | None:
        table = self._table if model is self._model else self._looked_into(model)
        if table is None:
            return None
        data = self._ready.fit(len(ready))
        self._kept.fit(len(ready))
        numbers: list[float] = []
        at, size, pack = 0, _READY.size, _READY.pack_into
        try:
            for id_, length, fixed, survival in ready:
                if survival is None:
                    pack(data, at, id_, length, -1, fixed)
                else:
                    numbers += survival
                    pack(data, at, id_, length, len(survival), fixed)
                at += size
            exact = array("d", numbers)
            count = self._library.state_trim(
                table.pointer, state.pointer, self._ready.at, len(ready), exact.buffer_info()[0], len(exact),
                num_sequences, prompt_rows, num_plain, self._kept.at,
            )  # fmt: skip
        except (*_UNPACKABLE, ctypes.ArgumentError):
            return None
        if count < 0:
            return None
        made = memoryview(self._kept.data)[: count * _KEPT.size]
        return {id_: (k, _KEPT_REASONS[reason]) for id_, k, reason in _KEPT.iter_unpack(made)}

    def _looked_into(self, model: Model) -> "_Table | None":
        """The model's table in compiled code, made when another one is asked about; None: there is no room for it."""
        self._model, self._table = model, None
        try:
            self._table = _Table(self._library, model)
        except (*_UNPACKABLE, MemoryError):
            return None
        return self._table

    def _name(self, names: dict[str, int]) -> None:
        """The drafters of a step: mostly those of the step before."""
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        self._text, self._lengths = b"".join(encoded), array("q", map(len, encoded))
        self._names = names


_COUNT = Struct("@q")


class _Table:
    """A cost table in compiled code, with what was looked up in it; freed with this object."""

    __slots__ = ("_library", "pointer")

    def __init__(self, library: ctypes.CDLL, model: Model) -> None:
        """Raises MemoryError where there is none, or the table is empty."""
        self.pointer: int | None = None
        self._library, table = library, model.table
        counts = array("q", [count for count, _ in table.curves])
        sizes = array("q", [len(curve) for _, curve in table.curves])
        rows = array("q", [rows for _, curve in table.curves for rows, _ in curve])
        seconds = array("d", [seconds for _, curve in table.curves for _, seconds in curve])
        self.pointer = library.model_make(
            *(one.buffer_info()[0] for one in (counts, sizes)), len(counts),
            *(one.buffer_info()[0] for one in (rows, seconds)),
            table.context, table.row_key_s, table.sequence_key_s,
        )  # fmt: skip
        if not self.pointer:
            raise MemoryError("no memory for a cost table, or it is empty")

    def __del__(self) -> None:
        if self.pointer:
            self._library.model_free(self.pointer)


def _plain(state: Remembered) -> State:
    if isinstance(state, CompiledState):
        return state.plain()
    assert isinstance(state, State), "Python's or compiled code's"
    return state


@cache
def native_controller() -> ctypes.CDLL | None:
    """The compiled controller, compiled now if nobody has yet; None where there is none (said once in the log)."""
    try:
        loaded = load_compiled(Path(__file__).parent / "compiled" / "controller.cpp")
    except NotCompiledError as error:
        log.warning("depths decided in Python, some five times slower", extra={"why": str(error)})
        return None
    library = declared(loaded)
    try:
        sound, why = decides_as_python(CompiledController(library)), "it decides otherwise"
    except Exception as error:
        sound, why = False, repr(error)
    if not sound:
        log.error(
            "depths decided in Python: what was compiled is wrong; please report the compiler",
            extra={"why": why},
        )
        return None
    return library


def compiled_controller() -> CompiledController | None:
    """One for somebody's own use; None where there is no compiled code."""
    library = native_controller()
    return CompiledController(library) if library is not None else None


def declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """The library with what its functions take."""
    # Calls of microseconds keep the interpreter's lock: who lets it go may wait long until it comes back.
    library = ctypes.PyDLL(loaded._name, handle=loaded._handle)
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    takes: dict[str, tuple[Any, list[Any]]] = {
        "model_make": (pointer, [pointer, pointer, number, pointer, pointer, real, real, real]),
        "model_free": (None, [pointer]),
        "state_decide": (
            pointer,
            [*[pointer] * 4, number, ctypes.c_char_p, pointer, number, pointer, number, pointer],
        ),
        "state_trim": (number, [*[pointer] * 3, number, pointer, *[number] * 4, pointer]),
        "state_idle": (number, [pointer, pointer, number]),
        "state_without": (pointer, [pointer, number]),
        "state_pace": (None, [pointer, pointer]),
        "state_write": (ctypes.c_int, [pointer] * 5),
        "state_read": (pointer, [pointer, number, pointer, number, ctypes.c_char_p, number]),
        "state_free": (None, [pointer]),
    }
    for name, (gives, arguments) in takes.items():
        function = getattr(library, name)
        function.restype, function.argtypes = gives, arguments
    return library
