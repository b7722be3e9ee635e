"""Prompts for measurements: Spec-Bench in its own JSONL form (question_id, category, turns).

``prompts.jsonl`` beside this file holds 204 of our own in the same form, made by ``training.task_templates``: what a fresh clone measures
with, since Spec-Bench is not ours to ship.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

MT_BENCH = "mt_bench"
_OTHER_CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag")
CATEGORIES = (MT_BENCH, *_OTHER_CATEGORIES)
"""Spec-Bench (Xia et al. 2024) counts the eight categories of MT-bench as one."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question; of a conversation the first turn."""

    id: str
    category: str
    text: str


def load_spec_bench(path: Path, per_category: int) -> list[Prompt]:
    """The first ``per_category`` prompts of each category, in the file's order, categories in turn."""
    found: dict[str, list[Prompt]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        category = row["category"] if row["category"] in _OTHER_CATEGORIES else MT_BENCH
        if len(found[category]) < per_category:
            found[category].append(Prompt(str(row["question_id"]), category, row["turns"][0]))
    return [prompt for category in CATEGORIES for prompt in found[category]]
