"""What the ledger takes from a router: sums that stay countable, and that every other router can hear of.

One writer serves all routers. What it took and could not write, judge or forget would be everybody's trouble from then on, so
a batch is looked at as a whole where it comes in, and none of a wrong one is counted.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from paceline.errors import FieldViolation
from paceline.ranges import Violations
from paceline.v1 import ledger_pb2
from router.ledger.documents import LAST_AT
from router.ledger.group import GROUP_FIELDS, Arm
from router.ledger.sums import AT, FIELDS, MOST

MAX_UPDATES = 100_000
"""Of a batch: three hundred groups over eight days without the ledger, the last two hours by the minute."""
MAX_CHARACTERS = 512
"""Of a name."""
MAX_REQUESTS = 10**9
"""Of an update."""
METRICS = ("ttft", "gap", "pause", "total", "length")
MAX_BIN = 4096
"""Bins grow by 2 %: this one is beyond any time."""
MAX_AHEAD_S = 3600.0
"""So far a router's clock may be ahead: windows have no other end than now."""
MAX_DOCUMENT, MAX_WORDS = 2**20, 2**16
"""Characters of a document, and of what the audit says of it."""
_LAST_NUMBER = 2**63 - 1  # the file's whole numbers have a sign
_ARMS = {arm.value for arm in Arm}
_LIMITS = np.full(len(FIELDS), MOST, dtype=np.int64)
_LIMITS[AT["requests"]] = MAX_REQUESTS


def batch_violations(request: ledger_pb2.ExchangeRequest, now: float) -> Violations:
    """What the ledger could not count of ``request`` at ``now``, unix time."""
    if not 0 < len(request.source) <= MAX_CHARACTERS:
        yield FieldViolation(
            "source", f"{len(request.source)} characters; expected a name of at most {MAX_CHARACTERS}"
        )
    if request.batch > _LAST_NUMBER:
        yield FieldViolation("batch", f"{request.batch}; expected at most {_LAST_NUMBER}")
    if len(request.updates) > MAX_UPDATES:
        yield FieldViolation("updates", f"{len(request.updates)} of them; expected at most {MAX_UPDATES}")
        return
    requests: Counter[tuple[str, ...]] = Counter()
    timed: Counter[tuple[tuple[str, ...], str]] = Counter()
    for index, update in enumerate(request.updates):
        wrong = [*_update_violations(f"updates[{index}]", update, now)]
        if wrong:
            yield from wrong
            continue
        group = tuple(update.group.values)
        requests[group] += update.sums[AT["requests"]]
        for one in update.bins:
            timed[group, one.metric] += one.requests
    for (group, metric), count in timed.items():
        if count > requests[group]:
            yield FieldViolation(
                "updates",
                f"{count} times of metric {metric} in a group of {requests[group]} requests; one a request",
            )


def _update_violations(path: str, update: ledger_pb2.LedgerUpdate, now: float) -> Iterator[FieldViolation]:
    values = update.group.values
    if len(values) != len(GROUP_FIELDS):
        yield FieldViolation(f"{path}.group", f"{len(values)} values; expected {len(GROUP_FIELDS)}")
    elif (arm := values[GROUP_FIELDS.index("arm")]) not in _ARMS:
        yield FieldViolation(f"{path}.group", f"arm {arm[:40]!r}; expected one of {', '.join(sorted(_ARMS))}")
    elif (longest := max(map(len, values))) > MAX_CHARACTERS:
        yield FieldViolation(f"{path}.group", f"a value of {longest} characters; at most {MAX_CHARACTERS}")
    if len(update.sums) != len(FIELDS):
        yield FieldViolation(f"{path}.sums", f"{len(update.sums)} of them; expected {len(FIELDS)}")
    else:
        row = np.array(update.sums, dtype=np.int64)
        for column in np.flatnonzero((row < 0) | (row > _LIMITS))[:1].tolist():
            yield FieldViolation(
                f"{path}.sums", f"{FIELDS[column]} is {row[column]}; expected 0 to {_LIMITS[column]}"
            )
    if not 0 <= update.at < LAST_AT:
        yield FieldViolation(f"{path}.at", f"{update.at!r}; expected unix time")
    elif update.at > now + MAX_AHEAD_S:
        yield FieldViolation(
            f"{path}.at", f"{update.at - now:.0f} s ahead of the ledger's clock; at most {MAX_AHEAD_S:.0f}"
        )
    for one in update.bins:
        if one.metric not in METRICS or not 0 <= one.number <= MAX_BIN:
            yield FieldViolation(
                f"{path}.bins",
                f"metric {one.metric[:40]!r}, number {one.number}; expected one of {', '.join(METRICS)} and 0 to {MAX_BIN}",
            )
            break


def document_violations(request: ledger_pb2.PutDocumentRequest, names: frozenset[str]) -> Violations:
    """What the ledger would not keep; ``names`` are those of the documents that are not its own to write."""
    if request.name not in names:
        yield FieldViolation("name", f"{request.name[:40]!r}; expected one of {', '.join(sorted(names))}")
    for field, most in (("value", MAX_DOCUMENT), ("subject", MAX_WORDS), ("words", MAX_WORDS)):
        if len(getattr(request, field)) > most:
            yield FieldViolation(field, f"{len(getattr(request, field))} characters; expected at most {most}")
