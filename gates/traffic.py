"""Requests to check a pair with, one JSON object a line.

Understood: ``text`` (or ``prompt``), ``messages`` ([{"role", "content"}]) or ``turns`` (the first one is asked); ``task_type`` (or ``task``,
``category``), ``max_tokens``, ``temperature``, ``seed``. So the file of a benchmark such as Spec-Bench can be taken as it is.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``task`` empty: the router tells."""

    key: str
    messages: tuple[tuple[str, str], ...]
    task: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int = 1


def read_traffic(lines: Iterable[str], task_types: Sequence[str] = ()) -> list[Asked]:
    """The requests; a task that is none of ``task_types`` is left to the router. Raises ValueError naming the line."""
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_asked(json.loads(line), number, task_types))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"line {number}: {error}") from error
    return found


def spread(requests: Sequence[Asked], limit: int) -> list[Asked]:
    """At most ``limit`` of them, evenly over the file, so that every kind that it holds in turn is there."""
    if limit <= 0 or len(requests) <= limit:
        return list(requests)
    return [requests[index * len(requests) // limit] for index in range(limit)]


def _asked(row: dict[str, Any], number: int, task_types: Sequence[str]) -> Asked:
    if not isinstance(row, dict):
        raise TypeError("expected an object")
    task = str(row.get("task_type") or row.get("task") or row.get("category") or "")
    text = str(row.get("text") or row.get("prompt") or "")
    messages: tuple[tuple[str, str], ...] = ()
    if "messages" in row:
        messages = tuple((str(one["role"]), str(one["content"])) for one in row["messages"])
    elif row.get("turns"):
        messages = (("user", str(row["turns"][0])),)
    elif text:
        messages = (("user", text),)
    if not messages:
        raise ValueError('no prompt: expected "text", "messages" or "turns"')
    return Asked(
        key=str(row.get("id") or row.get("question_id") or number),
        messages=messages,
        task=task if task in task_types else "",
        max_tokens=_number(row, "max_tokens", int),
        temperature=_number(row, "temperature", float),
        seed=_number(row, "seed", int) if row.get("seed") is not None else number,
    )


def _number(row: dict[str, Any], name: str, kind: type[Any]) -> Any:
    return None if row.get(name) is None else kind(row[name])
