"""What the verify engine counts, and the families that a scrape makes of it.

``stepped`` is called once a step on the engine thread and only adds to numbers; all else happens in the thread that scrapes.
vLLM's speculative counters are here under our prefix, with its meaning: a draft is one verified block.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from paceline.telemetry.metrics import Histogram, Recent, Sums, counter, gauge, histogram, ratio
from paceline.types import Mode, ModelInfo, ProposalOutcome
from verify_service.scheduler import Work
from verify_service.step import Outcome

if TYPE_CHECKING:
    from verify_service.engine import Engine

STEP_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
MAX_POSITIONS = 16
"""Draft positions with a counter of their own; vLLM counts from 0, too."""
RECENT_STEPS = 1024
RECENT_BLOCKS = 512
PLAIN, SPECULATIVE, PREFILL = "plain", "speculative", "prefill"


class Meter:
    """The engine thread adds, a scrape reads."""

    def __init__(self) -> None:
        self.steps = {kind: Histogram(STEP_BOUNDS_S) for kind in ("decode", "mixed", "prefill")}
        self.step_times = Recent(RECENT_STEPS)
        self.outcomes: Counter[ProposalOutcome] = Counter()
        self.depth_reasons: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.ahead = Sums()
        for level in ("1", "2"):
            for result in ("hit", "miss"):
                self.ahead.add((level, result), 0)
        self.device_s = dict.fromkeys((PLAIN, SPECULATIVE, PREFILL), 0.0)
        self.tokens = dict.fromkeys((PLAIN, SPECULATIVE), 0)
        self.prompt_tokens = 0
        self.drafts = 0
        self.drafted = 0
        self.accepted = 0
        self.ignored = 0
        self.drafted_at = [0] * MAX_POSITIONS
        self.accepted_at = [0] * MAX_POSITIONS
        self.draft_s = self.hidden_draft_s = self.network_s = self.wait_s = 0.0
        self.verify_s = self.forward_s = self.accept_s = 0.0
        self.peak_running = 0
        self._recent = [(0, 0)] * RECENT_BLOCKS  # drafted, accepted; a ring
        self._next = 0

    def stepped(self, work: SequenceOf[Work], outcomes: SequenceOf[Outcome], step_s: float) -> None:
        """A step of ``step_s`` ran ``work`` and came to ``outcomes``."""
        chunks = sum([item.chunk for item in work if item.is_prefill])
        rounds = [outcome for outcome in outcomes if outcome.run.record is not None]
        kind = "decode" if not chunks else "mixed" if rounds else "prefill"
        self.steps[kind].observe(step_s)
        self.step_times.add(step_s)
        rows = {PLAIN: 0, SPECULATIVE: 0, PREFILL: chunks}
        for outcome in outcomes:
            mode = PLAIN if outcome.sequence.spec.plan.mode is Mode.PLAIN else SPECULATIVE
            self.tokens[mode] += len(outcome.run.token_ids)
            if outcome.run.record is not None:
                rows[mode] += 1 + outcome.run.record.drafted
        for outcome in rounds:
            self._round(outcome)
        total = sum(rows.values()) or 1
        for mode, number in rows.items():
            self.device_s[mode] += step_s * number / total
        self.prompt_tokens += chunks

    def _round(self, outcome: Outcome) -> None:
        record = outcome.run.record
        assert record is not None
        self.outcomes[record.outcome] += 1
        self.depth_reasons[record.depth_reason.value] += 1
        self.draft_s += record.draft_s
        self.hidden_draft_s += record.hidden_draft_s
        self.network_s += record.network_s
        self.wait_s += record.wait_s
        self.verify_s += record.verify_s
        self.forward_s += record.forward_s
        self.accept_s += record.accept_s
        if record.ahead_level:
            self.ahead.add((str(record.ahead_level), "hit" if record.ahead_hit else "miss"))
        if not record.drafted:
            return
        # Drafted first, accepted last, and a scrape reads them the other way round: it never sees more accepted.
        self.drafts += 1
        self.drafted += record.drafted
        for position in range(min(record.drafted, MAX_POSITIONS)):
            self.drafted_at[position] += 1
        for position in range(min(record.accepted, MAX_POSITIONS)):
            self.accepted_at[position] += 1
        self.ignored += record.ignored
        self.accepted += record.accepted
        self._recent[self._next] = record.drafted, record.accepted
        self._next = (self._next + 1) % RECENT_BLOCKS

    def ended(self, how: str) -> None:
        """A sequence is over: stop, length, cancelled, deadline, failed."""
        self.ends[how] += 1

    # --- scrape -----------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """What was counted."""
        yield from self._speculation()
        yield from self._rounds()
        yield from self._work()

    def _speculation(self) -> Iterator[Metric]:
        accepted_at, drafted_at = list(self.accepted_at), list(self.drafted_at)
        accepted, ignored, drafted, drafts = self.accepted, self.ignored, self.drafted, self.drafts
        recent = list(self._recent)
        yield _one("paceline_spec_decode_num_drafts", "Blocks that were verified.", drafts)
        yield _one("paceline_spec_decode_num_draft_tokens", "Draft tokens that were verified.", drafted)
        yield _one(
            "paceline_spec_decode_num_accepted_tokens",
            "Draft tokens that were accepted and put out.",
            accepted,
        )
        yield counter(
            "paceline_spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the block, from 0.",
            ("position",),
            {(str(position),): count for position, count in enumerate(accepted_at) if drafted_at[position]},
        )
        yield counter(
            "paceline_spec_decode_num_draft_tokens_per_pos",
            "Verified draft tokens by their position in the block, from 0.",
            ("position",),
            {(str(position),): count for position, count in enumerate(drafted_at) if count},
        )
        yield _one(
            "paceline_spec_decode_num_ignored_tokens",
            "Draft tokens that agreed with the target but lay behind the end of the output.",
            ignored,
        )
        blocks = sum(1 for one, _ in recent if one)
        all_drafted = sum(one for one, _ in recent)
        yield gauge(
            "paceline_engine_spec_acceptance_rate",
            f"Accepted over drafted, over the last {RECENT_BLOCKS} blocks.",
            (),
            {(): ratio(sum(one for _, one in recent), all_drafted)},
        )
        yield gauge(
            "paceline_engine_spec_draft_length",
            f"Draft tokens a block, over the last {RECENT_BLOCKS} blocks.",
            (),
            {(): ratio(all_drafted, blocks)},
        )

    def _rounds(self) -> Iterator[Metric]:
        yield counter(
            "paceline_engine_rounds",
            "Rounds by what became of the proposal; late, unavailable, empty and cut ones were plain against the plan.",
            ("outcome",),
            {(outcome.value,): self.outcomes[outcome] for outcome in ProposalOutcome},
        )
        yield counter(
            "paceline_engine_depth_decisions",
            "Rounds by why they drafted as many tokens as they did.",
            ("reason",),
            {(reason,): count for reason, count in list(self.depth_reasons.items())},
        )
        yield counter(
            "paceline_engine_round_seconds",
            "Where the rounds' time went, summed over sequences; the four parts are the whole round.",
            ("part",),
            {
                ("draft",): self.draft_s,
                ("network",): self.network_s,
                ("wait",): self.wait_s,
                ("verify",): self.verify_s,
            },
        )
        yield counter(
            "paceline_engine_verify_seconds",
            "The verify part of rounds: the forward, and accepting.",
            ("part",),
            {("forward",): self.forward_s, ("accept",): self.accept_s},
        )
        yield counter(
            "paceline_engine_draft_seconds",
            "The drafters' time: exposed (a round waited for it) and hidden (spent ahead, behind an earlier round).",
            ("kind",),
            {("exposed",): self.draft_s, ("hidden",): self.hidden_draft_s},
        )
        yield counter(
            "paceline_engine_ahead_blocks",
            "Rounds whose block could be drafted ahead of the verdict, by level, and whether one fitted the outcome.",
            ("level", "result"),
            self.ahead.values,
        )

    def _work(self) -> Iterator[Metric]:
        yield histogram(
            "paceline_engine_step_seconds",
            "Steps of the engine: decode only, prompt only, or mixed.",
            ("kind",),
            {(kind,): one for kind, one in self.steps.items()},
        )
        yield gauge(
            "paceline_engine_step_p99_seconds",
            f"99 of 100 of the last {RECENT_STEPS} steps took no longer.",
            (),
            {(): self.step_times.quantile(0.99)},
        )
        yield counter(
            "paceline_engine_device_seconds",
            "Time of the device, shared out by rows: what plain and speculative decoding and prompts took of it.",
            ("mode",),
            {(mode,): seconds for mode, seconds in self.device_s.items()},
        )
        yield counter(
            "paceline_engine_output_tokens",
            "Tokens committed, by the plan's mode.",
            ("mode",),
            {(mode,): number for mode, number in self.tokens.items()},
        )
        yield _one(
            "paceline_engine_prompt_tokens", "Prompt tokens run through the model.", self.prompt_tokens
        )
        yield counter(
            "paceline_engine_sequences_ended",
            "Sequences by how they ended; cancelled: the caller left, or had enough (a stop string).",
            ("how",),
            {(how,): count for how, count in list(self.ends.items())},
        )


def engine_state(engine: "Engine", info: ModelInfo) -> Iterable[Metric]:
    """The engine as it stands: a glance, from any thread."""
    state = engine.state()
    meter = engine.meter
    peak = max(meter.peak_running if meter is not None else 0, state.num_running)
    yield gauge("paceline_engine_num_running", "Sequences that hold memory.", (), {(): state.num_running})
    yield gauge("paceline_engine_num_waiting", "Sequences that wait for memory.", (), {(): state.num_waiting})
    yield gauge("paceline_engine_kv_slots", "Sequences that fit into memory.", (), {(): state.kv_slots})
    yield gauge(
        "paceline_engine_kv_usage_ratio",
        "Share of the KV slots that are in use.",
        (),
        {(): state.num_running / state.kv_slots},
    )
    yield gauge(
        "paceline_engine_kv_usage_peak_ratio",
        "Largest share of the KV slots in use since the start.",
        (),
        {(): peak / state.kv_slots},
    )
    yield gauge(
        "paceline_engine_kv_tokens",
        "Tokens that lie in KV memory, kept prefixes included.",
        (),
        {(): state.kv_tokens},
    )
    yield _one("paceline_engine_preemptions", "Sequences that gave way to others.", state.preemptions)
    yield _one(
        "paceline_engine_prefix_tokens_asked",
        "Tokens of new sequences, looked up for reuse.",
        state.prefix_tokens_asked,
    )
    yield _one(
        "paceline_engine_prefix_tokens_reused",
        "Of those, tokens found in memory.",
        state.prefix_tokens_reused,
    )
    yield gauge(
        "paceline_engine_stalled_seconds",
        "For how long work has waited without a step finishing; 0 when idle.",
        (),
        {(): engine.stalled_s()},
    )
    yield gauge(
        "paceline_model_info",
        "The target model as loaded: constant 1, the facts are labels.",
        ("name", "fingerprint", "dtype", "device", "runner", "numerics"),
        {(info.name, info.fingerprint[:12], info.dtype, info.device, info.runner, info.numerics): 1},
    )
    yield from _links(engine)


def _links(engine: "Engine") -> Iterator[Metric]:
    links = engine.links()
    yield gauge(
        "paceline_link_up",
        "Whether a draft replica is connected.",
        ("endpoint",),
        {(link.endpoint,): float(link.up) for link in links},
    )
    yield gauge(
        "paceline_link_breaker_open",
        "Whether a draft replica is left alone because it did not answer in time.",
        ("endpoint",),
        {(link.endpoint,): float(link.breaker_open) for link in links},
    )
    yield counter(
        "paceline_link_connections",
        "Times that a draft replica was connected.",
        ("endpoint",),
        {(link.endpoint,): link.connections for link in links},
    )
    yield counter(
        "paceline_link_breaker_openings",
        "Times that a draft replica was left alone.",
        ("endpoint",),
        {(link.endpoint,): link.openings for link in links},
    )
    yield counter(
        "paceline_link_proposals",
        "Proposals by what became of them; only apply and ahead ones can be used.",
        ("fate",),
        {(fate.value,): count for fate, count in engine.fates().items()},
    )
    yield gauge(
        "paceline_drafter_info",
        "Drafters that the verify tier knows: 1 if one can be asked now.",
        ("drafter", "version"),
        {(name, version): float(there) for name, (version, there) in engine.state().drafters.items()},
    )


def _one(name: str, text: str, value: float) -> Metric:
    return counter(name, text, (), {(): value})
