"""Public prompts for distillation, read from the directories of ``shared/data``; evaluation prompts are kept out.

Left out on purpose: Spec-Bench, MT-bench and Vicuna-bench (they are the evaluation, and exact duplicates of their turns
are dropped from every source), BBH (its canary asks for it), news articles, and MBPP's evaluation ids.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVALUATION = ("spec_bench/question_open.jsonl", "mt_bench/question.jsonl", "vicuna_bench/question.jsonl")
_SPLIT_REQUEST = "Split this sentence into two: "
_LANGUAGES = (("German", "deu"), ("Spanish", "spa"))
_CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag")
_MBPP_EVALUATION = range(11, 511)
_LONGEST_CHARACTERS = 3000


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message."""

    task: str
    source: str
    text: str


def collect(data: Path, *, mine: Path | None = None) -> list[Prompt]:
    """All prompts in a fixed shuffled order, each text once, no evaluation prompt among them.

    ``mine`` is a jsonl file of {"text", "task"?, "source"?}: prompts of one's own, instead of ``data``'s.
    """
    forbidden = {_plain(turn) for name in EVALUATION for row in _rows(data / name) for turn in row["turns"]}
    found: dict[str, Prompt] = {}
    for prompt in _own(mine) if mine else _public(data):
        key = _plain(prompt.text)
        if key and key not in forbidden and len(prompt.text) <= _LONGEST_CHARACTERS:
            found.setdefault(key, prompt)
    return [found[key] for key in sorted(found, key=lambda key: hashlib.sha256(key.encode()).digest())]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and, where there is one, an answer that a person wrote."""

    prompt: Prompt
    answer: str


def texts(data: Path, *, mine: Path | None = None) -> list[Text]:
    """Text to be read by the target: every prompt of ``collect``, with a person's answer where the source has one."""
    answers = {} if mine else dict(_answers(data))
    return [Text(prompt, answers.get(prompt.text, "")) for prompt in collect(data, mine=mine)]


def _answers(data: Path) -> Iterator[tuple[str, str]]:
    """What people answered to some of the prompts."""
    for row in _rows(data / "gsm8k/train_600.jsonl"):
        yield row["question"], re.sub(r"<<.*?>>", "", row["answer"])
    for row in _rows(data / "oasst_code/oasst_code.jsonl"):
        yield row["prompt"], row["completion"]
    for row in _rows(data / "mbpp/sanitized-mbpp.jsonl"):
        yield row["prompt"], row["code"]
    for row in _rows(data / "wiki_split/validation_300.jsonl"):
        yield _SPLIT_REQUEST + row["complex"], row["split"]
    for row in _rows(data / "ntrex/en_de_zh_es_200.jsonl"):
        for language, key in _LANGUAGES:
            yield _translation_request(language, row[key]), row["eng"]


def evaluation(data: Path, each: int) -> list[Prompt]:
    """First turns of Spec-Bench, at most ``each`` of a category; for measuring, never for training."""
    found: dict[str, list[Prompt]] = {}
    for row in _rows(data / EVALUATION[0]):
        category = row["category"] if row["category"] in _CATEGORIES else "mt_bench"
        of_category = found.setdefault(category, [])
        if category == "mt_bench" and row["question_id"] % 4:  # some of each of its eight kinds
            continue
        if len(of_category) < each:
            of_category.append(Prompt(category, "spec_bench", row["turns"][0]))
    return [prompt for of_category in found.values() for prompt in of_category]


def _public(data: Path) -> Iterator[Prompt]:
    for name, read in _SOURCES.items():
        for row in _rows(data / name):
            yield from read(row)


def _own(path: Path) -> Iterator[Prompt]:
    for row in _rows(path):
        yield Prompt(row.get("task", "own"), row.get("source", path.stem), row["text"])


def _classification(row: dict[str, Any]) -> Iterator[Prompt]:
    # Texts that were cut in the middle make no sensible prompt.
    # The default target knows little Chinese.
    if (
        row["lang"] != "zh"
        and row["chars"] <= 3900
        and "news" not in row["source"]
        and "bbh" not in row["source"]
    ):
        yield Prompt(row["task"], row["source"], row["text"])


def _mbpp(row: dict[str, Any]) -> Iterator[Prompt]:
    if row["task_id"] not in _MBPP_EVALUATION:
        yield Prompt("code", "mbpp", row["prompt"])


def _translations(row: dict[str, Any]) -> Iterator[Prompt]:
    for language, key in _LANGUAGES:
        yield Prompt("translation", "ntrex", _translation_request(language, row[key]))
    yield Prompt("rewriting", "ntrex", f"Say it in other words: {row['eng']}")


def _translation_request(language: str, text: str) -> str:
    return f"Translate {language} to English: {text}"


def _banking(row: dict[str, Any]) -> Iterator[Prompt]:
    yield Prompt("chat", "banking77", row["text"])


_SOURCES: dict[str, Callable[[dict[str, Any]], Iterator[Prompt]]] = {
    "task_classification/train.jsonl": _classification,
    "gsm8k/train_600.jsonl": lambda row: iter([Prompt("math_reasoning", "gsm8k", row["question"])]),
    "ifeval/input_open.jsonl": lambda row: iter([Prompt("chat", "ifeval", row["prompt"])]),
    "oasst/en_100_text.jsonl": lambda row: iter([Prompt("chat", "oasst", row["text"])]),
    "oasst_code/oasst_code.jsonl": lambda row: iter([Prompt("code", "oasst_code", row["prompt"])]),
    "mbpp/sanitized-mbpp.jsonl": _mbpp,
    "ntrex/en_de_zh_es_200.jsonl": _translations,
    "banking77/test_400.jsonl": _banking,
    "wiki_split/validation_300.jsonl": lambda row: iter(
        [Prompt("rewriting", "wiki_split", _SPLIT_REQUEST + row["complex"])]
    ),
}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
        row = json.loads(line)
        yield {"text": row} if isinstance(row, str) else row


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
