"""What was seen of a pair: sums by group and time, from a ledger or from recorded requests. What ``diagnose`` goes by.

A ledger tells sums of hours and the times of its holdout; records tell single requests, with their rounds and tokens where
they hold them. Both become the same values, so that whoever writes another kind of record only has to make ``Seen`` of it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gates.bimodal import Blocks
from gates.served import as_record
from paceline.ranges import MAX_K
from router.ledger.group import Arm, Group, batch_bucket, temperature_bucket
from router.ledger.sums import (
    AT,
    MAX_POSITIONS,
    Row,
    accepted_by_position,
    add_speed,
    add_yield,
    drafted_by_position,
    nanoseconds,
    no_sums,
)
from router.quantiles import bin_of

Bins = Mapping[tuple[str, int], int]
SPECULATIVE, PLAIN = "speculative", "plain"


@dataclass(frozen=True, slots=True)
class Seen:
    """Sums of one request or of many alike. ``token_ids``, ``key`` and ``numerics`` are known of single ones only."""

    group: Group
    at: float
    row: Row
    bins: Bins = field(default_factory=dict)
    blocks: Blocks = field(default_factory=dict)
    numerics: str = ""
    token_ids: tuple[int, ...] = ()
    key: str = ""
    """The same for requests that must give the same tokens: prompt, parameters, seed."""
    asked_rounds: int = 0
    asked_ns: int = 0
    """Rounds for which a drafter was asked, whatever came of it, and their time; 0 where rounds are not known."""
    again: bool = False
    """A second plain run of a request, to see how far plain decoding moves by itself."""

    @property
    def way(self) -> str:
        """Speculative or plain."""
        return SPECULATIVE if self.group.drafter else PLAIN


@dataclass(frozen=True, slots=True)
class Evidence:
    """All of it. ``times``: requests by (task, way, metric) and bin, of ways that may be compared."""

    seen: Sequence[Seen]
    times: Mapping[tuple[str, str, str], Mapping[int, int]] = field(default_factory=dict)
    offline: Mapping[str, float] = field(default_factory=dict)
    """Accepted share that a drafter had when it was measured offline; "" is any drafter."""

    def tasks(self) -> list[str]:
        """Every type of task seen."""
        return sorted({one.group.task for one in self.seen})


_COMPARED = {Arm.AUTO: SPECULATIVE, Arm.HOLDOUT: PLAIN}


def from_rows(
    rows: Iterable[tuple[Group, float, Row]], holdout: str = "[]", offline: Mapping[str, float] = {}
) -> Evidence:
    """A ledger's rows (group, unix time, sums) and its holdout's document."""
    times = {
        (task, _COMPARED[Arm(arm)], metric): dict(map(tuple, counts))
        for task, arm, metric, counts in json.loads(holdout or "[]")
        if Arm(arm) in _COMPARED
    }
    seen = [Seen(group, at, row, blocks=blocks_of_row(row)) for group, at, row in rows]
    return Evidence(seen, times, offline)


def from_records(lines: Iterable[str], offline: Mapping[str, float] = {}) -> Evidence:
    """Requests as ``generate --json``, ``check`` and a replica's ``verify.records`` write them, one JSON object a line.

    Raises ValueError naming the line that is none.
    """
    seen, numerics = [], ""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind = record.get("kind")
            if kind == "replica":
                numerics = record["model"]["numerics"]
            record = as_record(record, numerics) if kind == "requests" else None if kind else record
            if record is not None:
                seen.append(from_record(record, number))
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"line {number}: no record of a request ({type(error).__name__}: {error})"
            ) from error
    return _of_requests(seen, offline)


def together(parts: Sequence[Evidence], offline: Mapping[str, float] = {}) -> Evidence:
    """The evidence of several files of records as one."""
    return _of_requests([one for part in parts for one in part.seen], offline)


def _of_requests(seen: list[Seen], offline: Mapping[str, float]) -> Evidence:
    times: dict[tuple[str, str, str], Counter[int]] = {}
    for one in seen:
        for (metric, bin_number), count in one.bins.items():
            times.setdefault((one.group.task, one.way, metric), Counter())[bin_number] += count
    return Evidence(seen, times, offline)


def from_record(record: Mapping[str, Any], number: int = 0) -> Seen:
    """One request."""
    plan, stats, spent = record["plan"], record["speculative"], record["timings"]
    tokens = int(record["usage"]["completion_tokens"])
    rounds = record.get("rounds") or ()
    sequences = [int(one["batch_sequences"]) for one in rounds]
    group = Group(
        task=record["task_type"],
        tenant="",
        drafter=plan["drafter"],
        version=plan.get("drafter_version", ""),
        law=plan.get("law") or "",
        temperature=temperature_bucket(float(record.get("temperature", 0.0))),
        batch=batch_bucket(sorted(sequences)[len(sequences) // 2] if sequences else 1),
        arm=(record.get("decision") or {}).get("arm", Arm.ASKED.value),
    )
    for name in (group.task, group.drafter, group.version, group.law, group.arm):
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no name")
    row = no_sums()
    counts = {
        "requests": 1,
        "prompt_tokens": record["usage"]["prompt_tokens"],
        "output_tokens": tokens,
        "rounds": stats["num_rounds"],
        "spec_rounds": stats["num_spec_steps"],
        "late_rounds": stats["num_late_rounds"],
        "empty_rounds": stats["num_empty_rounds"],
        "unavailable_rounds": stats["num_unavailable_rounds"],
        "drafted": stats["num_draft_tokens"],
        "accepted": stats["num_accepted_draft_tokens"],
        "ignored": stats["num_ignored_draft_tokens"],
        "emitted": max(0, tokens - 1),
    }
    times = {
        "exposed_draft_ns": "draft_s", "network_ns": "network_s", "wait_ns": "wait_s", "verify_ns": "verify_s",
        "queue_ns": "queue_s", "prefill_ns": "prefill_s", "decode_ns": "decode_s", "ttft_ns": "time_to_first_token_s",
        "total_ns": "total_s",
    }  # fmt: skip
    for name, value in counts.items():
        row[AT[name]] = value
    for name, timing in times.items():
        row[AT[name]] = nanoseconds(float(spent[timing]))
    row[AT["draft_ns"]] = row[AT["exposed_draft_ns"]]
    add_yield(row, counts["accepted"], counts["drafted"])
    add_speed(row, tokens - 1, float(spent["decode_s"]))
    blocks = _blocks(rounds) if rounds else _blocks_of_histogram(stats, plan)
    if any(not 0 <= length <= MAX_K or count < 0 for (length, _), count in blocks.items()):
        raise ValueError(f"accepted lengths: expected 0 to {MAX_K}")
    _add_positions(row, blocks)
    bins = {
        ("ttft", bin_of(float(spent["time_to_first_token_s"]))): 1,
        ("total", bin_of(float(spent["total_s"]))): 1,
    }
    if tokens > 1:
        bins["gap", bin_of(float(spent["decode_s"]) / (tokens - 1))] = 1
    ids = record.get("token_ids") or ()
    at = float(record.get("at", number))
    key = str(record.get("key", ""))
    asked = [one for one in rounds if one.get("outcome", "none") != "none" and "verify_s" in one]
    return Seen(
        group, at, row, bins, blocks, record.get("numerics", ""), tuple(map(int, ids)), key, len(asked),
        nanoseconds(sum(one["draft_s"] + one["network_s"] + one["wait_s"] + one["verify_s"] for one in asked)),
        bool(record.get("again")),
    )  # fmt: skip


def _blocks(rounds: Iterable[Mapping[str, Any]]) -> Blocks:
    found: Counter[tuple[int, bool]] = Counter()
    for one in rounds:
        if one["drafted"]:
            agreed = int(one["accepted"]) + int(one["ignored"])
            found[agreed, agreed >= int(one["drafted"])] += 1
    return found


def _blocks_of_histogram(stats: Mapping[str, Any], plan: Mapping[str, Any]) -> Blocks:
    """Without rounds: only where all blocks were as long as the plan allows is it known which ended and which met a wrong token."""
    histogram = stats.get("acceptance_histogram") or ()
    if stats["num_draft_tokens"] != stats["num_spec_steps"] * plan["k_max"]:
        return {}
    return {(length, length >= plan["k_max"]): count for length, count in enumerate(histogram) if count}


def blocks_of_row(row: Row) -> Blocks:
    """From counts by position: what was drafted so deep and alive was tested there, what ended alive had ended."""
    drafted, accepted = drafted_by_position(row), accepted_by_position(row)
    found: dict[tuple[int, bool], int] = {}
    alive = int(drafted[0])
    for depth in range(MAX_POSITIONS):
        tested = min(alive, int(drafted[depth]))
        right = min(tested, int(accepted[depth]))
        ended = {(depth, True): alive - tested, (depth, False): tested - right}
        found |= {key: count for key, count in ended.items() if count > 0}
        alive = right
    if alive > 0:
        found[MAX_POSITIONS, True] = alive
    return found


def _add_positions(row: Row, blocks: Blocks) -> None:
    drafted, accepted = drafted_by_position(row), accepted_by_position(row)
    for (length, whole), count in blocks.items():
        tested = min(MAX_POSITIONS, length if whole else length + 1)
        drafted[:tested] += count
        accepted[: min(MAX_POSITIONS, length)] += count


def blocks_of(seen: Iterable[Seen]) -> Blocks:
    """Of all of them."""
    found: Counter[tuple[int, bool]] = Counter()
    for one in seen:
        found.update(one.blocks)
    return found


def sums(seen: Iterable[Seen]) -> Row:
    """Of all of them."""
    rows = [one.row for one in seen]
    return np.sum(rows, axis=0) if rows else no_sums()
