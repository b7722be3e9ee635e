"""Which models the lean runner takes, and their weights straight from the mapped safetensors files."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.engine.kv import KVShape
from paceline.engine.weights import ModelSource

_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""transformers' model type -> what people call it. All else is refused: a likeness in names is no proof."""

_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_IGNORED = "rotary_emb.inv_freq"  # old checkpoints carry it; it follows from the configuration


class Unsuitable(Exception):  # noqa: N818 (a finding, not a fault: the reference runner takes the model)
    """The lean runner does not take a model; the text says why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-shaped decoder."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    epsilon: float
    tied: bool

    @property
    def kv(self) -> KVShape:
        """What one position costs in KV memory."""
        return KVShape(
            layers=self.layers, kv_heads=self.kv_heads, key_size=self.head_size, value_size=self.head_size
        )


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x W^T + b; weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer, in the checkpoint's own precision; views of mapped memory where nothing had to be joined."""

    attention_norm: torch.Tensor
    query: Projection
    key: Projection
    value: Projection
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_out: Projection
    mlp_norm: torch.Tensor
    gate: Projection
    up: Projection
    down: Projection


def shape_of(source: ModelSource, capacity: int) -> Shape:
    """The sizes of ``source``. Raises Unsuitable for anything but a plain decoder of the known families."""
    config = source.config
    family = _FAMILIES.get(config.model_type)
    if family is None or config is not source.full_config:
        raise Unsuitable(f"model type {source.full_config.model_type!r} is none of {', '.join(_FAMILIES)}")
    if config.hidden_act != "silu":
        raise Unsuitable(f"its activation is {config.hidden_act!r}, not silu")
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (
        getattr(config, "layer_types", None) or (["sliding_attention"] if window else [])
    )
    if slides and window and window < capacity:
        raise Unsuitable(f"its attention slides over {window} tokens, fewer than the context of {capacity}")
    return Shape(
        family=family,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        epsilon=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
    )


class Checkpoint:
    """The safetensors files of a model directory, mapped: what is not read costs nothing, what is read is a view.

    A view keeps its file mapped. The files must not be changed in place while somebody has one.
    """

    head_ids: torch.Tensor | None = None
    """The token ids of the head's rows, ascending; None: it has a row for every token."""

    def __init__(self, directory: Path) -> None:
        """Raises Unsuitable when there are no such files or they are broken."""
        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in _weight_files(directory):
            try:
                file = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise Unsuitable(f"{path.name}: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)
        self._unread = set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def only(self, name: str) -> dict[str, Any]:
        """The file that has ``name``, by that name. Raises Unsuitable when there is none."""
        if name not in self._files:
            raise Unsuitable(f"weight {name} is missing")
        return {name: self._files[name]}

    def reopened(self) -> "Checkpoint":
        """The same files under a mapping of their own."""
        return Checkpoint(self._directory)

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor ``name``. Raises Unsuitable when it is missing or of another shape."""
        if name not in self._files:
            raise Unsuitable(f"weight {name} is missing")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise Unsuitable(f"weight {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise Unsuitable(f"weight {name} is of type {tensor.dtype}")
        self._unread.discard(name)
        return tensor

    def embedding(self, vocab_size: int, hidden: int) -> torch.Tensor:
        """[vocabulary, hidden]."""
        return self.get(_EMBEDDING, vocab_size, hidden)

    def final_norm(self, hidden: int) -> torch.Tensor:
        """[hidden]."""
        return self.get(_NORM, hidden)

    def head(self, shape: Shape, vocab_size: int) -> torch.Tensor:
        """[vocabulary, hidden]; the embedding where the two are tied."""
        if shape.tied:
            self._unread.discard(_HEAD)
            return self.embedding(vocab_size, shape.hidden)
        return self.get(_HEAD, vocab_size, shape.hidden)

    def layers(self, shape: Shape) -> Iterator[LayerWeights]:
        """Layer by layer, so that a caller who packs them never holds more than one twice.

        Raises Unsuitable if the kept layers have weights that nobody asks for, or are not all alike.
        """
        first = self._names_in("model.layers.0.")
        for index in range(shape.layers):
            prefix = f"model.layers.{index}."
            if self._names_in(prefix) != first:
                raise Unsuitable(f"weights are missing: layer {index} does not have those of layer 0")
            yield self._layer(prefix, shape)
            unknown = sorted(
                name for name in self._unread if name.startswith(prefix) and _IGNORED not in name
            )
            if unknown:
                raise Unsuitable(f"the family has no weight of the name {unknown[0]}")

    def _names_in(self, prefix: str) -> set[str]:
        return {
            name.removeprefix(prefix)
            for name in self._files
            if name.startswith(prefix) and _IGNORED not in name
        }

    def _layer(self, prefix: str, shape: Shape) -> LayerWeights:
        hidden, size, wide = shape.hidden, shape.head_size, shape.intermediate
        queries, keys = shape.heads * size, shape.kv_heads * size

        def projection(name: str, outputs: int, inputs: int) -> Projection:
            bias = f"{prefix}{name}.bias"
            return Projection(
                self.get(f"{prefix}{name}.weight", outputs, inputs),
                self.get(bias, outputs) if bias in self else None,
            )

        def head_norm(name: str) -> torch.Tensor | None:
            full = f"{prefix}self_attn.{name}.weight"
            return self.get(full, size) if full in self else None

        return LayerWeights(
            attention_norm=self.get(f"{prefix}input_layernorm.weight", hidden),
            query=projection("self_attn.q_proj", queries, hidden),
            key=projection("self_attn.k_proj", keys, hidden),
            value=projection("self_attn.v_proj", keys, hidden),
            query_norm=head_norm("q_norm"),
            key_norm=head_norm("k_norm"),
            attention_out=projection("self_attn.o_proj", hidden, queries),
            mlp_norm=self.get(f"{prefix}post_attention_layernorm.weight", hidden),
            gate=projection("mlp.gate_proj", wide, hidden),
            up=projection("mlp.up_proj", wide, hidden),
            down=projection("mlp.down_proj", hidden, wide),
        )


def join(parts: list[Projection], dtype: torch.dtype) -> Projection:
    """Projections of the same input as one, outputs in order, in precision ``dtype``."""
    weight = torch.cat([part.weight.to(dtype) for part in parts])
    if all(part.bias is None for part in parts):
        return Projection(weight, None)
    biases = [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
    return Projection(weight, torch.cat([bias.to(dtype) for bias in biases]))


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise Unsuitable("its weights are not in safetensors files")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise Unsuitable(f"{index.name} is broken") from error
    return [directory / name for name in names]
