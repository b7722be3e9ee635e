"""Loads a model directory: which device, which precision, which layers, and the identity of what was loaded."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from paceline.config import ModelConfig
from paceline.engine.attention import IMPLEMENTATION
from paceline.errors import ConfigError
from paceline.model_store import REGISTRY, resolve_model_dir
from paceline.tokenizer import Tokenizer

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "w4a8": torch.float32}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model directory that has been looked at, its weights not loaded yet."""

    name: str
    directory: Path
    full_config: Any
    """The model's configuration in transformers."""
    config: Any
    """The text part of it, layers already cut."""
    device: torch.device
    dtype: torch.dtype
    """Of all that is not the inside of a w4a8 linear layer."""
    dtype_reason: str
    w4a8: Literal["no", "if possible", "as set"]
    tokenizer_fingerprint: str
    eos_token_ids: tuple[int, ...]

    @property
    def max_positions(self) -> int | None:
        """Longest context the model was made for; None when it does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    def capacity(self, max_context: int) -> int:
        """Positions of a KV slot: ``max_context`` cut to the model's own limit."""
        return min(max_context, self.max_positions or max_context)

    def fingerprint(self) -> str:
        """sha256 of the architecture's settings, the layers kept and every weight; reads all files of weights."""
        return _fingerprint(self.config, _weights_digest(self.directory))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal model of transformers in evaluation mode, and where it comes from."""

    model: Any
    source: ModelSource
    fingerprint: str


def open_model(settings: ModelConfig, *, layers: int = 0) -> ModelSource:
    """Look at ``settings.name``; ``layers`` > 0 keeps only the first so many.

    Raises ConfigError for a model that is missing or of a kind that cannot be packed.
    """
    directory = resolve_model_dir(settings.name)
    tokenizer = Tokenizer.load(directory)
    device = _resolve_device(settings.device)
    dtype, dtype_reason = _resolve_dtype(settings.dtype, device)
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory}: {_first_line(error)}") from error
    text_config = config.get_text_config()
    _check_kind(config, text_config)
    if layers:
        _cut_layers(text_config, layers)
    return ModelSource(
        name=settings.name,
        directory=directory,
        full_config=config,
        config=text_config,
        device=device,
        dtype=dtype,
        dtype_reason=dtype_reason,
        w4a8=_resolve_w4a8(settings, device),
        tokenizer_fingerprint=tokenizer.fingerprint,
        eos_token_ids=tokenizer.eos_token_ids,
    )


def load_model(source: ModelSource) -> LoadedModel:
    """Load the weights through transformers. Raises ConfigError for a model that is broken or incomplete."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        fingerprint = pool.submit(
            source.fingerprint
        )  # hashing frees the interpreter lock: it runs beside loading
        model = _load(source.directory, source.full_config, source.dtype)
        found = fingerprint.result()
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{source.name}: {type(model).__name__} has no language model head")
    model.eval().requires_grad_(False)
    return LoadedModel(model=model.to(source.device), source=source, fingerprint=found)


def _resolve_device(named: str) -> torch.device:
    if named == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(named)
    except RuntimeError as error:
        raise ConfigError(f"model.device = {named!r}: expected auto, cpu or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device = {named!r}: expected auto, cpu or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"model.device = {named!r}: this process sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _resolve_dtype(named: str, device: torch.device) -> tuple[torch.dtype, str]:
    """bfloat16 only where it is computed in hardware: emulated, it takes three times as long as float32."""
    if named != "auto":
        return _PRECISIONS[named], f"{named} as set"
    if device.type == "cuda":
        return torch.bfloat16, "bfloat16 on CUDA"
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return torch.bfloat16, "bfloat16: this CPU has instructions for it"
    return torch.float32, "float32: this CPU has no bfloat16 instructions"


def _resolve_w4a8(settings: ModelConfig, device: torch.device) -> Literal["no", "if possible", "as set"]:
    """Unasked only for models whose outputs have been measured in it."""
    if settings.dtype == "w4a8":
        if device.type != "cpu":
            raise ConfigError(
                f"model.dtype = 'w4a8': there are kernels for CPUs only; model.device is {device}"
            )
        return "as set"
    known = REGISTRY.get(settings.name)
    measured = settings.dtype == "auto" and device.type == "cpu" and known is not None and known.w4a8
    return "if possible" if measured else "no"


def _check_kind(config: Any, text_config: Any) -> None:
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"model type {kind!r} is an encoder-decoder; expected a causal language model")
    others = set(getattr(text_config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if others:
        raise ConfigError(
            f"model type {kind!r} has layers of type {', '.join(sorted(others))}, whose state cannot be rolled back by "
            f"setting a length; expected only {', '.join(sorted(_ATTENTION_LAYERS))}"
        )


def _cut_layers(text_config: Any, layers: int) -> None:
    total = text_config.num_hidden_layers
    if not 1 <= layers <= total:
        raise ConfigError(f"layers = {layers}: this model has {total}")
    text_config.num_hidden_layers = layers
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = text_config.layer_types[:layers]


def _load(directory: Path, config: Any, dtype: torch.dtype) -> Any:
    """The model through transformers, its progress bar and its remarks about cut layers silenced."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    factory: Any = transformers.AutoModelForCausalLM
    try:
        model, report = factory.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many kinds: each means that this directory cannot be served
        raise ConfigError(f"{directory}: transformers cannot load it: {_first_line(error)}") from error
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
    lacking = sorted(
        str(key) for part in ("missing_keys", "mismatched_keys") for key in report.get(part) or ()
    )
    if lacking:  # transformers would go on with random numbers
        raise ConfigError(
            f"{directory}: {len(lacking)} weights are missing or of the wrong shape, first {lacking[0]}"
        )
    return model


def _weights_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _fingerprint(config: Any, weights: str) -> str:
    """sha256 of the architecture's settings, the layers kept and every weight; not of the precision used."""
    settings = {
        key: value
        for key, value in config.to_dict().items()
        if not key.startswith("_") and key not in ("dtype", "torch_dtype", "transformers_version")
    }
    text = json.dumps([settings, weights], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
