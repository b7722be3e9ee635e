"""Which sampling parameters make sense: one table for the router, which tells people, and the verify tier's own guard."""

import math
from collections.abc import Callable, Iterator, Mapping

from paceline.errors import FieldViolation
from paceline.v1 import common_pb2

Violations = Iterator[FieldViolation]

MAX_K = 64
"""Most draft tokens in a round."""

_SHOWN_PER_LIST = 4  # wrong elements of one list that are named
_COUNTED_PER_LIST = 1000

SAMPLING_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda v: v >= 0, ">= 0"),
    "top_p": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "min_p": (lambda v: 0 <= v < 1, "in [0, 1)"),
    # Beyond these a float32 logit can overflow.
    "repetition_penalty": (lambda v: 0.01 <= v <= 100, "in [0.01, 100]"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "in [-2, 2]"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "in [-2, 2]"),
}
"""By field: whether a number fits, and what would, in words."""


def sampling_violations(params: common_pb2.SamplingParams, vocab_size: int) -> Violations:
    """Every field of ``params`` that is not a number in its range."""
    for name, (fits, right) in SAMPLING_NUMBERS.items():
        value = getattr(params, name)
        if params.HasField(name) and not (math.isfinite(value) and fits(value)):  # type: ignore[arg-type]
            yield FieldViolation(f"sampling.{name}", f"{value}; expected a number {right}")
    if len(params.logit_bias) > vocab_size:
        yield FieldViolation(
            "sampling.logit_bias", f"{len(params.logit_bias)} entries; the vocabulary has {vocab_size} tokens"
        )
    else:
        yield from some(_logit_bias(params.logit_bias, vocab_size), "sampling.logit_bias")


def some(violations: Violations, path: str) -> Violations:
    """The first few violations of a list's elements, and how many more there are; a very long list is not walked."""
    more = 0
    for index, violation in enumerate(violations):
        if index < _SHOWN_PER_LIST:
            yield violation
        else:
            more += 1
            if more == _COUNTED_PER_LIST:
                yield FieldViolation(path, f"{more} or more further elements are wrong")
                return
    if more:
        yield FieldViolation(path, f"{more} more elements are wrong")


def _logit_bias(logit_bias: Mapping[int, float], vocab_size: int) -> Violations:
    wrong = [  # NaN is not within, either
        (token_id, bias)
        for token_id, bias in logit_bias.items()
        if token_id >= vocab_size or not -100 <= bias <= 100
    ]
    for token_id, bias in sorted(wrong):
        path = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            yield FieldViolation(path, f"no such token; the vocabulary ends at {vocab_size - 1}")
        if not -100 <= bias <= 100:
            yield FieldViolation(path, f"{bias}; expected a number in [-100, 100]")
