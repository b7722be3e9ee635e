"""What the draft tier counts. Added to on the event loop, when an answer is sent; read by a scrape."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from paceline.telemetry.metrics import Histogram, Recent, Sums, counter, gauge, histogram

ANSWER_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class DraftMeter:
    """Answers by drafter."""

    def __init__(self) -> None:
        self.answers = Sums()
        self.tokens = Sums()
        self.draft_s = Sums()
        self.queue_s = Sums()
        self.refusals: Counter[str] = Counter()
        self.residence: dict[tuple[str, ...], Histogram] = {}
        self.recent = Recent()

    def answered(
        self,
        drafter: str,
        num_tokens: int,
        *,
        draft_s: float,
        queue_s: float,
        residence_s: float,
        ahead: bool,
    ) -> None:
        """An answer goes out; ``ahead``: drafted before the verdict that it answers."""
        kind = "ahead" if ahead else "guess" if num_tokens else "empty"
        self.answers.add((drafter, kind))
        key = (drafter,)
        self.tokens.add(key, num_tokens)
        self.draft_s.add(key, draft_s)
        if ahead:
            return  # how long it lay here beforehand is nobody's waiting
        self.queue_s.add(key, queue_s)
        known = self.residence.get(key)
        if known is None:
            known = self.residence[key] = Histogram(ANSWER_BOUNDS_S)
        known.observe(residence_s)
        self.recent.add(residence_s)

    def collect(self) -> Iterator[Metric]:
        """What was counted."""
        yield counter(
            "paceline_draft_answers",
            "Answers: with guesses, empty, or drafted ahead of the verdict (of those at most one in several is used).",
            ("drafter", "kind"),
            self.answers.values,
        )
        yield counter("paceline_spec_draft_tokens", "Tokens proposed.", ("drafter",), self.tokens.values)
        yield counter(
            "paceline_draft_work_seconds",
            "Time in the drafters; a batch counts for each of its sequences.",
            ("drafter",),
            self.draft_s.values,
        )
        yield counter(
            "paceline_draft_queue_seconds",
            "From a question's arrival to the beginning of its drafting.",
            ("drafter",),
            self.queue_s.values,
        )
        yield histogram(
            "paceline_draft_answer_seconds",
            "From a question's arrival to the sending of its answer.",
            ("drafter",),
            self.residence,
        )
        yield gauge(
            "paceline_draft_answer_p99_seconds",
            "99 of 100 of the last 1000 answers took no longer.",
            (),
            {(): self.recent.quantile(0.99)},
        )
        yield counter(
            "paceline_draft_refusals",
            "Sequences that were not mirrored, or no more, by reason.",
            ("reason",),
            {(reason,): count for reason, count in list(self.refusals.items())},
        )
