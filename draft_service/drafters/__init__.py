"""Drafters: each one a file here and one entry in ``CONSTRUCTORS``, behind the Protocol of ``base``.

``build_drafters`` makes those that the settings name. Only kinds that need torch import it.
"""

from collections.abc import Callable

from draft_service.drafters.base import Drafter, DraftRequest
from draft_service.drafters.ngram import NgramDrafter
from draft_service.drafters.random import RandomDrafter
from paceline.config import DraftConfig, DrafterConfig, ModelConfig
from paceline.errors import ConfigError
from paceline.tokenizer import Tokenizer

__all__ = ["CONSTRUCTORS", "DraftRequest", "Drafter", "build_drafters"]


def _ngram(name: str, config: DrafterConfig, draft: DraftConfig, tokenizer: Tokenizer) -> Drafter:
    if config.min_match > config.max_match:
        msg = f"draft.drafters.{name}: min_match {config.min_match} is above max_match {config.max_match}"
        raise ConfigError(msg)
    return NgramDrafter(name, min_match=config.min_match, max_match=config.max_match)


def _random(name: str, config: DrafterConfig, draft: DraftConfig, tokenizer: Tokenizer) -> Drafter:
    return RandomDrafter(name, seed=config.seed)


def _model(name: str, config: DrafterConfig, draft: DraftConfig, tokenizer: Tokenizer) -> Drafter:
    from draft_service.drafters.model import (
        load_model_drafter,
    )  # torch: only where a model drafter is configured

    return load_model_drafter(
        name,
        config.model or ModelConfig(),
        layers=config.layers,
        kv_slots=draft.kv_slots,
        max_context=draft.max_context,
        tokenizer=tokenizer,
    )


CONSTRUCTORS: dict[str, Callable[[str, DrafterConfig, DraftConfig, Tokenizer], Drafter]] = {
    "ngram": _ngram,
    "random": _random,
    "model": _model,
}


def build_drafters(draft: DraftConfig, tokenizer: Tokenizer) -> dict[str, Drafter]:
    """Every configured drafter by name; ``tokenizer`` is the target's. Blocks while models load.

    Raises ConfigError for settings that cannot work: a model with another tokenizer, a model that is not there.
    """
    if not draft.drafters:
        raise ConfigError("draft.drafters is empty: name at least one drafter, for example ngram")
    return {
        name: CONSTRUCTORS[config.kind](name, config, draft, tokenizer)
        for name, config in draft.drafters.items()
    }
