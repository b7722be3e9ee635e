"""Ledgers and records in which one trouble, and no other, was planted."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from router.ledger.group import Arm, Group
from router.ledger.sums import (
    AT,
    Row,
    accepted_by_position,
    add_speed,
    add_yield,
    drafted_by_position,
    no_sums,
)
from router.quantiles import bin_of

K = 4
PLAIN_S = 0.028


@dataclass
class World:
    """Requests of one type of task: half plain by lot, half speculative. Healthy unless told otherwise."""

    acceptance: Callable[[random.Random, int], float] = lambda rng, index: rng.gauss(0.8, 0.04)
    round_s: float = 0.052
    plain_batch: str = "2-4"
    batch: str = "2-4"
    plain_step_s: float = PLAIN_S
    tokens: int = 90
    law: str = "coupled"
    requests: int = 400
    seed: int = 3
    bins: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[Group, float, Row]]:
        rng = random.Random(self.seed)
        for index in range(self.requests):
            at = 3600.0 * (index // 20)
            yield self._plain(rng), at, self.last
            yield self._speculative(rng, index), at, self.last

    def holdout(self) -> str:
        """The document, after ``rows``."""
        return json.dumps(
            [["code", arm, metric, sorted(counts.items())] for (arm, metric), counts in self.bins.items()]
        )

    def _group(self, arm: Arm, batch: str, *, drafter: str = "") -> Group:
        return Group("code", "", drafter, "1@t", self.law if drafter else "", "0", batch, arm.value)

    def _plain(self, rng: random.Random) -> Group:
        row = no_sums()
        tokens = max(2, round(self.tokens * rng.uniform(0.8, 1.2)))
        seconds = (tokens - 1) * self.plain_step_s * rng.uniform(0.97, 1.03)
        self._put(row, Arm.HOLDOUT, tokens, seconds, rounds=tokens - 1, seconds_verify=seconds)
        return self._group(Arm.HOLDOUT, self.plain_batch)

    def _speculative(self, rng: random.Random, index: int) -> Group:
        row = no_sums()
        rate = min(0.995, max(0.0, self.acceptance(rng, index)))
        drafted, accepted = drafted_by_position(row), accepted_by_position(row)
        tokens, rounds, right = 1, 0, 0
        while tokens < self.tokens:
            depth = 0
            while depth < K and rng.random() < rate:
                depth += 1
            drafted[:K] += 1
            accepted[:depth] += 1
            tokens, rounds, right = tokens + depth + 1, rounds + 1, right + depth
        seconds = rounds * self.round_s * rng.uniform(0.97, 1.03)
        row[AT["spec_rounds"]], row[AT["drafted"]], row[AT["accepted"]] = rounds, rounds * K, right
        row[AT["exposed_draft_ns"]] = int(rounds * 0.024 * 1e9)
        add_yield(row, right, rounds * K)
        self._put(row, Arm.AUTO, tokens, seconds, rounds=rounds, seconds_verify=seconds - rounds * 0.024)
        return self._group(Arm.AUTO, self.batch, drafter="model")

    def _put(
        self, row: Row, arm: Arm, tokens: int, seconds: float, *, rounds: int, seconds_verify: float
    ) -> None:
        for name, value in {"requests": 1, "output_tokens": tokens, "emitted": tokens - 1, "rounds": rounds, "verify_ns": int(seconds_verify * 1e9)}.items():  # fmt: skip
            row[AT[name]] = value
        add_speed(row, tokens - 1, seconds)
        for metric, value in (("gap", seconds / (tokens - 1)), ("total", seconds)):
            counts = self.bins.setdefault((arm.value, metric), {})
            counts[bin_of(value)] = counts.get(bin_of(value), 0) + 1
        self.last = row


def two_kinds(rng: random.Random, index: int) -> float:
    """One request in nine finds nothing to copy."""
    return 0.02 if index % 9 == 0 else 0.93


def falling(rng: random.Random, index: int) -> float:
    """From 0.85 to 0.60 over the requests."""
    return rng.gauss(0.85 - 0.25 * index / 400, 0.03)


LEDGERS = {
    "healthy": World(),
    "slow": World(acceptance=lambda rng, index: rng.gauss(0.25, 0.04)),
    "tail": World(acceptance=two_kinds),
    "quality": World(law="ratio"),
    "cost": World(plain_batch="11-31", batch="2-4", plain_step_s=0.040, round_s=0.046),
    "short": World(tokens=12),
    "drift": World(acceptance=falling),
}


def record(
    rng: random.Random, index: int, *, drafter: str, ids: list[int], numerics: str = "deterministic"
) -> dict[str, Any]:
    """What `paceline generate --json` prints of one healthy request."""
    tokens = len(ids)
    rounds = (tokens - 1) // 3 if drafter else tokens - 1
    decode_s = rounds * (0.052 if drafter else 0.028) * rng.uniform(0.97, 1.03)
    histogram: list[int] = []
    if drafter:
        histogram = [0] * (K + 1)
        for _ in range(rounds):
            depth = 0
            while depth < K and rng.random() < 0.72:
                depth += 1
            histogram[depth] += 1
    accepted = sum(length * count for length, count in enumerate(histogram))
    return {
        "request_id": f"{drafter}{index}",
        "key": str(index),
        "task_type": "code",
        "token_ids": ids,
        "numerics": numerics,
        "usage": {"prompt_tokens": 40, "completion_tokens": tokens, "cached_prompt_tokens": 0},
        "plan": {
            "mode": "speculative" if drafter else "plain",
            "drafter": drafter,
            "k_max": K if drafter else 0,
            "law": "coupled" if drafter else None,
        },
        "timings": {
            "queue_s": 0.0, "prefill_s": 0.05, "decode_s": decode_s, "draft_s": rounds * 0.024 if drafter else 0.0,
            "network_s": 0.0, "wait_s": 0.0, "verify_s": rounds * 0.028, "time_to_first_token_s": 0.06, "total_s": decode_s + 0.06,
        },
        "speculative": {
            "num_rounds": rounds, "num_spec_steps": rounds if drafter else 0,
            "num_draft_tokens": rounds * K if drafter else 0, "num_accepted_draft_tokens": accepted,
            "num_ignored_draft_tokens": 0, "num_late_rounds": 0, "num_empty_rounds": 0, "num_unavailable_rounds": 0,
            "acceptance_histogram": histogram,
        },
    }  # fmt: skip


def records(*, repeats: bool = False, different: bool = False) -> list[str]:
    """60 requests both ways. ``repeats``: every fifth speculative output says a phrase twice at a boundary."""
    rng = random.Random(5)
    lines = []
    for index in range(60):
        ids = [rng.randrange(1000) for _ in range(90)]
        mine = list(ids)
        if repeats and index % 5 == 0:
            mine = (ids[:40] + ids[36:])[:90]
        if different and index % 6 == 0:
            mine = ids[:50] + [rng.randrange(1000) for _ in range(40)]
        lines.append(json.dumps(record(rng, index, drafter="", ids=ids)))
        lines.append(json.dumps(record(rng, index, drafter="model", ids=mine)))
    return lines


def planted(name: str) -> World:
    """A fresh one."""
    return replace(LEDGERS[name], bins={})
