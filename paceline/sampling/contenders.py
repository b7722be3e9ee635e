"""Compiled passes over a whole row on the host: the few tokens that can win a draw, and what weighs more than a token.

Six times faster than numpy, which serves where there is no compiler. Neither decides a draw: contenders are compared exactly by the caller, and
masses are right within 1e-5, so that tokens cannot depend on which of the two is at work.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from paceline.compiled import NotCompiledError, load_compiled
from paceline.sampling.scan import Ids, on_host

log = logging.getLogger(__name__)

_MOST = 64
"""Contenders that are compared one by one, at most: equal logits at a high temperature are left to numpy."""


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
    pointer, number, real = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
    library.contenders_of.restype = number
    library.contenders_of.argtypes = [
        pointer, number, real, real, ctypes.c_uint64, ctypes.c_double, real, number, pointer, number,
    ]  # fmt: skip
    library.masses_of.restype = None
    library.masses_of.argtypes = [pointer, number, real, real, real, number, pointer, pointer]
    return library


def can_pass(row: torch.Tensor) -> bool:
    """Whether these passes can read the row, [V] float32."""
    return on_host(row) and row.is_contiguous() and native_contenders() is not None


def find_contenders(
    row: torch.Tensor, top: float, temperature: float, key: int, slack: float, before: Rank = LAST
) -> Ids | None:
    """Ascending tokens that can win under the noise of ``key``, of those that rank before ``before``; None: too many.

    ``top`` is the row's largest logit, ``slack`` a factor for rounding, ``temperature`` one that float32 can divide by.
    """
    library = native_contenders()
    assert library is not None, "see can_pass"
    found = np.empty(_MOST, dtype=np.int64)
    count = library.contenders_of(
        row.data_ptr(), len(row), top, temperature, key, slack, *before, found.ctypes.data, _MOST
    )
    return found[:count] if count > 0 else None


def masses(row: torch.Tensor, top: float, temperature: float, before: Rank) -> tuple[float, float]:
    """Sum of all weights exp((logit - top) / temperature), and of those that rank before ``before``."""
    library = native_contenders()
    assert library is not None, "see can_pass"
    everything, heavier = ctypes.c_double(), ctypes.c_double()
    library.masses_of(
        row.data_ptr(),
        len(row),
        top,
        temperature,
        *before,
        ctypes.byref(everything),
        ctypes.byref(heavier),
    )
    return everything.value, heavier.value
