"""Compiled passes over a row on the host: the token that is drawn, what weighs more than a token, the largest logits.

Up to ten times faster than numpy and Python, which serve where there is no compiler. They compare in float64 what Python would, and masses are
right within 1e-5, so that tokens cannot depend on which of the two is at work.
"""

import ctypes
import logging
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from paceline.compiled import NotCompiledError, load_compiled
from paceline.sampling.noise import Domain, exponential, row_key, token_bits
from paceline.sampling.scan import Floats, Ids, on_host, within_float32

log = logging.getLogger(__name__)

SLACK = 1.001
"""float32 rounding of a bound: exponentials of scaled logits, down to e**-87, are right within 2e-5."""

_MOST_LEADERS = 4096
"""More tokens than that share the k-th place only in made-up rows."""


class Rank(NamedTuple):
    """A token's place in falling order of logits, the lower id first among equals."""

    logit: float
    token_id: int


LAST = Rank(-np.inf, np.iinfo(np.int32).max)
"""Behind all tokens."""


@cache
def native_contenders() -> ctypes.CDLL | None:
    """The compiled passes, compiled now if nobody has yet; None where there are none (said once in the log)."""
    try:
        library = load_compiled(Path(__file__).with_name("contenders.cpp"))
    except NotCompiledError as error:
        log.warning("draws in numpy, some six times slower", extra={"why": str(error)})
        return None
    pointer, number, real, word, exact = (
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_float,
        ctypes.c_uint64,
        ctypes.c_double,
    )
    library.winner_of.restype = number
    library.winner_of.argtypes = [pointer, pointer, number, exact, exact, word]
    library.drawn_of.restype = number
    library.drawn_of.argtypes = [pointer, number, real, exact, real, word, exact, real, number]
    library.leaders_of.restype = number
    library.leaders_of.argtypes = [pointer, number, number, pointer, number]
    library.masses_of.restype = None
    library.masses_of.argtypes = [pointer, number, real, real, real, number, pointer, pointer]
    if not _is_sound(library):
        log.error("draws in numpy: the compiled ones are wrong on this machine; please report its compiler")
        return None
    return library


def _is_sound(library: ctypes.CDLL) -> bool:
    """Whether it draws, ranks and weighs as Python does. Compilers have made wrong code of such loops, and speed is not worth a wrong token."""
    count, top, temperature = 1237, 3.0, 0.7
    values = np.linspace(-9.0, top, count).astype(np.float32)[np.argsort(np.arange(count) * 7919 % count)]
    for position in range(16):
        key = row_key(5, position, Domain.COUPLED)
        scores = [
            (value - top) / temperature - math.log(exponential(token_bits(key, token)))
            for token, value in enumerate(values.tolist())
        ]
        drawn = library.drawn_of(values.ctypes.data, count, top, temperature, temperature, key, SLACK, *LAST)
        if drawn != scores.index(max(scores)):
            return False
    found = np.empty(count, dtype=np.int64)
    made = library.leaders_of(values.ctypes.data, count, 50, found.ctypes.data, count)
    if found[: max(made, 0)].tolist() != np.sort(np.argsort(-values)[:50]).tolist():
        return False
    weights = np.exp((values.astype(np.float64) - top) / temperature)
    edge = int(found[7])
    floor = float(values[edge])
    everything, heavier = ctypes.c_double(), ctypes.c_double()
    library.masses_of(
        values.ctypes.data,
        count,
        top,
        temperature,
        floor,
        edge,
        ctypes.byref(everything),
        ctypes.byref(heavier),
    )
    told = everything.value, heavier.value
    return bool(np.allclose(told, (weights.sum(), weights[values > floor].sum()), rtol=1e-5, atol=0.0))


def has_compiled() -> bool:
    """Whether there are compiled passes."""
    return native_contenders() is not None


def can_pass(row: torch.Tensor) -> bool:
    """Whether these passes can read the row, [V] float32."""
    return on_host(row) and row.is_contiguous() and native_contenders() is not None


def draw_whole(
    row: torch.Tensor, top: float, temperature: float, key: int, before: Rank = LAST
) -> int | None:
    """The token that is drawn under the noise of ``key`` among those that rank before ``before``; None: too many come near.

    ``top`` is the row's largest logit.
    """
    library = native_contenders()
    assert library is not None, "see can_pass"
    token: int = library.drawn_of(
        row.data_ptr(), len(row), top, temperature, within_float32(temperature), key, SLACK, *before
    )
    return token if token >= 0 else None


def draw_among(token_ids: Ids, values: Floats, top: float, temperature: float, key: int) -> int | None:
    """Index of the one of ``token_ids``, ascending, with logits ``values``, that is drawn; None: all are impossible."""
    library = native_contenders()
    assert library is not None, "see has_compiled"
    index: int = library.winner_of(
        values.ctypes.data, token_ids.ctypes.data, len(token_ids), top, temperature, key
    )
    return index if index >= 0 else None


def leaders(row: torch.Tensor, k: int) -> Ids | None:
    """Ascending tokens whose logits are the ``k`` largest, all that equal the last of these among them; None: look yourself."""
    library = native_contenders()
    assert library is not None, "see can_pass"
    found = np.empty(_MOST_LEADERS, dtype=np.int64)
    count = library.leaders_of(row.data_ptr(), len(row), k, found.ctypes.data, _MOST_LEADERS)
    return found[:count] if count >= 0 else None


def masses(row: torch.Tensor, top: float, temperature: float, before: Rank) -> tuple[float, float]:
    """Sum of all weights exp((logit - top) / temperature), and of those that rank before ``before``."""
    library = native_contenders()
    assert library is not None, "see can_pass"
    everything, heavier = ctypes.c_double(), ctypes.c_double()
    library.masses_of(
        row.data_ptr(),
        len(row),
        top,
        within_float32(temperature),
        *before,
        ctypes.byref(everything),
        ctypes.byref(heavier),
    )
    return everything.value, heavier.value
