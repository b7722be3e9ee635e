"""Speculative requests against those that were drawn by lot to be decoded plainly: times by task, always in view.

The lot is a keyed hash of the request id, so the two kinds of requests differ in nothing else. Each quantile gets half of
the error; the ratio of two bounds is a bound of the ratio.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.ledger.book import Book
from router.ledger.documents import check_fields, counts_from
from router.ledger.group import Arm, Group
from router.ledger.keeper import Bins
from router.ledger.store import Audit
from router.ledger.sums import Row
from router.quantiles import Quantile, quantile

METRICS = ("ttft", "gap", "pause", "total")
"""Time to first token, mean gap between tokens, longest pause of the stream, total time; one value a request."""
QUANTILES = (0.5, 0.95, 0.99)
ALPHA = 0.05
"""Chance that one of the bounds of a comparison ever fails."""
ALPHA_EACH = ALPHA / 2
"""That one of a single quantile does."""
_ARMS = (Arm.AUTO.value, Arm.HOLDOUT.value)
_WRITE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantile of one metric of one task: speculative, plain, and the ratio of the two (below 1: faster)."""

    task: str
    metric: str
    p: float
    speculative: Quantile
    plain: Quantile
    requests: tuple[int, int]

    @property
    def ratio(self) -> Quantile:
        """Speculative over plain."""
        spec, plain = self.speculative, self.plain
        return Quantile(
            spec.low / plain.high,
            spec.estimate / plain.estimate,
            spec.high / plain.low if plain.low > 0 else float("inf"),
        )


class Holdout:
    """Counts of all routers' requests, by task, arm, metric and bin. Belongs to the keeper's thread."""

    name = "holdout"

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], dict[int, int]] = {}  # task, arm, metric: bin: requests
        self._changed = False
        self._write_at = 0.0

    def heard(self, name: str, value: str) -> None:
        """Nothing of it concerns this judge."""

    def observe(self, group: Group, row: Row, bins: Bins) -> None:
        """Take in requests of a group."""
        if group.arm not in _ARMS:
            return
        for (metric, number), requests in bins.items():
            counts = self._counts.setdefault((group.task, group.arm, metric), {})
            counts[number] = counts.get(number, 0) + requests
            self._changed = True

    def step(self, book: Book, now: float) -> tuple[str, Sequence[Audit]] | None:
        """The document to write, now and then."""
        if not self._changed or now < self._write_at:
            return None
        self._changed, self._write_at = False, now + _WRITE_EVERY_S
        return self.document(), ()

    def document(self) -> str:
        """All counts."""
        return json.dumps([[*key, sorted(counts.items())] for key, counts in sorted(self._counts.items())])

    def restore(self, document: str) -> None:
        """Go on from ``document``."""
        for task, arm, metric, counts in json.loads(document):
            check_fields({"task": task, "arm": arm, "metric": metric}, task=str, arm=str, metric=str)
            self._counts[task, arm, metric] = counts_from(counts)

    def comparisons(self) -> Iterator[Comparison]:
        """Every task of which both kinds were seen."""
        for task, arm, metric in sorted(self._counts):
            plain = self._counts.get((task, Arm.HOLDOUT.value, metric))
            if arm != Arm.AUTO.value or plain is None or metric not in METRICS:
                continue
            speculative = self._counts[task, arm, metric]
            requests = sum(speculative.values()), sum(plain.values())
            for p in QUANTILES:
                a, b = quantile(speculative, p, ALPHA_EACH), quantile(plain, p, ALPHA_EACH)
                if a is not None and b is not None:
                    yield Comparison(task, metric, p, a, b, requests)


def comparisons_from(document: str) -> list[Comparison]:
    """What a holdout's document says."""
    holdout = Holdout()
    holdout.restore(document)
    return list(holdout.comparisons())
