"""Drafters: each one a file here and one entry in ``CONSTRUCTORS``, behind the Protocol of ``base``.

``build_drafters`` makes those that the settings name. Only kinds that need torch import it.
"""

from collections.abc import Callable

from draft_service.drafters.base import Drafter, DraftRequest
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafters.random import RandomDrafter
from draft_service.drafters.suffix import SuffixDrafter
from paceline.config import DrafterConfig, PacelineConfig
from paceline.errors import ConfigError
from paceline.simulation import MODEL_NAME
from paceline.tokenizer import Tokenizer

__all__ = ["CONSTRUCTORS", "DraftRequest", "Drafter", "build_drafters"]


def _ngram(name: str, entry: DrafterConfig, config: PacelineConfig, tokenizer: Tokenizer) -> Drafter:
    if entry.min_match > entry.max_match:
        raise ConfigError(
            f"draft.drafters.{name}: min_match {entry.min_match} is above max_match {entry.max_match}"
        )
    return NgramDrafter(name, min_match=entry.min_match, max_match=entry.max_match)


def _random(name: str, entry: DrafterConfig, config: PacelineConfig, tokenizer: Tokenizer) -> Drafter:
    return RandomDrafter(name, seed=entry.seed)


def _model(name: str, entry: DrafterConfig, config: PacelineConfig, tokenizer: Tokenizer) -> Drafter:
    from draft_service.drafters.model import (
        load_model_drafter,
    )  # torch: only where a model drafter is configured

    return load_model_drafter(
        name,
        entry.model
        or config.model,  # without one of its own: the target's, which makes sense with fewer layers
        layers=entry.layers,
        kv_slots=config.draft.kv_slots,
        max_context=config.draft.max_context,
        tokenizer=tokenizer,
    )


def _simulated(name: str, entry: DrafterConfig, config: PacelineConfig, tokenizer: Tokenizer) -> Drafter:
    from draft_service.drafters.simulated import SimulatedDrafter

    if config.model.name != MODEL_NAME:
        raise ConfigError(
            f"draft.drafters.{name}: a simulated drafter needs model.name = {MODEL_NAME!r}, not {config.model.name!r}"
        )
    return SimulatedDrafter(name, config.simulation, tokenizer)


def _suffix(name: str, entry: DrafterConfig, config: PacelineConfig, tokenizer: Tokenizer) -> Drafter:
    return SuffixDrafter(
        name,
        pool_bytes=entry.pool_mb << 20,
        min_probability=entry.min_probability,
        shared=entry.share == "all",
    )


CONSTRUCTORS: dict[str, Callable[[str, DrafterConfig, PacelineConfig, Tokenizer], Drafter]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "random": _random,
    "model": _model,
    "simulated": _simulated,
}


def build_drafters(config: PacelineConfig, tokenizer: Tokenizer) -> dict[str, Drafter]:
    """Every configured drafter by name; ``tokenizer`` is the target's. Blocks while models load.

    Raises ConfigError for settings that cannot work: a model with another tokenizer, a model that is not there.
    """
    if not config.draft.drafters:
        raise ConfigError("draft.drafters is empty: name at least one drafter, for example ngram")
    return {
        name: CONSTRUCTORS[entry.kind](name, entry, config, tokenizer)
        for name, entry in config.draft.drafters.items()
    }
