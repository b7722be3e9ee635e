"""One record a request: how it was asked, what each round did and where its time went. Off unless ``verify.records`` says so.

Nothing of a text is in it unless ``token_ids`` is on: then with the output's ids and the seed the traffic can be
replayed (``evaluation.replay``), because the committed text does not depend on the drafter.
"""

import time
from dataclasses import asdict
from typing import Any

from prometheus_client.metrics_core import Metric

from paceline.config import VerifyConfig
from paceline.engine import Runner
from paceline.records import RecordWriter, Schema
from paceline.telemetry.metrics import counter
from paceline.types import RoundRecord
from verify_service.costs import CostTable
from verify_service.link_client import scope_of
from verify_service.sequence import Admitted, Event, Failed, Finished, Run, Sequence

NAME = "requests"
VERSION = 1

_TIMINGS = ("queue_s", "prefill_s", "decode_s", "draft_s", "network_s", "wait_s", "verify_s")
_ROUND: Schema = {
    "at_s": float, "index": int, "base_len": int, "asked": int, "drafted": int, "accepted": int, "ignored": int, "committed": int,
    "outcome": str, "drafter": str, "batch_sequences": int, "batch_rows": int, "draft_s": float, "network_s": float,
    "wait_s": float, "verify_s": float, "forward_s": float, "accept_s": float, "depth_reason": str, "expected_tokens": float,
    "next_worth_s": float, "next_cost_s": float, "step": int, "hidden_draft_s": float, "ahead_level": int, "ahead_hit": bool, "beside": bool,
}  # fmt: skip
SCHEMA: Schema = {
    "request_id": str, "verify_id": str, "sequence_id": int, "began_s": float, "began_unix": float, "ended_s": float, "scope": str, "priority": int,
    "plan": {
        "mode": str, "reason": str, "drafter": str, "drafter_version": str, "k_max": int, "k_fixed": bool, "law": str,
        "prior": {"mean": float, "strength": float, "by_position": [float]},
    },
    "sampling": {
        "temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float,
        "presence_penalty": float, "frequency_penalty": float, "seed": str,
        "logit_bias": [{"token_id": int, "bias": float}],
    },
    "max_tokens": int, "prompt_tokens": int, "resumed_tokens": int, "cached_tokens": int, "output_tokens": int,
    "prefills": int, "finish": str, "timings": dict.fromkeys(_TIMINGS, float),
    "rounds": [_ROUND], "prompt_ids": [int], "output_ids": [int],
}  # fmt: skip
"""Times are seconds of the replica's monotonic clock, which all records of a file share."""


def open_records(
    config: VerifyConfig, verify_id: str, runner: Runner, costs: CostTable | None
) -> RecordWriter | None:
    """The writer that the settings ask for; None: nothing is recorded. Raises ConfigError."""
    if not config.records.dir:
        return None
    header = {
        "version": VERSION,
        "verify_id": verify_id,
        "token_ids": config.records.token_ids,
        "model": asdict(runner.info),
        "eos_token_ids": list(runner.eos_token_ids),
        "costs": asdict(costs) if costs is not None else None,
    }
    return RecordWriter(config.records, NAME, header=header, schema=SCHEMA, section="verify.records")


def records_lost(writer: RecordWriter) -> Metric:
    """Records that are missing in the files."""
    return counter(
        "paceline_records_lost",
        "Records that were not written: the queue was full, or the disk said no.",
        ("records", "reason"),
        {(NAME, "queue"): writer.dropped, (NAME, "disk"): writer.lost},
    )


class Recording:
    """Sees the events of one sequence, in order; ``end`` hands the record over."""

    def __init__(
        self,
        writer: RecordWriter,
        verify_id: str,
        sequence: Sequence,
        *,
        token_ids: bool,
        drafter_version: str,
    ) -> None:
        self._writer = writer
        self._verify_id = verify_id
        self._sequence = sequence
        self._token_ids = token_ids
        self._drafter_version = drafter_version
        self._runs: list[Run] = []
        self._cached = 0
        self._last: Finished | Failed | None = None
        self._began_unix = time.time()

    def see(self, event: Event) -> None:
        """Remember it."""
        match event:
            case Admitted():
                self._cached = event.cached_tokens
            case Run():
                self._runs.append(event)
            case Finished() | Failed():
                self._last = event

    def end(self, now: float) -> None:
        """The call is over, whichever way; ``now`` is monotonic."""
        self._writer.put(lambda: self._record(now))

    def _record(self, now: float) -> dict[str, Any]:
        sequence, spec, runs = self._sequence, self._sequence.spec, self._runs
        output = [*spec.committed_ids, *(token for run in runs for token in run.token_ids)]
        record: dict[str, Any] = {
            "request_id": spec.request_id,
            "verify_id": self._verify_id,
            "sequence_id": sequence.id,
            "began_s": sequence.arrived,
            "began_unix": self._began_unix,
            # The last commit, where there was an end: the call may return after the next one has begun.
            "ended_s": runs[-1].ended if runs and isinstance(self._last, Finished) else now,
            "scope": scope_of(spec.tenant),
            "priority": spec.priority,
            "plan": self._plan(),
            "sampling": self._sampling(),
            "max_tokens": spec.max_tokens,
            "prompt_tokens": len(spec.prompt_ids),
            "resumed_tokens": len(spec.committed_ids),
            "cached_tokens": self._cached,
            "output_tokens": len(output),
            "prefills": sum(run.record is None for run in runs),
            "finish": self._finish(),
            "timings": self._timings(),
            "rounds": [_round(run, run.record) for run in runs if run.record is not None],
        }
        if self._token_ids:
            record |= {"prompt_ids": list(spec.prompt_ids), "output_ids": output}
        return record

    def _finish(self) -> str:
        match self._last:
            case Finished(reason=reason):
                return reason.value
            case Failed(error=error):
                return type(error).__name__
            case None:
                return "cancelled"  # or the router had enough: a stop string

    def _timings(self) -> dict[str, float]:
        timings = self._last.timings if isinstance(self._last, Finished) else self._sequence.timings()
        return {name: getattr(timings, name) for name in _TIMINGS}

    def _plan(self) -> dict[str, Any]:
        plan = self._sequence.spec.plan
        prior = plan.prior
        return {
            "mode": plan.mode.value,
            "reason": plan.reason,
            "drafter": plan.drafter,
            "drafter_version": self._drafter_version,
            "k_max": plan.k_max,
            "k_fixed": plan.k_fixed,
            "law": self._sequence.law.value,
            "prior": None
            if prior is None
            else {"mean": prior.mean, "strength": prior.strength, "by_position": list(prior.by_position)},
        }

    def _sampling(self) -> dict[str, Any]:
        sampling = self._sequence.spec.sampling
        bias = sampling.logit_bias if self._token_ids else {}
        return {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "seed": str(sampling.seed),  # 64 bits: more than a JSON number is sure to hold
            "logit_bias": [{"token_id": token, "bias": value} for token, value in bias.items()],
        }


def _round(run: Run, record: RoundRecord) -> dict[str, Any]:
    return {
        "at_s": run.ended,
        **{name: getattr(record, name) for name in _PLAIN_FIELDS},
        "outcome": record.outcome.value,
        "depth_reason": record.depth_reason.value,
    }


_PLAIN_FIELDS = [name for name in _ROUND if name not in {"at_s", "outcome", "depth_reason"}]
