"""Writes the directory that serving loads: ``python -m training.export --run DIR --to models/NAME``.

Reads ``best.pt`` of the run (or ``--from``), puts the weights into blocks, and copies what the card can say by itself.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.config import ModelConfig
from paceline.engine.blocks import BLOCK, quantise_4, quantise_8
from paceline.engine.weights import open_model


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="training.export", description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--from", dest="file", default="best.pt", help="file of the run")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--layer-bits", type=int, choices=(4, 8, 32), default=4)
    parser.add_argument("--head-bits", type=int, choices=(4, 8, 32), default=4)
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        help="it is to read only the last so many of a prompt; 0: all; unset: the directory says nothing",
    )
    options = parser.parse_args(argv)
    if (options.prompt_tokens or 0) < 0:
        parser.error(f"--prompt-tokens is {options.prompt_tokens}, expected a number of tokens or 0")
    saved = torch.load(options.run / options.file, weights_only=True, map_location="cpu")
    size = export(
        saved,
        options.to,
        layer_bits=options.layer_bits,
        head_bits=options.head_bits,
        prompt_tokens=options.prompt_tokens,
    )
    print(f"{options.to}: {size / 1e6:.1f} MB, {saved['line']}")


def export(
    saved: dict[str, Any],
    to: Path,
    *,
    layer_bits: int = 4,
    head_bits: int = 4,
    prompt_tokens: int | None = None,
) -> int:
    """Write the drafter ``saved`` (a file of a run) to the directory ``to``; the bytes of its weights."""
    source = open_model(ModelConfig(name=saved["target"], device="cpu", dtype="float32"))
    to.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {"head_ids": saved["vocab_ids"].to(torch.int32)}
    for name, weight in checkpoint_tensors(saved["weights"]).items():
        bits = head_bits if name == "lm_head.weight" else layer_bits
        if weight.ndim == 1 or bits == 32 or weight.shape[1] % BLOCK:
            tensors[name] = weight.contiguous()
            continue
        parts = quantise_4(weight) if bits == 4 else quantise_8(weight)
        tensors |= {f"{name}.{part}": values.contiguous() for part, values in parts.items()}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    (to / "model.safetensors").chmod(0o644)
    config = type(source.config).from_dict(source.config.to_dict())
    config.num_hidden_layers = saved["layers"]
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * saved["layers"]
    config.save_pretrained(to)
    about = {
        "target": saved["target"],
        "head": len(saved["vocab_ids"]),
        "bits": f"layers in {layer_bits} bits, head in {head_bits}",
        "held_out": json.loads(saved["line"] or "{}"),
    }
    if prompt_tokens is not None:
        about["prompt_tokens"] = prompt_tokens
    (to / "drafter.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return (to / "model.safetensors").stat().st_size


def checkpoint_tensors(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trainer's joined parameters under the names, and in the pieces, of transformers."""
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if name == "head":
            found["lm_head.weight"] = value
        elif name == "final_norm":
            found["model.norm.weight"] = value
        else:
            _, index, rest = name.split(".", 2)
            for piece, part in _pieces(rest, value):
                found[f"model.layers.{index}.{piece}"] = part
    return found


_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "query.weight": "self_attn.q_proj.weight",
    "query.bias": "self_attn.q_proj.bias",
    "attention_out.weight": "self_attn.o_proj.weight",
    "down.weight": "mlp.down_proj.weight",
}
_JOINED = {"key_value": ("self_attn.k_proj", "self_attn.v_proj"), "gate_up": ("mlp.gate_proj", "mlp.up_proj")}


def _pieces(name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if name in _NAMES:
        return [(_NAMES[name], value)]
    joined, kind = name.split(".")
    return [(f"{own}.{kind}", part) for own, part in zip(_JOINED[joined], value.chunk(2), strict=True)]


if __name__ == "__main__":
    main()
