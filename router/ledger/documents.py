"""Reading the ledger's documents: JSON that others may have written, so every field is looked at before it is believed."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")
LAST_AT = 1e11
"""Some three thousand years on: what the file can hold."""


def entries(document: str) -> list[Any]:
    """Those of a document that is a list; an empty one has none. Raises ValueError."""
    read = json.loads(document or "[]")
    if not isinstance(read, list):
        raise ValueError(f"expected a list, not {type(read).__name__}")  # noqa: TRY004  # of what is read: all of one kind
    return read


def value_of(kind: type[T], entry: object) -> T:
    """A dataclass of texts, numbers and enums from its JSON. Raises ValueError that names the field."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, not {type(entry).__name__}")  # noqa: TRY004
    kinds = get_type_hints(kind)
    if unknown := sorted(entry.keys() - kinds.keys()):
        raise ValueError(f"{unknown[0]}: there is no such field")
    try:
        return kind(**{name: _checked(name, kinds[name], given) for name, given in entry.items()})
    except TypeError as error:  # one without a default is missing
        raise ValueError(str(error)) from error


def check_fields(entry: Mapping[str, Any], **kinds: type) -> None:
    """Raises ValueError or KeyError where one of ``entry``'s fields is not of its kind, or missing."""
    for name, kind in kinds.items():
        _checked(name, kind, entry[name])


def counts_from(pairs: Iterable[Sequence[int]]) -> dict[int, int]:
    """Requests by bin. Raises ValueError for what are no counts."""
    counts = {}
    for number, requests in pairs:
        check_fields({"bin": number, "requests": requests}, bin=int, requests=int)
        if requests < 0:
            raise ValueError(f"requests: {requests}")
        counts[number] = requests
    return counts


def _checked(name: str, kind: type, given: object) -> object:
    if issubclass(kind, Enum):
        return kind(given)
    if (
        kind is float
        and isinstance(given, int | float)
        and not isinstance(given, bool)
        and math.isfinite(given)
    ):
        return float(given)
    if type(given) is int and not -(2**63) <= given < 2**63:
        raise ValueError(f"{name}: more than can be counted")
    if type(given) is kind and kind is not float:
        if isinstance(given, str):
            given.encode()  # JSON can say what no text is, and neither disk nor wire can hold: ValueError
        return given
    raise ValueError(f"{name}: {given!r} is no {kind.__name__}")
