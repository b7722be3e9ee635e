"""The lean runner: Llama-shaped decoders without a module tree, in as few and as fast operations as the device has.

Two bodies compute the same thing. On a CPU in float32 with a compiler at hand the whole forward is one call into our
own kernels, whose rows depend on nothing but themselves by construction; everywhere else it is written in torch
operations. A runner has one body for all its life, so plain and speculative steps never differ in arithmetic. When it
starts it proves on the real weights that it computes what transformers computes, and whether rows are independent.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import torch
import transformers

from paceline.compiled import NotCompiledError
from paceline.engine.kernels.build import load_library
from paceline.engine.kernels.native import NativeBody
from paceline.engine.kv import SlotKV
from paceline.engine.lean_torch import TorchBody
from paceline.engine.lean_weights import Checkpoint, Shape, Unsuitable, shape_of
from paceline.engine.packing import Segment
from paceline.engine.rope import rope_table
from paceline.engine.selfcheck import check_equal, probe_ids, rows_are_independent
from paceline.engine.weights import ModelSource
from paceline.errors import ConfigError
from paceline.types import ModelInfo

_CHECKED_LAYERS = 2
"""Layers compared with transformers at start: all are built alike, and two show that they are put together rightly."""


class Body(Protocol):
    """Weights and forward of one model."""

    kernels: str
    """What computes: part of the identity under which bits are equal."""
    precision: str
    """As ``model.dtype`` names it."""
    kv_dtype: torch.dtype
    """Of keys and values as they are kept."""

    def forward(self, segments: Sequence[Segment], kv: SlotKV, layers: int) -> torch.Tensor:
        """Logits [sum of num_logits, V] after the first ``layers`` layers; writes the KV rows, moves no length."""
        ...


def load_lean(
    source: ModelSource, *, kv_slots: int, max_context: int, checkpoint: Checkpoint | None = None
) -> "LeanRunner":
    """The lean runner for ``source``. Raises Unsuitable, with the reason, where the reference runner has to do.

    ``checkpoint`` stands in for the files of the source's directory.
    """
    capacity = source.capacity(max_context)
    shape = shape_of(source, capacity)
    checkpoint = checkpoint or Checkpoint(source.directory)
    ids = probe_ids(source.config.vocab_size, capacity)[:24]
    with ThreadPoolExecutor(max_workers=1) as pool:
        fingerprint = pool.submit(
            source.fingerprint
        )  # hashing frees the interpreter lock: it runs beside packing
        body, remark = _body(source, shape, checkpoint, capacity)
        if body.precision == "w4a8" and source.w4a8 == "if possible":
            reason = "w4a8: measured for this model, and this CPU has the instructions"
            source = replace(source, dtype=torch.float32, dtype_reason=reason)
        own = own_logits(source, checkpoint, ids, layers=_CHECKED_LAYERS)
        runner = LeanRunner(
            source,
            body,
            shape.kv,
            kv_slots=kv_slots,
            capacity=capacity,
            fingerprint=fingerprint.result(),
            reasons=[
                f"own forward for the {shape.family} family",
                source.dtype_reason,
                body.kernels,
                *remark,
            ],
        )
    runner.check(ids, own)
    return runner


class LeanRunner:
    """See the module's text; the protocol is ``paceline.engine.Runner``."""

    def __init__(
        self,
        source: ModelSource,
        body: Body,
        kv_shape: Any,
        *,
        kv_slots: int,
        capacity: int,
        fingerprint: str,
        reasons: list[str],
    ) -> None:
        self._body = body
        self._layers = kv_shape.layers
        self._threads = torch.get_num_threads()
        self._thread_id = threading.get_ident()
        self.device = source.device
        self.eos_token_ids = source.eos_token_ids
        self.kv = SlotKV(
            kv_shape, num_slots=kv_slots, capacity=capacity, dtype=body.kv_dtype, device=source.device
        )
        ids = probe_ids(source.config.vocab_size, capacity)
        deterministic = rows_are_independent(self._run, self.kv, ids)
        said = (
            "bits of a row independent of the batch, checked at start"
            if deterministic
            else "bits of a row depend on the batch here, as the check at start has shown"
        )
        self.info = ModelInfo(
            name=source.name,
            fingerprint=fingerprint,
            tokenizer_fingerprint=source.tokenizer_fingerprint,
            vocab_size=source.config.vocab_size,
            max_context=capacity,
            dtype=body.precision,
            device=str(source.device),
            runner="lean",
            runner_reason="; ".join([*reasons, said]),
            numerics="deterministic" if deterministic else "best-effort",
        )

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """See ``Runner.forward``."""
        if threading.get_ident() != self._thread_id:  # their number belongs to the calling thread
            torch.set_num_threads(self._threads)
            self._thread_id = threading.get_ident()
        return self._run(segments)

    def check(self, ids: Sequence[int], own: torch.Tensor) -> None:
        """Compare with transformers' ``own`` logits of ``ids`` after two layers; raises Unsuitable."""
        slot = self.kv.acquire()
        assert slot is not None, "nobody else has a slot yet"
        with torch.inference_mode():
            layers = min(_CHECKED_LAYERS, self._layers)
            found = self._body.forward([Segment(slot, 0, ids, len(ids))], self.kv, layers)
        self.kv.release(slot)
        known = found[0] != -torch.inf  # a head over few tokens says nothing about the others
        try:
            check_equal(found[:, known], own[:, known], what="lean", precision=self.info.dtype)
        except ConfigError as error:
            raise Unsuitable(str(error)) from error

    def _run(self, segments: Sequence[Segment]) -> torch.Tensor:
        with torch.no_grad():
            logits = self._body.forward(segments, self.kv, self._layers)
        for segment in segments:
            self.kv.extend(segment.slot, len(segment.token_ids))
        return logits.float()


def own_logits(
    source: ModelSource, checkpoint: Checkpoint, ids: Sequence[int], *, layers: int
) -> torch.Tensor:
    """Logits [len(ids), V] of transformers' own model cut to ``layers`` layers, on the CPU, from the mapped weights.

    Raises Unsuitable when the checkpoint lacks what transformers expects.
    """
    config = type(source.config).from_dict(source.config.to_dict())
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    factory: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config, attn_implementation="eager", dtype=source.dtype)
    names = [name for name in model.state_dict() if name in checkpoint]
    state = {name: checkpoint.get(name, *model.state_dict()[name].shape).to(source.dtype) for name in names}
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    lacking = [name for name, weight in model.named_parameters() if weight.is_meta]
    if lacking:
        raise Unsuitable(f"{len(lacking)} weights are missing, first {lacking[0]}")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(
            input_ids=torch.tensor([list(ids)], device="cpu"), use_cache=False
        ).logits[0]
    return logits


class _Widened:
    """A body whose head knows few tokens; the logits of all others are -inf."""

    def __init__(self, body: Body, head_ids: torch.Tensor, vocab_size: int, device: torch.device) -> None:
        self.kernels = f"{body.kernels}, head over {len(head_ids)} tokens"
        self.precision = body.precision
        self.kv_dtype = body.kv_dtype
        self._body = body
        self._head_ids = head_ids.to(device)
        self._vocab_size = vocab_size

    def forward(self, segments: Sequence[Segment], kv: SlotKV, layers: int) -> torch.Tensor:
        """See ``Body.forward``."""
        few = self._body.forward(segments, kv, layers)
        return few.new_full((len(few), self._vocab_size), -torch.inf).index_copy_(1, self._head_ids, few)


def _body(source: ModelSource, shape: Shape, checkpoint: Checkpoint, capacity: int) -> tuple[Body, list[str]]:
    """The fastest body there is for this device and precision, and a remark where a faster one was missed."""
    vocab_size = source.config.vocab_size
    if checkpoint.head_ids is None:
        return _plain_body(source, shape, checkpoint, capacity, vocab_size)
    body, remark = _plain_body(source, shape, checkpoint, capacity, len(checkpoint.head_ids))
    return _Widened(body, checkpoint.head_ids, vocab_size, source.device), remark


def _plain_body(
    source: ModelSource, shape: Shape, checkpoint: Checkpoint, capacity: int, vocab_size: int
) -> tuple[Body, list[str]]:
    rope = rope_table(source.config, shape.head_size, capacity)
    remark = []
    if source.w4a8 != "no":
        try:
            return NativeBody(load_library(), checkpoint, shape, vocab_size, rope, integers=True), []
        except (NotCompiledError, Unsuitable) as error:
            if source.w4a8 == "as set":
                raise ConfigError(f"model.dtype = 'w4a8': {source.name}: {error}") from error
            remark = [f"not w4a8: {error}"]
    if source.device.type == "cpu" and source.dtype == torch.float32:
        try:
            return NativeBody(load_library(), checkpoint, shape, vocab_size, rope), remark
        except (NotCompiledError, Unsuitable) as error:
            remark.append(str(error))
    body = TorchBody(checkpoint, shape, vocab_size, rope, dtype=source.dtype, device=source.device)
    return body, remark
