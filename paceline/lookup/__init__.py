"""Look-up: guesses from what stood in the text before, or in earlier texts; no model.

Takes microseconds, so it runs where the target is (``verify_service.beside``); the draft tier offers it too
(``draft_service.drafters.lookup``).
"""

import hashlib
from collections.abc import Sequence

from paceline.config import DrafterConfig
from paceline.errors import ConfigError
from paceline.lookup.base import Lookup, Weighed
from paceline.lookup.ngram import NgramLookup
from paceline.lookup.suffix import SuffixLookup

__all__ = ["Lookup", "NgramLookup", "SuffixLookup", "Weighed", "build_lookup", "cascade_version"]


def build_lookup(name: str, entry: DrafterConfig) -> Lookup:
    """The look-up of an entry of ``draft.drafters`` of kind ngram or suffix. Raises ConfigError."""
    if entry.kind == "suffix":
        return SuffixLookup(
            name,
            pool_bytes=entry.pool_mb << 20,
            min_probability=entry.min_probability,
            shared=entry.share == "all",
        )
    if entry.min_match > entry.max_match:
        raise ConfigError(
            f"draft.drafters.{name}: min_match {entry.min_match} is above max_match {entry.max_match}"
        )
    return NgramLookup(name, min_match=entry.min_match, max_match=entry.max_match)


def cascade_version(members: Sequence[tuple[str, str]]) -> str:
    """Of a drafter made of others, by their names and versions."""
    digest = hashlib.sha256("\n".join(f"{name} {version}" for name, version in members).encode()).hexdigest()
    return f"cascade-1-{digest[:12]}"
