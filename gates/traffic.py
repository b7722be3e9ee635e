"""Requests to check a pair with, one JSON object a line.

Understood: ``text`` (or ``prompt``), ``messages`` ([{"role", "content"}]), ``turns`` (the first one is asked) or ``raw`` (text without a chat
template, to be completed); ``task_type`` (or ``task``, ``category``), ``max_tokens``, ``stop``, ``seed``, the numbers of sampling (``temperature``, ``top_p``, ...),
``id`` (or ``question_id``). ``category`` and ``reference`` are a benchmark's: a file such as Spec-Bench can be taken as it is. What is not
understood is refused, since a slip would change what is measured.
"""

import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.ranges import SAMPLING_NUMBERS
from router.validate import MAX_STOP_CHARACTERS, MAX_STOPS

_PROMPTS = ("text", "prompt", "messages", "turns", "raw")
_NAMES = ("task_type", "task", "category")
_KNOWN = (
    *_PROMPTS, *_NAMES, "max_tokens", "stop", *SAMPLING_NUMBERS, "top_k", "seed", "id", "question_id", "reference",
)  # fmt: skip
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``task`` empty: the router tells. ``raw``: text to be completed; there are no messages then."""

    key: str
    messages: tuple[tuple[str, str], ...] = ()
    task: str = ""
    max_tokens: int | None = None
    seed: int = 1
    raw: str = ""
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """What is said of it, by the names of SamplingParams."""

    @property
    def temperature(self) -> float:
        """0 where nothing is said: a check is greedy."""
        return float(self.sampling.get("temperature", 0.0))

    def said(self) -> dict[str, Any]:
        """The prompt and how it is sampled, as ``paceline.client.generate_request`` takes them."""
        prompt = {"text": self.raw} if self.raw else {"messages": self.messages}
        return prompt | dict(self.sampling) | {"temperature": self.temperature, "stop": self.stop}


def read_traffic(lines: Iterable[str], task_types: Sequence[str] | None = ()) -> list[Asked]:
    """The requests; a ``category`` that is none of ``task_types`` is left to the router. Raises ValueError naming line and field.

    None: types are not known yet, and any task is let pass.
    """
    found: list[Asked] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            asked = _asked(json.loads(line), number, task_types)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from error
        if asked.key in line_of:
            raise ValueError(f"line {number}: id: {asked.key} is that of line {line_of[asked.key]} already")
        line_of[asked.key] = number
        found.append(asked)
    return found


def spread(requests: Sequence[Asked], limit: int) -> list[Asked]:
    """At most ``limit`` of them, evenly over the file, so that every kind that it holds in turn is there."""
    if limit <= 0 or len(requests) <= limit:
        return list(requests)
    return [requests[index * len(requests) // limit] for index in range(limit)]


def _asked(row: Any, number: int, task_types: Sequence[str] | None) -> Asked:
    if not isinstance(row, dict):
        raise TypeError("expected an object")
    for name in row:
        if name not in _KNOWN:
            raise ValueError(f"{name}: unknown field{_nearest(name, _KNOWN)}; known are {', '.join(_KNOWN)}")
    return Asked(
        key=str(row.get("id") or row.get("question_id") or number),
        task=_task(row, task_types),
        max_tokens=_whole(row, "max_tokens", at_least=1),
        seed=number if (seed := _whole(row, "seed", at_least=0, bits=64)) is None else seed,
        stop=_stop(row),
        sampling=_sampling(row),
        **_prompt(row),
    )


def _prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    given = [name for name in _PROMPTS if row.get(name)]
    if not given:
        raise ValueError('no prompt: expected "text" (or "prompt"), "messages", "turns" or "raw"')
    if len(given) > 1:
        raise ValueError(f"{given[1]}: there is {given[0]} already; give one of them")
    name, value = given[0], row[given[0]]
    if name == "messages":
        return {"messages": tuple(_message(one, index) for index, one in enumerate(_list(name, value)))}
    text = _list(name, value)[0] if name == "turns" else value
    if not isinstance(text, str):
        raise TypeError(f"{name}: {text!r}; expected text")
    _sendable(name, text)
    return {"raw": text} if name == "raw" else {"messages": (("user", text),)}


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name}: {value!r}; expected a list")
    return value


def _message(one: Any, index: int) -> tuple[str, str]:
    path = f"messages[{index}]"
    if not isinstance(one, dict) or set(one) != {"role", "content"}:
        raise ValueError(f'{path}: expected {{"role": ..., "content": ...}}')
    role, content = one["role"], one["content"]
    if role not in _ROLES:
        raise ValueError(
            f"{path}.role: {role!r}; expected one of {', '.join(_ROLES)}{_nearest(role, _ROLES)}"
        )
    if not isinstance(content, str):
        raise TypeError(f"{path}.content: {content!r}; expected text")
    return role, _sendable(f"{path}.content", content)


def _task(row: Mapping[str, Any], task_types: Sequence[str] | None) -> str:
    name = next((name for name in _NAMES if row.get(name)), "")
    task = row[name] if name else ""
    if task_types is None:
        return ""
    if not task or task in task_types or name == "category":
        return str(task) if task in task_types else ""
    raise ValueError(
        f"{name}: {task!r}; expected one of {', '.join(task_types)}{_nearest(task, task_types)}, or leave it out: the router tells"
    )


def _whole(row: Mapping[str, Any], name: str, *, at_least: int, bits: int = 32) -> int | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 2**bits:
        raise ValueError(f"{name}: {value!r}; expected a whole number from {at_least} on, below 2 ** {bits}")
    return value


def _stop(row: Mapping[str, Any]) -> tuple[str, ...]:
    value = row.get("stop")
    texts = [value] if isinstance(value, str) else _list("stop", value or [])
    if len(texts) > MAX_STOPS:
        raise ValueError(f"stop: {len(texts)} texts; expected at most {MAX_STOPS}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop: {text!r}; expected text, or a list of texts")
        if len(text) > MAX_STOP_CHARACTERS:
            raise ValueError(f"stop: {len(text)} characters; expected at most {MAX_STOP_CHARACTERS}")
        _sendable("stop", text)
    return tuple(texts)


def _sendable(name: str, text: str) -> str:
    """JSON can say halves of characters, which no request can hold. Found here, not half an hour into a check."""
    if not text:
        raise ValueError(f"{name}: empty; expected text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: half of a character ({error.object[error.start]!a}); expected text"
        ) from error
    return text


def _sampling(row: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: row[name] for name in SAMPLING_NUMBERS if row.get(name) is not None}
    for name, value in given.items():
        fits, right = SAMPLING_NUMBERS[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not (abs(value) <= sys.float_info.max and fits(value)):
            raise ValueError(f"{name}: {value!r}; expected a number {right}")
    if (top_k := _whole(row, "top_k", at_least=0)) is not None:
        given["top_k"] = top_k
    return given


def _nearest(name: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
