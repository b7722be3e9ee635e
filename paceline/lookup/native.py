"""The compiled core of look-ups (``lookup.cpp``), and what its functions take."""

import ctypes
import logging
from array import array
from functools import cache
from pathlib import Path

from paceline.compiled import NotCompiledError, load_compiled
from paceline.lookup.base import Weighed
from paceline.ranges import MAX_K

log = logging.getLogger(__name__)


@cache
def native_library() -> ctypes.CDLL | None:
    """The compiled core; None where there is none (said once in the log)."""
    try:
        loaded = load_compiled(Path(__file__).with_name("lookup.cpp"))
    except NotCompiledError as error:
        log.warning("look-ups in Python, some 30 times slower", extra={"why": str(error)})
        return None
    # Calls of microseconds keep the interpreter's lock: who lets it go may wait long until it comes back.
    library = ctypes.PyDLL(loaded._name, handle=loaded._handle)
    pointer, word, number, real = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_double
    takes: dict[str, tuple[type | None, list[type]]] = {
        "history_make": (pointer, [word, number, pointer, number]),
        "history_free": (None, [pointer]),
        "history_begin": (number, [pointer, word, word]),
        "history_append": (None, [pointer, pointer, word]),
        "history_guess": (number, [pointer, pointer, number, word, *[number] * 4, *[pointer] * 4]),
        "trust_make": (pointer, []),
        "trust_free": (None, [pointer]),
        "suffix_text_make": (pointer, [word, pointer, number]),
        "suffix_text_free": (None, [pointer]),
        "suffix_guess": (
            number,
            [pointer, pointer, pointer, word, pointer, word, *[number] * 3, real, pointer, pointer],
        ),
        "backoff_make": (pointer, [pointer, pointer, pointer, ctypes.c_uint64, number]),
        "backoff_free": (None, [pointer]),
        "backoff_text_make": (pointer, []),
        "backoff_text_free": (None, [pointer]),
        "backoff_guess": (number, [pointer, pointer, pointer, word, number, real, pointer, pointer]),
    }
    for name, (gives, arguments) in takes.items():
        function = getattr(library, name)
        function.restype, function.argtypes = gives, arguments
    return library


class Handle:
    """Something that compiled code made and that is freed with this object."""

    __slots__ = ("_free", "pointer")

    def __init__(self, library: ctypes.CDLL, kind: str, *arguments: object) -> None:
        """``KIND_make`` and ``KIND_free`` of the library. Raises MemoryError."""
        self.pointer: int | None = getattr(library, f"{kind}_make")(*arguments)
        if not self.pointer:
            raise MemoryError(f"no memory for a {kind}")
        self._free = getattr(library, f"{kind}_free")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._free(self.pointer)


class Answer:
    """Room for the guesses of one look-up, used again and again."""

    __slots__ = ("_probabilities", "_tokens", "probabilities_at", "tokens_at")

    def __init__(self) -> None:
        self._tokens = array("q", bytes(8 * MAX_K))
        self._probabilities = array("d", bytes(8 * MAX_K))
        self.tokens_at = self._tokens.buffer_info()[0]
        self.probabilities_at = self._probabilities.buffer_info()[0]

    def weighed(self, count: int) -> Weighed:
        """The first ``count`` guesses."""
        return Weighed(self._tokens[:count].tolist(), self._probabilities[:count].tolist())
