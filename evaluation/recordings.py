"""Recorded requests (``verify.records``, with token ids), as values: what a replay works on."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.types import AcceptancePrior, Law, Mode, Plan, SamplingParams
from verify_service.costs import CostTable


@dataclass(frozen=True, slots=True)
class Round:
    """One round as it was: tokens drafted, accepted and committed."""

    drafted: int
    accepted: int
    committed: int
    outcome: str = "used"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request as it was asked and answered. ``resumed`` output tokens were committed elsewhere.

    ``began_s`` and ``ended_s`` are seconds since 1970. ``complete``: it ran to its own end.
    """

    request_id: str
    began_s: float
    ended_s: float
    scope: str
    plan: Plan
    sampling: SamplingParams
    max_tokens: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    rounds: tuple[Round, ...] = ()
    resumed: int = 0
    complete: bool = True

    @property
    def replayable(self) -> bool:
        """Whether another drafter would have seen the same text: under the coupled law, with a round to replay."""
        return len(self.output_ids) > self.resumed + 1 and (
            self.plan.law in {None, Law.COUPLED} or self.sampling.greedy
        )


@dataclass(frozen=True, slots=True)
class Recording:
    """Requests in the order in which they began, and the replica that served them.

    ``num_dropped``: further requests that the writer had no room for.
    """

    requests: tuple[Recorded, ...]
    model: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context: int
    costs: CostTable | None
    num_dropped: int = 0


def load_recording(paths: Iterable[Path]) -> Recording:
    """All records of the files, or of the files in the directories. Raises ConfigError where they cannot be replayed."""
    head: Mapping[str, Any] | None = None
    requests: list[Recorded] = []
    dropped = 0
    for path in paths:
        for file in sorted(path.glob("requests-*.jsonl")) if path.is_dir() else [path]:
            for number, entry in _entries(file):
                match entry.get("kind"):
                    case "replica":
                        head = entry
                    case "dropped":
                        dropped += int(entry["count"])
                    case "requests":
                        if "output_ids" not in entry:
                            raise ConfigError(
                                f"{file}, line {number}: no token ids; record with verify.records.token_ids = true"
                            )
                        requests.append(_recorded(entry))
    if head is None or not requests:
        raise ConfigError(
            f"no recorded requests in {', '.join(map(str, paths)) or 'no file'}: a replay needs files that the verify tier wrote with "
            "verify.records.dir and verify.records.token_ids = true; those of `paceline check` hold no prompts"
        )
    model = head["model"]
    return Recording(
        tuple(sorted(requests, key=lambda one: one.began_s)),
        model["name"],
        model["tokenizer_fingerprint"],
        model["vocab_size"],
        model["max_context"],
        _costs(head["costs"]),
        dropped,
    )


def _entries(file: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith("\n"):  # the last line of a file that is being written may be half a line
                    yield number, json.loads(line)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    plan, sampling = entry["plan"], dict(entry["sampling"])
    prior = plan["prior"]
    sampling["seed"] = int(sampling["seed"])
    sampling["logit_bias"] = {one["token_id"]: one["bias"] for one in sampling["logit_bias"]}
    return Recorded(
        request_id=entry["request_id"],
        began_s=entry["began_unix"],
        ended_s=entry["began_unix"] + entry["ended_s"] - entry["began_s"],
        scope=entry["scope"],
        plan=Plan(
            Mode(plan["mode"]),
            plan["reason"],
            plan["drafter"],
            plan["k_max"],
            Law(plan["law"]),
            plan["k_fixed"],
            AcceptancePrior(prior["mean"], prior["strength"], tuple(prior["by_position"])) if prior else None,
        ),
        sampling=SamplingParams(**sampling),
        max_tokens=entry["max_tokens"],
        prompt_ids=tuple(entry["prompt_ids"]),
        output_ids=tuple(entry["output_ids"]),
        rounds=tuple(
            Round(one["drafted"], one["accepted"], one["committed"], one["outcome"])
            for one in entry["rounds"]
        ),
        resumed=entry["resumed_tokens"],
        complete=entry["finish"] in {"stop", "length"},
    )


def _costs(listed: Mapping[str, Any] | None) -> CostTable | None:
    if listed is None:
        return None
    curves = tuple((count, tuple(map(tuple, curve))) for count, curve in listed["curves"])
    return CostTable(
        curves, listed["context"], listed["row_key_s"], listed["sequence_key_s"], listed["origin"]
    )
