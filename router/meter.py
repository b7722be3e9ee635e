"""What the router counts: each request once, when it is over, from the sums that it has anyway.

The GenAI server trio has OpenTelemetry's names and bounds, with the mode of decoding as one label more: ``plain``,
``speculative``, or ``holdout`` (plain by lot, to compare with). Label values come from closed lists: types of task, modes,
status codes, buckets of the batch.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import Metric

from paceline.telemetry import names
from paceline.telemetry.metrics import Histogram, Recent, Sums, counter, gauge, histogram, ratio
from paceline.types import Mode, Timings
from router.accept import Accepted
from router.guard import GuardState, Subject, Verdict
from router.holdout import Comparison, comparisons_from
from router.ledger.group import Arm
from router.ledger.sums import AT, MAX_POSITIONS
from router.replicas import Replicas
from router.rollout import Stage, Standing
from router.spans import Outcome
from router.tally import Tally

DURATION_BOUNDS_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
TOKEN_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip
"""The convention's, and three finer ones below: speculation is about tokens of a few milliseconds."""
RECENT_REQUESTS = 200
"""Requests of a type of task behind its acceptance gauge."""
HOLDOUT = "holdout"
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "paceline_mode")
_PARTS = {"draft": "exposed_draft_ns", "network": "network_ns", "wait": "wait_ns", "verify": "verify_ns"}
_FALLBACKS = {"late": "late_rounds", "empty": "empty_rounds", "unavailable": "unavailable_rounds"}
_GUARD_STATES = tuple(GuardState)
_COMPARED = {("total", 0.99), ("gap", 0.99), ("ttft", 0.99)}


class RequestMeter:
    """Lives on the event loop; a scrape reads it from elsewhere."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_waiting = 0
        self._requests = Sums()
        self._plans = Sums()
        self._durations: dict[tuple[str, ...], Histogram] = {}
        self._first_tokens: dict[tuple[str, ...], Histogram] = {}
        self._token_times: dict[tuple[str, ...], Histogram] = {}
        self._recent: dict[str, Recent] = {}
        self._recent_tokens: dict[str, Recent] = {}
        self._rounds: dict[tuple[str, ...], list[int]] = {}  # task, mode, batch: ledger fields
        self._acceptance: dict[str, deque[tuple[int, int]]] = {}  # by task: accepted, drafted
        self._tokens = Sums()
        self._resumes = 0

    def closed(
        self,
        accepted: Accepted | None,
        outcome: Outcome,
        tally: Tally,
        timings: Timings,
        *,
        output_tokens: int,
        resumed: int,
        trace_id: str,
    ) -> None:
        """A request is over. One that was never accepted has an outcome and nothing else."""
        mode = _mode(accepted) if accepted is not None else "none"
        self._requests.add((mode, outcome.word))
        self._resumes += resumed
        if accepted is None:
            return
        self._plans.add((accepted.plan.mode.value, accepted.decision.arm.value))
        self._tokens.add(("input",), len(accepted.prompt_ids))
        self._tokens.add(("output",), output_tokens)
        self._count_rounds(accepted, tally, mode)
        labels = (
            "chat" if accepted.chat else "text_completion",
            names.PROVIDER,
            accepted.facts.info.name,
            mode,
        )
        error = outcome.error or ""
        _of(self._durations, (*labels, error), DURATION_BOUNDS_S).observe(timings.total_s, trace_id)
        if error or not output_tokens:
            return
        first_s = timings.time_to_first_token_s
        _of(self._first_tokens, labels, FIRST_TOKEN_BOUNDS_S).observe(first_s, trace_id)
        self._recent.setdefault(mode, Recent()).add(timings.total_s)
        if output_tokens > 1:
            token_s = (timings.total_s - first_s) / (output_tokens - 1)
            _of(self._token_times, labels, TOKEN_BOUNDS_S).observe(token_s, trace_id)
            self._recent_tokens.setdefault(mode, Recent()).add(token_s)

    def _count_rounds(self, accepted: Accepted, tally: Tally, mode: str) -> None:
        for batch, sums in tally.sums.items():
            key = (accepted.task_type, mode, batch)
            known = self._rounds.get(key)
            self._rounds[key] = (
                [a + b for a, b in zip(known, sums.values, strict=True)] if known else list(sums.values)
            )
        stats = tally.stats
        if stats.num_draft_tokens:
            recent = self._acceptance.get(accepted.task_type)
            if recent is None:
                recent = self._acceptance[accepted.task_type] = deque(maxlen=RECENT_REQUESTS)
            recent.append((stats.num_accepted_draft_tokens, stats.num_draft_tokens))

    # --- scrape -----------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """What was counted."""
        yield gauge("paceline_num_running", "Requests that are being answered.", (), {(): self.num_running})
        yield gauge(
            "paceline_num_waiting",
            "Of those, requests that no verify replica has taken up yet.",
            (),
            {(): self.num_waiting},
        )
        yield from self._of_requests()
        rounds = {key: values.copy() for key, values in list(self._rounds.items())}
        yield from self._speculation(rounds)
        yield from _times(rounds)

    def _of_requests(self) -> Iterator[Metric]:
        yield counter(
            "paceline_requests",
            "Requests by mode of decoding and outcome (a finish reason or a status code).",
            ("mode", "outcome"),
            self._requests.values,
        )
        yield counter(
            "paceline_plans",
            "Requests by what was planned and why: chosen, holdout, guard off, probe, ineligible, asked, pinned.",
            ("mode", "arm"),
            self._plans.values,
        )
        yield counter(
            "paceline_tokens", "Tokens of prompts and outputs.", ("direction",), self._tokens.values
        )
        yield counter(
            "paceline_resumes",
            "Times a request went on after its verify replica was lost.",
            (),
            {(): self._resumes},
        )
        yield histogram(
            "gen_ai_server_request_duration_seconds",
            "Whole requests.",
            (*_GEN_AI, "error_type"),
            self._durations,
        )
        yield histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to first token, of requests that went well.",
            _GEN_AI,
            self._first_tokens,
        )
        yield histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between the tokens behind the first, a request.",
            _GEN_AI,
            self._token_times,
        )
        yield gauge(
            "paceline_request_p99_seconds",
            "99 of 100 of the last 1000 requests of the mode took no longer.",
            ("mode",),
            {(mode,): recent.quantile(0.99) for mode, recent in list(self._recent.items())},
        )
        yield gauge(
            "paceline_time_per_output_token_p99_seconds",
            "The same for the mean time between tokens.",
            ("mode",),
            {(mode,): recent.quantile(0.99) for mode, recent in list(self._recent_tokens.items())},
        )

    def _speculation(self, rounds: Mapping[tuple[str, ...], list[int]]) -> Iterator[Metric]:
        # Every family of one scrape comes from the same copy: accepted never exceeds drafted in any label set.
        per_batch = {
            "paceline_spec_rounds": ("spec_rounds", "Rounds that verified a block."),
            "paceline_spec_draft_tokens": ("drafted", "Draft tokens that were verified."),
            "paceline_spec_accepted_tokens": ("accepted", "Draft tokens that were accepted and put out."),
        }
        drafting = {key: values for key, values in rounds.items() if values[AT["drafted"]]}
        for name, (field, text) in per_batch.items():
            yield counter(name, text, ("task_type", "batch"), _by(drafting, (0, 2), field))
        for name, field, text in (
            ("paceline_spec_draft_tokens_per_pos", "drafted", "Verified draft tokens by position, from 0."),
            (
                "paceline_spec_accepted_tokens_per_pos",
                "accepted",
                "Accepted draft tokens by position, from 0.",
            ),
        ):
            values: dict[tuple[str, ...], float] = {}
            for position in range(MAX_POSITIONS):
                reached = _by(drafting, (0, 2), f"drafted_{position}")
                for key, count in _by(drafting, (0, 2), f"{field}_{position}").items():
                    if reached[key]:
                        values[*key, str(position)] = count
            yield counter(name, text, ("task_type", "batch", "position"), values)
        yield counter(
            "paceline_spec_fallback_rounds",
            "Rounds of speculative requests that were plain: late, empty or no drafter.",
            ("reason",),
            {
                (reason,): sum(values[AT[field]] for values in rounds.values())
                for reason, field in _FALLBACKS.items()
            },
        )
        yield gauge(
            "paceline_spec_acceptance_rate",
            f"Accepted over drafted, over the last {RECENT_REQUESTS} requests of the type that drafted.",
            ("task_type",),
            {(task,): _rate(list(recent)) for task, recent in list(self._acceptance.items())},
        )


def _times(rounds: Mapping[tuple[str, ...], list[int]]) -> Iterator[Metric]:
    parts: dict[tuple[str, ...], float] = {}
    for part, field in _PARTS.items():
        for (mode,), nanoseconds in _by(rounds, (1,), field).items():
            parts[mode, part] = nanoseconds / 1e9
    yield counter(
        "paceline_round_seconds",
        "Where the rounds' time went, by mode of decoding; the four parts are the whole round.",
        ("mode", "part"),
        parts,
    )
    drafted = sum(values[AT["draft_ns"]] for values in rounds.values())
    exposed = sum(values[AT["exposed_draft_ns"]] for values in rounds.values())
    yield counter(
        "paceline_draft_seconds",
        "The drafters' time: exposed (a round waited for it) and hidden (spent ahead, behind an earlier round).",
        ("kind",),
        {("exposed",): exposed / 1e9, ("hidden",): max(0, drafted - exposed) / 1e9},
    )
    yield counter("paceline_rounds", "Rounds by mode of decoding.", ("mode",), _by(rounds, (1,), "rounds"))
    yield counter(
        "paceline_round_tokens",
        "Tokens that rounds put out, by mode of decoding.",
        ("mode",),
        _by(rounds, (1,), "emitted"),
    )


class PolicyGauges:
    """Guard, rollout and holdout as they stand."""

    def __init__(
        self,
        verdicts: Callable[[], Mapping[Subject, Verdict]],
        standings: Callable[[], Mapping[Subject, Standing]],
        documents: Mapping[str, str],
        share: float,
    ) -> None:
        self._verdicts = verdicts
        self._standings = standings
        self._documents = documents
        self._share = share
        self._read = ""
        self._comparisons: list[Comparison] = []

    def collect(self) -> Iterator[Metric]:
        """Families of the policy."""
        verdicts = list(self._verdicts().items())
        yield gauge(
            "paceline_guard_state",
            "Whether speculation is on for a type of task and a drafter: 1 for the state that holds.",
            ("task_type", "drafter", "state"),
            {
                (task, drafter, state.value): float(verdict.state is state)
                for (task, drafter), verdict in verdicts
                for state in _GUARD_STATES
            },
        )
        yield counter(
            "paceline_guard_switches",
            "Times the guard switched.",
            ("task_type", "drafter"),
            {subject: verdict.switches for subject, verdict in verdicts},
        )
        standings = list(self._standings().items())
        yield gauge(
            "paceline_rollout_stage",
            "Where the rollout of a drafter for a type of task stands: 1 for the stage that holds.",
            ("task_type", "drafter", "stage"),
            {
                (*subject, stage.value): float(standing.stage is stage)
                for subject, standing in standings
                for stage in Stage
            },
        )
        yield gauge(
            "paceline_rollout_share",
            "Share of requests that the rollout lets speculate.",
            ("task_type", "drafter"),
            {subject: standing.share for subject, standing in standings},
        )
        yield gauge("paceline_holdout_share", "Share of requests held out.", (), {(): self._share})
        comparisons = self._compared()
        yield gauge(
            "paceline_holdout_p99_ratio",
            "P99 of speculative requests over P99 of those held out, with bounds that hold at any time; above 1: slower.",
            ("task_type", "metric", "bound"),
            {
                (one.task, one.metric, bound): value
                for one in comparisons
                for bound, value in (
                    ("low", one.ratio.low),
                    ("estimate", one.ratio.estimate),
                    ("high", one.ratio.high),
                )
            },
        )
        yield gauge(
            "paceline_holdout_requests",
            "Requests compared.",
            ("task_type", "arm"),
            {
                (one.task, arm): count
                for one in comparisons
                for arm, count in zip(("speculative", HOLDOUT), one.requests, strict=True)
            },
        )

    def _compared(self) -> list[Comparison]:
        """Worked out once for each document: quantile bounds cost milliseconds."""
        document = self._documents.get("holdout", "[]")
        if document != self._read:
            self._comparisons = [
                one for one in comparisons_from(document) if (one.metric, one.p) in _COMPARED
            ]
            self._read = document
        return self._comparisons


def replica_gauges(replicas: Replicas) -> Iterator[Metric]:
    """The verify replicas as this router sees them."""
    seen = replicas.seen()
    yield gauge(
        "paceline_replica_usable",
        "Whether a verify replica takes requests.",
        ("replica",),
        {(one.address,): float(one.usable) for one in seen},
    )
    yield gauge(
        "paceline_replica_load",
        "Sequences at a verify replica, its queue included.",
        ("replica",),
        {(one.address,): one.load for one in seen},
    )


def _mode(accepted: Accepted) -> str:
    if accepted.decision.arm is Arm.HOLDOUT:
        return HOLDOUT
    return "plain" if accepted.plan.mode is Mode.PLAIN else "speculative"


def _of(
    known: dict[tuple[str, ...], Histogram], key: tuple[str, ...], bounds: tuple[float, ...]
) -> Histogram:
    found = known.get(key)
    if found is None:
        found = known[key] = Histogram(bounds)
    return found


def _by(
    rounds: Mapping[tuple[str, ...], list[int]], parts: tuple[int, ...], field: str
) -> dict[tuple[str, ...], float]:
    """Sums of a field by some parts of the key."""
    column = AT[field]
    sums: dict[tuple[str, ...], float] = {}
    for key, values in rounds.items():
        labels = tuple(key[part] for part in parts)
        sums[labels] = sums.get(labels, 0) + values[column]
    return sums


def _rate(recent: list[tuple[int, int]]) -> float | None:
    return ratio(sum(a for a, _ in recent), sum(d for _, d in recent))
