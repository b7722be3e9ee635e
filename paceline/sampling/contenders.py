"""The few tokens that can win a draw, by a compiled pass over a whole row on the host; ``coupled`` has the same in numpy.

Six times faster than numpy, which serves where there is no compiler. Neither decides a draw, so tokens cannot depend on which of them is at work.
"""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch

from paceline.compiled import NotCompiledError, load_compiled
from paceline.sampling.scan import Ids, on_host

log = logging.getLogger(__name__)

_MOST = 64
"""Contenders that are compared one by one, at most: equal logits at a high temperature are left to numpy."""


@cache
def native_contenders() -> Callable[..., int] | None:
    """The compiled pass, compiled now if nobody has yet; None where there is none (said once in the log)."""
    try:
        function = load_compiled(Path(__file__).with_name("contenders.cpp")).contenders_of
    except NotCompiledError as error:
        log.warning("draws in numpy, some six times slower", extra={"why": str(error)})
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.restype = number
    function.argtypes = [
        pointer, number, ctypes.c_float, ctypes.c_float, ctypes.c_uint64, ctypes.c_double, pointer, number,
    ]  # fmt: skip
    return function


def find_contenders(row: torch.Tensor, top: float, temperature: float, key: int, slack: float) -> Ids | None:
    """Ascending tokens of ``row`` [V] float32 that can win under the noise of ``key``; None: ask numpy.

    ``top`` is the row's largest logit, ``slack`` a factor for rounding. For temperatures that float32 can divide by.
    """
    if not on_host(row) or not row.is_contiguous():
        return None
    function = native_contenders()
    if function is None:
        return None
    found = np.empty(_MOST, dtype=np.int64)
    count = function(row.data_ptr(), len(row), top, temperature, key, slack, found.ctypes.data, _MOST)
    return found[:count] if count > 0 else None
