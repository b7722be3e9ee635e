"""The small model distilled for one target: what ``training`` makes and ``models`` holds.

It drafts as any model does; only its directory is special (see ``paceline.engine.distilled``).
"""

from draft_service.drafters.model import ModelDrafter
from paceline.config import DEFAULT_TOP_M, ModelConfig
from paceline.engine.distilled import load_distilled, told_prompt_tokens
from paceline.errors import ConfigError
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer


def load_distilled_drafter(
    name: str,
    model: ModelConfig,
    *,
    kv_slots: int,
    max_context: int,
    tokenizer: Tokenizer,
    top_m: int = DEFAULT_TOP_M,
    prompt_tokens: int | None = None,
) -> ModelDrafter:
    """The drafter of one settings entry. Blocks while it loads.

    ``tokenizer`` is the target's. ``prompt_tokens`` None: as its own directory says. Raises ConfigError where the drafter
    was made for a target with another tokenizer.
    """
    runner = load_distilled(model, kv_slots=kv_slots, max_context=max_context)
    if runner.info.tokenizer_fingerprint != tokenizer.fingerprint:
        raise ConfigError(
            f"draft.drafters.{name}: {model.name!r} was made for a target with tokenizer "
            f"{runner.info.tokenizer_fingerprint[:16]}, the target served has {tokenizer.fingerprint[:16]}"
        )
    if prompt_tokens is None:
        prompt_tokens = told_prompt_tokens(resolve_model_dir(model.name))
    return ModelDrafter(
        name, runner, version=runner.info.fingerprint[:16], top_m=top_m, prompt_tokens=prompt_tokens
    )
