"""The reference runner: any causal model of transformers, unmodified, over a packed batch and KV slots.

It stays the yardstick for faster runners. When it starts it proves three things on the real weights, and refuses or
says so rather than drift: that every layer attends through the slots, that the packed forward computes what the
model's own forward computes, and whether a row's bits are independent of the batch around it.
"""

import inspect
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch

from paceline.engine.attention import IMPLEMENTATION, STEP_KEYWORD, Masks, PackedStep, ShapeProbe, Step
from paceline.engine.kv import KVShape, SlotKV
from paceline.engine.linear import can_pack, pack_linears
from paceline.engine.packing import Segment, pack
from paceline.engine.selfcheck import check_equal, probe_ids, rows_are_independent
from paceline.engine.weights import LoadedModel
from paceline.errors import ConfigError
from paceline.types import ModelInfo

_log = logging.getLogger(__name__)


class ReferenceRunner:
    """See the module's text; the protocol is ``paceline.engine.Runner``."""

    def __init__(self, loaded: LoadedModel, *, kv_slots: int, max_context: int, reason: str = "") -> None:
        """Takes over ``loaded``: on a CPU its linear layers are packed and the originals freed.

        ``reason``: why this runner and not another one.
        """
        source = loaded.source
        self._model = loaded.model
        self._body = loaded.model.base_model
        self._takes_logit_rows = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
        self._threads = torch.get_num_threads()
        self._thread_id = threading.get_ident()
        self.device = source.device
        self.eos_token_ids = source.eos_token_ids
        capacity = source.capacity(max_context)
        self._probe_ids = probe_ids(source.config.vocab_size, capacity)
        packed = can_pack(self.device, source.dtype) and pack_linears(loaded.model) > 0
        self.kv = SlotKV(
            self._probe_shape(source.config, capacity),
            num_slots=kv_slots,
            capacity=capacity,
            dtype=source.dtype,
            device=self.device,
        )
        self._masks = Masks(capacity, source.dtype, self.device)
        self._vocab_size = self._check_against_own_forward()
        deterministic = rows_are_independent(self._run, self.kv, self._probe_ids)
        reasons = [
            *([reason] if reason else []),
            "packed attention over any causal model of transformers",
            source.dtype_reason,
            "linear layers packed once for oneDNN" if packed else "linear layers as they are",
            "bits of a row independent of the batch, checked at start"
            if deterministic
            else "bits of a row depend on the batch here, as the check at start has shown",
        ]
        self.info = ModelInfo(
            name=source.name,
            fingerprint=loaded.fingerprint,
            tokenizer_fingerprint=source.tokenizer_fingerprint,
            vocab_size=self._vocab_size,
            max_context=capacity,
            dtype=str(source.dtype).removeprefix("torch."),
            device=str(self.device),
            runner="reference",
            runner_reason="; ".join(reasons),
            numerics="deterministic" if deterministic else "best-effort",
        )

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """See ``Runner.forward``."""
        self._use_threads()
        # A tensor made in inference mode must not be written to outside; the copy is an ordinary one.
        return self._run(segments).clone().float()

    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        batch = pack(segments, self.kv, self.device)
        with torch.inference_mode():
            step = PackedStep(batch, self.kv, self._masks)
            if batch.num_logits == 0:
                self._call(self._body, batch.token_ids, batch.position_ids, step)
                logits = torch.empty(0, self._vocab_size, device=self.device)
            else:
                logits = self._logits(batch.token_ids, batch.position_ids, step, batch.logit_rows)
        for segment in segments:
            self.kv.extend(segment.slot, len(segment.token_ids))
        return logits[: batch.num_logits]

    def _logits(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, step: Step, rows: torch.Tensor
    ) -> torch.Tensor:
        if self._takes_logit_rows:
            output = self._call(self._model, token_ids, position_ids, step, logits_to_keep=rows)
            return output.logits[0]  # type: ignore[no-any-return]
        return self._call(self._model, token_ids, position_ids, step).logits[0, rows]  # type: ignore[no-any-return]

    @staticmethod
    def _call(
        module: Any, token_ids: torch.Tensor, position_ids: torch.Tensor, step: Step, **extras: Any
    ) -> Any:
        return module(
            input_ids=token_ids, position_ids=position_ids, use_cache=False, **{STEP_KEYWORD: step}, **extras
        )

    def _use_threads(self) -> None:
        """The number of threads belongs to the calling thread, and the bits may depend on it."""
        if threading.get_ident() != self._thread_id:
            torch.set_num_threads(self._threads)
            self._thread_id = threading.get_ident()

    # What is checked once, at start.

    def _probe_shape(self, config: Any, capacity: int) -> KVShape:
        """The KV shape as the model's own attention calls show it."""
        probe = ShapeProbe()
        ids = self._probe_ids[:2]
        kind = type(self._model).__name__
        with torch.inference_mode():
            try:
                self._call(self._body, self._tensor(ids), self._tensor(range(len(ids))), probe)
            except ConfigError as error:
                raise ConfigError(f"{kind}: {error}") from error
        layers = config.num_hidden_layers
        if sorted(probe.kv_shapes) != list(range(layers)) or probe.num_calls != layers:
            raise ConfigError(
                f"{kind}: {probe.num_calls} attention calls for {layers} layers; expected one of its own for each"
            )
        if len(set(probe.kv_shapes.values())) != 1:
            raise ConfigError(f"{kind}: the layers have different KV shapes; expected one for all")
        window = getattr(config, "sliding_window", None)
        if window and window < capacity and not probe.windows - {0}:
            raise ConfigError(
                f"{kind}: the model has a sliding window of {window} that its attention does not mention; "
                f"set max_context to {window} or less"
            )
        kv_heads, key_size, value_size = next(iter(probe.kv_shapes.values()))
        return KVShape(layers=layers, kv_heads=kv_heads, key_size=key_size, value_size=value_size)

    def _check_against_own_forward(self) -> int:
        """The vocabulary size, after comparing the packed forward with the model's own eager one."""
        ids = self._probe_ids[:24]
        slot = self.kv.acquire()
        assert slot is not None, "nobody else has a slot yet"
        batch = pack([Segment(slot, 0, ids, len(ids))], self.kv, self.device)
        with torch.inference_mode():
            step = PackedStep(batch, self.kv, self._masks)
            packed = self._logits(batch.token_ids, batch.position_ids, step, batch.logit_rows)
            self._model.set_attn_implementation("eager")
            try:
                own = self._model(input_ids=self._tensor(ids), use_cache=False).logits[0]
            finally:
                self._model.set_attn_implementation(IMPLEMENTATION)
        self.kv.release(slot)
        check_equal(
            packed[: len(ids)],
            own,
            what=type(self._model).__name__,
            precision=str(own.dtype).removeprefix("torch."),
        )
        return int(own.shape[-1])

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], dtype=torch.int64, device=self.device)
