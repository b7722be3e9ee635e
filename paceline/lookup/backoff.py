"""Back-off look-up: what the target usually says after the last three, two tokens, or the last one.

An n-gram model of the target's own distributions, made once by ``training.backoff`` (Katz 1987 for backing off; the counts are
probabilities that the target gave, not texts). Right less often than a model that reads the whole text, but it costs
microseconds and always has a guess, and where two rows cost a step what one does, any guess pays.

    backoff.json           {"target", "tokenizer_fingerprint", "order", ...}
    backoff.safetensors    a hash table, one slot a context:
        checks  uint32     of the context's hash; 0: empty
        tokens  uint32     the likeliest next token
        chances uint8      its probability, in 255ths
"""

import ctypes
import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from paceline.errors import ConfigError
from paceline.lookup.base import Weighed
from paceline.lookup.native import Answer, Handle, native_library
from paceline.lookup.trust import Cell, Luck, Path
from paceline.ranges import MAX_K

Array = NDArray[np.generic]

SETTINGS, WEIGHTS = "backoff.json", "backoff.safetensors"
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_BUCKETS = 12  # of chances, whose records are kept apart
_MOST_ORDER = 8
_MOST_STEPS = 4096  # of one look-up; a table that training made needs a few hundred at most
_STRENGTH = 8.0  # guesses that the table's own word counts for


def hash_of(context: Sequence[int]) -> int:
    """64 bits of up to a few tokens."""
    key = len(context) * _MULTIPLIER & _MASK
    for token in context:
        key = (key ^ (token + 1)) * _MULTIPLIER & _MASK
        key ^= key >> 29
    return key


def check_of(key: int) -> int:
    """What a slot holds of it; never 0."""
    return (key >> 32) | 1


class BackoffTable:
    """The table of a directory, read whole."""

    def __init__(self, directory: FilePath) -> None:
        """Raises ConfigError for a directory that is none."""
        try:
            self.settings = _settings(directory / SETTINGS)
            checks, tokens, chances = _slots(load_file(directory / WEIGHTS))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(f"{directory} holds no back-off table: {error}") from error
        self.order: int = self.settings["order"]
        self._num_slots = len(checks)
        self.arrays = tuple(np.ascontiguousarray(array) for array in (checks, tokens, chances))
        # Views of plain integers: an element of a numpy array takes four times as long.
        self._checks = self.arrays[0].data.cast("B").cast("I")
        self._tokens = self.arrays[1].data.cast("B").cast("I")
        self._chances = self.arrays[2].data
        self.vocab_size = 1 + max(tokens[checks != 0].tolist(), default=-1)
        """One more than the largest token that it can guess."""

    def next(self, context: Sequence[int]) -> tuple[int, float, int] | None:
        """(likeliest next token, its probability, tokens of context that say so), by the longest context that is known."""
        mask = self._num_slots - 1
        for length in range(min(self.order, len(context)), 0, -1):
            key = hash_of(context[-length:])
            check, slot = check_of(key), key & mask
            while held := self._checks[slot]:  # ends: some slot is empty (``_slots``)
                if held == check:
                    return self._tokens[slot], self._chances[slot] / 255.0, length
                slot = (slot + 1) & mask
        return None


def _settings(path: FilePath) -> dict[str, Any]:
    settings = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise ValueError(f"{path.name} is no JSON object")  # noqa: TRY004  # of what is read: all of one kind
    order = settings.get("order")
    if type(order) is not int or not 1 <= order <= _MOST_ORDER:
        raise ValueError(f"order = {order!r} in {path.name}: expected a whole number from 1 to {_MOST_ORDER}")
    for name in ("version", "tokenizer_fingerprint"):
        if not isinstance(settings.get(name), str):
            raise ValueError(f"{name} = {settings.get(name)!r} in {path.name}: expected a text")  # noqa: TRY004
    return settings


def _slots(arrays: Mapping[str, Array]) -> tuple[Array, Array, Array]:
    """Checks, tokens and chances as they are kept. Raises ValueError, KeyError where a look-up could fail or would not end."""
    checks, tokens, chances = (
        _kept(name, arrays[name], kind)
        for name, kind in (("checks", "<u4"), ("tokens", "<u4"), ("chances", "u1"))
    )
    if not len(checks) == len(tokens) == len(chances) or not len(checks) or len(checks) & (len(checks) - 1):
        raise ValueError("its arrays do not have one power of two of slots")
    empty = np.flatnonzero(checks == 0)
    if not len(empty):
        raise ValueError(
            "none of its slots is empty, so that looking for what it does not hold would never end"
        )
    longest = int(np.diff(empty, append=empty[0] + len(checks)).max()) - 1
    if longest > _MOST_STEPS:
        raise ValueError(
            f"{longest} slots without an empty one between them: looking through them takes too long"
        )
    return checks, tokens, chances


def _kept(name: str, array: Array, kind: str) -> Array:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} has {array.ndim} dimensions of {array.dtype}: expected one of whole numbers"
        )
    kept = array.astype(kind)
    if not np.array_equal(kept, array):
        raise ValueError(f"{name} holds numbers that are no {kept.dtype}")
    return kept


class BackoffText(Protocol):
    """One text. ``PlainTexts`` and ``NativeTexts`` make them, of one meaning."""

    def guess(self, new: Sequence[int], k: int) -> Weighed:
        """The text has gone on by ``new``: learn from that, and look up token after token, each from the ones before it."""


class BackoffLookup:
    """See the module. One table for all texts; nothing of a text is remembered but how guesses fared."""

    def __init__(
        self, name: str, table: BackoffTable, *, version: str, min_probability: float, native: bool = True
    ) -> None:
        """``native`` False: in Python even where there is a compiler, to compare."""
        self.name = name
        self.version = version
        library = native_library() if native else None
        self._new: PlainTexts | NativeTexts = (
            PlainTexts(table, min_probability)
            if library is None
            else NativeTexts(library, table, min_probability)
        )
        self._texts: dict[int, tuple[BackoffText, int]] = {}  # and its length

    def open(self, handle: int) -> None:
        """Start an empty text."""
        self._texts[handle] = self._new.text(), 0

    def guess(self, handle: int, token_ids: Sequence[int], *, prompt_len: int, scope: str, k: int) -> Weighed:
        """Token after token, each from the ones before it, guessed ones included."""
        text, length = self._texts[handle]
        weighed = text.guess(token_ids[length:], min(k, MAX_K))
        self._texts[handle] = text, len(token_ids)
        return weighed

    def close(self, handle: int) -> None:
        """Forget it."""
        self._texts.pop(handle, None)

    def tidy(self) -> bool:
        """Nothing is kept beyond a request."""
        return False


# --- in Python ------------------------------------------------------------------------------------------------------


class PlainTexts:
    """Texts with one table, and one record of how its guesses fared."""

    def __init__(self, table: BackoffTable, min_probability: float) -> None:
        self.table = table
        self.min_probability = min_probability
        self._cells: dict[tuple[int, int], Cell] = {}

    def text(self) -> BackoffText:
        """An empty one."""
        return _PlainText(self)

    def cell(self, length: int, chance: float) -> Cell:
        """The record of guesses by so many tokens of context and of such a chance."""
        key = (length, int(chance * _BUCKETS))
        cell = self._cells.get(key)
        if cell is None:
            start = _STRENGTH * (chance or 1.0)
            cell = self._cells[key] = [start, start]
        return cell


class _PlainText:
    def __init__(self, texts: PlainTexts) -> None:
        self._texts = texts
        self._context: list[int] = []
        self._luck, self._path = Luck(), Path()

    def guess(self, new: Sequence[int], k: int) -> Weighed:
        """See BackoffText."""
        texts = self._texts
        table, bar = texts.table, texts.min_probability
        self._path.settle(new, self._luck)
        self._context = [*self._context, *new][-table.order :]
        context, path, factor = self._context.copy(), Path(), self._luck.factor
        while len(path.token_ids) < k:
            found = table.next(context)
            if found is None:
                break
            token, chance, length = found
            if not path.add(token, texts.cell(length, chance), chance, factor, bar):
                break
            context.append(token)
        self._path = path
        return path.weighed()


# --- compiled -------------------------------------------------------------------------------------------------------


class NativeTexts:
    """The same over ``lookup.cpp``."""

    def __init__(self, library: ctypes.CDLL, table: BackoffTable, min_probability: float) -> None:
        self.core = library
        self.min_probability = min_probability
        self._arrays = table.arrays  # compiled code reads them where they are
        addresses = [array.ctypes.data for array in self._arrays]
        self.table = Handle(library, "backoff", *addresses, len(self._arrays[0]), table.order)
        self.answer = Answer()

    def text(self) -> BackoffText:
        """An empty one. Raises MemoryError."""
        return _NativeText(self, Handle(self.core, "backoff_text"))


class _NativeText:
    __slots__ = ("_text", "_texts")

    def __init__(self, texts: NativeTexts, text: Handle) -> None:
        self._texts, self._text = texts, text

    def guess(self, new: Sequence[int], k: int) -> Weighed:
        """See BackoffText."""
        texts, tokens, answer = self._texts, array("i", new), self._texts.answer
        made = texts.core.backoff_guess(
            texts.table.pointer, self._text.pointer, tokens.buffer_info()[0], len(tokens),
            k, texts.min_probability, answer.tokens_at, answer.probabilities_at,
        )  # fmt: skip
        return answer.weighed(made)
