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


def build_lookup(
    name: str, entry: DrafterConfig, tokenizer_fingerprint: str, vocab_size: int | None = None
) -> Lookup:
    """The look-up of an entry of ``draft.drafters``, for a target with that tokenizer. Raises ConfigError.

    ``vocab_size``: of the target, where it is known: what guesses must be below.
    """
    if entry.kind == "suffix":
        return SuffixLookup(
            name,
            pool_bytes=entry.pool_mb << 20,
            min_probability=entry.min_probability,
            shared=entry.share == "all",
        )
    if entry.kind == "backoff":
        table = _backoff_table(f"draft.drafters.{name}", entry, tokenizer_fingerprint, vocab_size)
        version = f"backoff-{table.settings['version'][:12]}-{entry.min_probability:g}"
        return BackoffLookup(name, table, version=version, min_probability=entry.min_probability)
    if entry.min_match > entry.max_match:
        raise ConfigError(
            f"draft.drafters.{name}: min_match {entry.min_match} is above max_match {entry.max_match}"
        )
    return NgramLookup(name, min_match=entry.min_match, max_match=entry.max_match)


def _backoff_table(
    setting: str, entry: DrafterConfig, tokenizer_fingerprint: str, vocab_size: int | None
) -> BackoffTable:
    directory = Path(entry.table) if entry.table else BACKOFF_TABLE
    try:
        table = BackoffTable(directory)
    except ConfigError as error:
        raise ConfigError(f"{setting}.table: {error}") from error
    made_for = table.settings["tokenizer_fingerprint"]
    if made_for != tokenizer_fingerprint:
        raise ConfigError(
            f"{setting}: its table was made for a target with tokenizer {made_for[:16]}, "
            f"the target served has {tokenizer_fingerprint[:16]}"
        )
    if vocab_size is not None and table.vocab_size > vocab_size:
        raise ConfigError(
            f"{setting}.table: {directory} guesses token {table.vocab_size - 1}, "
            f"the target's vocabulary has {vocab_size}"
        )
    return table


def cascade_version(members: Sequence[tuple[str, str]]) -> str:
    """Of a drafter made of others, by their names and versions."""
    digest = hashlib.sha256("\n".join(f"{name} {version}" for name, version in members).encode()).hexdigest()
    return f"cascade-1-{digest[:12]}"
