"""Rotary position embedding as a table over all positions of a slot."""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.engine.lean_weights import Unsuitable

_FIXED = {"linear", "yarn", "llama3"}
"""Scaled kinds whose frequencies do not depend on the length of the sequence."""


def rope_table(config: Any, head_size: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, both [capacity, head size / 2] float32, the attention scaling of the kind included.

    The frequencies come from transformers. Raises Unsuitable for kinds that depend on how long a sequence is: keys
    rotated in one way would have to be rotated anew when the sequence grows.
    """
    settings = config.rope_parameters
    kind = settings.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        frequencies, scaling = 1.0 / settings["rope_theta"] ** exponents, 1.0
    elif kind in _FIXED or (kind == "dynamic" and capacity <= config.max_position_embeddings):
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    else:
        raise Unsuitable(f"rotary embedding of kind {kind!r} depends on the length of the sequence")
    if len(frequencies) != head_size // 2:
        raise Unsuitable("the rotary embedding covers only a part of each head")
    angles = torch.arange(capacity, dtype=torch.float32)[:, None] * frequencies[None, :].float()
    return angles.cos() * scaling, angles.sin() * scaling
