"""Drafters: each one a file behind the Protocol of ``base``; those of this house have an entry in ``CONSTRUCTORS``.

Others come by import path (``plug_in``, docs/drafters.md), cascades are made of those that are there already.

``build_drafters`` makes those that the settings name. Only kinds that need torch import it.
"""

import time
from collections.abc import Callable

from draft_service.drafters.base import (
    AheadDrafter,
    Drafter,
    DraftRequest,
    Outcome,
    Pass,
    Sampled,
    TwoSpeed,
    prompt_tokens,
)
from draft_service.drafters.cascade import Cascade
from draft_service.drafters.lookup import LookupDrafter
from draft_service.drafters.plug_in import Constructor, load_plug_in
from draft_service.drafters.random import RandomDrafter
from paceline.config import DrafterConfig, PacelineConfig
from paceline.errors import ConfigError
from paceline.lookup import build_lookup
from paceline.simulation import MODEL_NAME
from paceline.tokenizer import Tokenizer

DISTILLED_MODEL = "smollm2-drafter"
"""What a distilled drafter loads unless its entry says so: the one that comes with the project."""

__all__ = [
    "CONSTRUCTORS",
    "AheadDrafter",
    "DraftRequest",
    "Drafter",
    "Outcome",
    "Pass",
    "Sampled",
    "TwoSpeed",
    "build_drafters",
    "prompt_tokens",
]


def _lookup(name: str, entry: DrafterConfig, config: PacelineConfig, tokenizer: Tokenizer) -> Drafter:
    return LookupDrafter(build_lookup(name, entry, tokenizer.fingerprint, tokenizer.vocab_size))


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
        top_m=config.draft.top_m,
        prompt_tokens=entry.prompt_tokens or 0,
    )


def _simulated(name: str, entry: DrafterConfig, config: PacelineConfig, tokenizer: Tokenizer) -> Drafter:
    from draft_service.drafters.simulated import SimulatedDrafter

    if config.model.name != MODEL_NAME:
        raise ConfigError(
            f"draft.drafters.{name}: a simulated drafter needs model.name = {MODEL_NAME!r}, not {config.model.name!r}"
        )
    return SimulatedDrafter(name, config.simulation, tokenizer)


def _distilled(name: str, entry: DrafterConfig, config: PacelineConfig, tokenizer: Tokenizer) -> Drafter:
    from draft_service.drafters.distilled import load_distilled_drafter  # torch, as above

    return load_distilled_drafter(
        name,
        # Half a millisecond a guess: a second thread would be taken from the target for nothing.
        entry.model or config.model.model_copy(update={"name": DISTILLED_MODEL, "threads": 1}),
        kv_slots=config.draft.kv_slots,
        max_context=config.draft.max_context,
        tokenizer=tokenizer,
        top_m=config.draft.top_m,
        prompt_tokens=entry.prompt_tokens,
    )


CONSTRUCTORS: dict[str, Constructor] = {
    "ngram": _lookup,
    "suffix": _lookup,
    "backoff": _lookup,
    "random": _random,
    "model": _model,
    "simulated": _simulated,
    "distilled": _distilled,
}


def build_drafters(
    config: PacelineConfig, tokenizer: Tokenizer, *, clock: Callable[[], float] = time.monotonic
) -> dict[str, Drafter]:
    """Every configured drafter by name; ``tokenizer`` is the target's. Blocks while models load.

    Raises ConfigError for settings that cannot work: a model with another tokenizer, a model that is not there, a
    plug-in that is none.
    """
    if not config.draft.drafters:
        raise ConfigError("draft.drafters is empty: name at least one drafter, for example ngram")
    config.draft.check_members()
    entries = config.draft.drafters
    drafters = {
        name: CONSTRUCTORS.get(entry.kind, load_plug_in)(name, entry, config, tokenizer)
        for name, entry in entries.items()
        if entry.kind != "cascade"
    }
    cascades = {
        name: Cascade(
            name,
            # The very same that serve under their own names.
            [drafters[member] for member in dict.fromkeys(entry.members)],
            beside=config.draft.beside().get(name, ()),
            clock=clock,
        )
        for name, entry in entries.items()
        if entry.kind == "cascade"
    }
    return {name: (drafters | cascades)[name] for name in entries}
