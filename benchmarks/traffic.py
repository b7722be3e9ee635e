"""Prompts of measurements that need more than single questions: conversations, and templates filled in again and again.

All from public data sets in their own files; ``root`` is the folder that holds them (Spec-Bench, MT-bench, banking77,
CrossNER, WikiSplit, sql-eval).
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from evaluation.workload import load_spec_bench

TEMPLATES = ("support", "entities", "split", "sql")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: what was said so far. ``turns`` are the user's; the answers between them come from the target."""

    id: str
    category: str
    turns: tuple[str, ...]


def spec_bench(root: Path, per_category: int) -> list[Asked]:
    """The six categories of Spec-Bench, single questions."""
    path = root / "spec_bench" / "question_open.jsonl"
    return [Asked(p.id, p.category, (p.text,)) for p in load_spec_bench(path, per_category)]


def conversations(root: Path, count: int) -> list[Asked]:
    """MT-bench, both turns, every ``80 / count``-th."""
    rows = list(_jsonl(root / "mt_bench" / "question.jsonl"))
    chosen = rows[:: max(1, len(rows) // count)][:count]
    return [Asked(str(row["question_id"]), "conversation", tuple(row["turns"])) for row in chosen]


def templates(root: Path, count: int) -> list[Asked]:
    """``count`` fillings of each of four templates, in turn: what one application sends all day."""
    support = (
        "You are a customer service agent of Northbank. Write a short, polite reply to this customer. Begin with "
        '"Dear customer," and end with "Kind regards, Northbank customer service".\n\nCustomer: {}'
    )
    entities = (
        "List every named entity of the sentence as a JSON array of objects with the keys "
        '"text" and "type" (person, organisation, place, metric, algorithm, misc). Answer with JSON only.\n\n'
        "Sentence: {}"
    )
    split = (
        "Split the sentence into two shorter sentences with the same meaning. Answer in the form\n"
        "First: <sentence>\nSecond: <sentence>\n\nSentence: {}"
    )
    sql = (
        "The database has the tables author(aid, name, homepage, oid), publication(pid, title, year, cid, jid), "
        "writes(aid, pid), domain(did, name), domain_author(aid, did). Write one SQLite query and nothing else.\n\n"
        "Question: {}"
    )
    filled = {
        "support": (support, (row["text"] for row in _jsonl(root / "banking77" / "test_400.jsonl"))),
        "entities": (entities, (row["text"] for row in _jsonl(root / "crossner" / "ai_music_science.jsonl"))),
        "split": (split, (row["complex"] for row in _jsonl(root / "wiki_split" / "validation_300.jsonl"))),
        "sql": (sql, _questions(root / "sql_eval" / "questions_gen_sqlite.csv")),
    }
    columns = [
        [Asked(f"{name}-{i}", name, (text.format(value),)) for i, value in enumerate(islice(values, count))]
        for name, (text, values) in filled.items()
    ]
    return [asked for row in zip(*columns, strict=True) for asked in row]


def _questions(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["db_name"] == "academic" or row["db_name"] == "scholar":
                yield row["question"]
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["db_name"] not in ("academic", "scholar"):
                yield row["question"]


def _jsonl(path: Path) -> Iterator[dict]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)
