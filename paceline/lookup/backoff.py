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

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath

from safetensors import SafetensorError
from safetensors.numpy import load_file

from paceline.errors import ConfigError
from paceline.lookup.base import Weighed
from paceline.lookup.trust import Cell, Luck, Path

SETTINGS, WEIGHTS = "backoff.json", "backoff.safetensors"
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_BUCKETS = 12  # of chances, whose records are kept apart
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
            self.settings = json.loads((directory / SETTINGS).read_text(encoding="utf-8"))
            arrays = load_file(directory / WEIGHTS)
            self.order: int = self.settings["order"]
            self._slots = len(arrays["checks"])
            if self._slots & (self._slots - 1) or not all(len(a) == self._slots for a in arrays.values()):
                raise ValueError("its arrays do not have one power of two of slots")
            # Views of plain integers: an element of a numpy array takes four times as long.
            self._checks = memoryview(arrays["checks"].astype("<u4").tobytes()).cast("I")
            self._tokens = memoryview(arrays["tokens"].astype("<u4").tobytes()).cast("I")
            self._chances = arrays["chances"].astype("u1").tobytes()
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(f"{directory} holds no back-off table: {error}") from error

    def next(self, context: Sequence[int]) -> tuple[int, float, int] | None:
        """(likeliest next token, its probability, tokens of context that say so), by the longest context that is known."""
        mask = self._slots - 1
        for length in range(min(self.order, len(context)), 0, -1):
            key = hash_of(context[-length:])
            check, slot = check_of(key), key & mask
            while held := self._checks[slot]:
                if held == check:
                    return self._tokens[slot], self._chances[slot] / 255.0, length
                slot = (slot + 1) & mask
        return None


@dataclass(slots=True)
class _Text:
    length: int = 0
    luck: Luck = field(default_factory=Luck)
    path: Path = field(default_factory=Path)


class BackoffLookup:
    """See the module. One table for all texts; nothing of a text is remembered but how guesses fared."""

    def __init__(self, name: str, table: BackoffTable, *, version: str, min_probability: float) -> None:
        self.name = name
        self.version = version
        self._table = table
        self._min_probability = min_probability
        self._cells: dict[tuple[int, int], Cell] = {}
        self._texts: dict[int, _Text] = {}

    def open(self, handle: int) -> None:
        """Start an empty text."""
        self._texts[handle] = _Text()

    def guess(self, handle: int, token_ids: Sequence[int], *, prompt_len: int, scope: str, k: int) -> Weighed:
        """Token after token, each from the ones before it, guessed ones included."""
        text, table = self._texts[handle], self._table
        text.path.settle(token_ids[text.length :], text.luck)
        text.length = len(token_ids)
        context, path, factor = [*token_ids[-table.order :]], Path(), text.luck.factor
        while len(path.token_ids) < k:
            found = table.next(context)
            if found is None:
                break
            token, chance, length = found
            if not path.add(token, self._cell(length, chance), chance, factor, self._min_probability):
                break
            context.append(token)
        text.path = path
        return path.weighed()

    def close(self, handle: int) -> None:
        """Forget it."""
        self._texts.pop(handle, None)

    def tidy(self) -> bool:
        """Nothing is kept beyond a request."""
        return False

    def _cell(self, length: int, chance: float) -> Cell:
        key = (length, int(chance * _BUCKETS))
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = [_STRENGTH * chance, _STRENGTH * chance]
        return cell
