"""Look-up: guesses from what stood in the text before, or in earlier texts; no model.

Takes microseconds, so it runs where the target is (``verify_service.beside``); the draft tier offers it too
(``draft_service.drafters.lookup``).
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from paceline.config import DrafterConfig
from paceline.errors import ConfigError
from paceline.lookup.backoff import BackoffLookup, BackoffTable
from paceline.lookup.base import Lookup, Weighed
from paceline.lookup.ngram import NgramLookup
from paceline.lookup.suffix import SuffixLookup
from paceline.model_store import COMMITTED

BACKOFF_TABLE = COMMITTED / "smollm2-backoff"
"""What a back-off look-up reads unless its entry says so."""

__all__ = [
    "BackoffLookup",
    "Lookup",
    "NgramLookup",
    "SuffixLookup",
    "Weighed",
    "build_lookup",
    "cascade_version",
]


def build_lookup(name: str, entry: DrafterConfig, tokenizer_fingerprint: str) -> Lookup:
    """The look-up of an entry of ``draft.drafters``, for a target with that tokenizer. Raises ConfigError."""
    if entry.kind == "suffix":
        return SuffixLookup(
            name,
            pool_bytes=entry.pool_mb << 20,
            min_probability=entry.min_probability,
            shared=entry.share == "all",
        )
    if entry.kind == "backoff":
        table = BackoffTable(Path(entry.table) if entry.table else BACKOFF_TABLE)
        made_for = table.settings["tokenizer_fingerprint"]
        if made_for != tokenizer_fingerprint:
            raise ConfigError(
                f"draft.drafters.{name}: its table was made for a target with tokenizer {made_for[:16]}, "
                f"the target served has {tokenizer_fingerprint[:16]}"
            )
        version = f"backoff-{table.settings['version'][:12]}-{entry.min_probability:g}"
        return BackoffLookup(name, table, version=version, min_probability=entry.min_probability)
    if entry.min_match > entry.max_match:
        raise ConfigError(
            f"draft.drafters.{name}: min_match {entry.min_match} is above max_match {entry.max_match}"
        )
    return NgramLookup(name, min_match=entry.min_match, max_match=entry.max_match)


def cascade_version(members: Sequence[tuple[str, str]]) -> str:
    """Of a drafter made of others, by their names and versions."""
    digest = hashlib.sha256("\n".join(f"{name} {version}" for name, version in members).encode()).hexdigest()
    return f"cascade-1-{digest[:12]}"
