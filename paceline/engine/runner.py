"""What computes the next logits: the Runner protocol and the function that picks one."""

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.config import ModelConfig
from paceline.engine.kv import SlotKV
from paceline.engine.packing import Segment
from paceline.errors import ConfigError
from paceline.types import ModelInfo


class Runner(Protocol):
    """A loaded model with its KV slots. One thread calls it."""

    @property
    def info(self) -> ModelInfo:
        """Identity and the reasons for how it runs."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ...

    @property
    def kv(self) -> SlotKV:
        """The slots; callers acquire, truncate and release, ``forward`` extends."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the logits lie."""
        ...

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Logits [sum of num_logits, V] float32 in segment order, then position order.

        Writes the new keys and values and moves each slot's length on to ``segment.end``. Raises EngineError, with
        nothing changed, for segments that do not continue their slots; after any other error the lengths are those
        from before.
        """
        ...


def load_runner(model: ModelConfig, *, kv_slots: int, max_context: int, layers: int = 0) -> Runner:
    """Load ``model`` with ``kv_slots`` slots of up to ``max_context`` tokens, cut to the model's own limit.

    ``layers`` > 0 keeps only the first so many. Raises ConfigError for a model or a size that cannot be served.
    """
    from paceline.engine.lean import load_lean
    from paceline.engine.lean_weights import Unsuitable
    from paceline.engine.reference import ReferenceRunner
    from paceline.engine.weights import load_model, open_model

    if model.threads:
        torch.set_num_threads(model.threads)
    source = open_model(model, layers=layers)
    reason = "reference as set"
    if model.runner != "reference":
        try:
            return load_lean(source, kv_slots=kv_slots, max_context=max_context)
        except Unsuitable as error:
            if model.runner == "lean":
                raise ConfigError(f"model.runner = 'lean': {model.name}: {error}") from error
            reason = f"not lean: {error}"
    if model.dtype == "w4a8":
        raise ConfigError(f"model.dtype = 'w4a8': {model.name}: only the lean runner has it; {reason}")
    return ReferenceRunner(load_model(source), kv_slots=kv_slots, max_context=max_context, reason=reason)
