"""Reading the ledger's documents: JSON that others may have written, so every field is looked at before it is believed."""

import json
import math
from enum import Enum
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


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
    if type(given) is kind and kind is not float:
        return given
    raise ValueError(f"{name}: {given!r} is no {kind.__name__}")
