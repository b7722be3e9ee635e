"""Directories of distilled drafters: few layers, a head over few tokens, the target's own embedding borrowed.

    config.json         sizes, as transformers writes them; the vocabulary is the target's
    drafter.json        {"target": name of the model whose embedding it reads,
                         "prompt_tokens": how many of a prompt's last tokens it is to read, without it all, ...}
    model.safetensors   layers, norm and head, in blocks where that was chosen, and head_ids: which tokens the head knows

Logits come over the target's whole vocabulary, -inf where the head knows nothing: biases, penalties and noise go by
the target's ids, and a token outside is never guessed.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from paceline.config import ModelConfig
from paceline.engine.blocks import restore
from paceline.engine.lean import LeanRunner, load_lean
from paceline.engine.lean_weights import Checkpoint, Unsuitable
from paceline.engine.weights import open_model
from paceline.errors import ConfigError
from paceline.model_store import resolve_model_dir

_SETTINGS = "drafter.json"
_EMBEDDING, _HEAD, _HEAD_IDS = "model.embed_tokens.weight", "lm_head.weight", "head_ids"
_PARTS = {"q4", "q8", "scale", "minimum"}


class _Blocks:
    """One weight that is stored in blocks; looks like the file it would be in."""

    def __init__(self, file: Any, parts: set[str]) -> None:
        self._file = file
        self._parts = parts

    def get_tensor(self, name: str) -> torch.Tensor:
        return restore(lambda part: self._file.get_tensor(f"{name}.{part}"), self._parts)


class DistilledCheckpoint(Checkpoint):
    """The drafter's own weights, and the embedding of its target."""

    def __init__(self, directory: Path, target: Path) -> None:
        """Raises Unsuitable for broken files."""
        super().__init__(directory)
        self._target = target
        if _HEAD_IDS not in self._files:
            raise Unsuitable(f"weight {_HEAD_IDS} is missing")
        self.head_ids: torch.Tensor = self._files[_HEAD_IDS].get_tensor(_HEAD_IDS).long()
        stored: dict[str, set[str]] = {}
        for name in list(self._files):
            weight, _, part = name.rpartition(".")
            if part in _PARTS:
                stored.setdefault(weight, set()).add(part)
        for weight, parts in stored.items():
            files = [self._files.pop(f"{weight}.{part}") for part in parts]
            self._files[weight] = _Blocks(files[0], parts)
        self._files |= Checkpoint(target).only(_EMBEDDING)
        self._unread = set(self._files) - {_HEAD_IDS}

    def reopened(self) -> "DistilledCheckpoint":
        """The same files under a mapping of their own."""
        return DistilledCheckpoint(self._directory, self._target)

    def embedding(self, vocab_size: int, hidden: int) -> torch.Tensor:
        """[the target's vocabulary, hidden], whatever the head knows."""
        rows: int = self._files[_EMBEDDING].get_slice(_EMBEDDING).get_shape()[0]
        return self.get(_EMBEDDING, rows, hidden)

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor ``name``; the head also as wide as the target's, zero where it knows nothing."""
        if name == _HEAD and shape[0] != len(self.head_ids):
            whole = torch.zeros(shape)
            whole[self.head_ids] = super().get(name, len(self.head_ids), *shape[1:]).float()
            return whole
        return super().get(name, *shape)


def _settings(directory: Path) -> Any:
    return json.loads((directory / _SETTINGS).read_text(encoding="utf-8"))


def told_prompt_tokens(directory: Path) -> int:
    """How many of a prompt's last tokens the drafter in ``directory`` is to read, 0: all. Raises ConfigError."""
    told = _settings(directory).get("prompt_tokens", 0)
    if type(told) is not int or told < 0:
        raise ConfigError(
            f"{directory / _SETTINGS}: prompt_tokens is {told!r}, expected a number of tokens or 0"
        )
    return told


def load_distilled(model: ModelConfig, *, kv_slots: int, max_context: int) -> LeanRunner:
    """The lean runner of the directory ``model.name``. Raises ConfigError for one that cannot be used."""
    directory = resolve_model_dir(model.name)
    try:
        settings = _settings(directory)
        config = transformers.AutoConfig.from_pretrained(directory)
        target = open_model(model.model_copy(update={"name": settings["target"]}))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory}: no distilled drafter: {error}") from error
    if (config.vocab_size, config.hidden_size) != (target.config.vocab_size, target.config.hidden_size):
        raise ConfigError(f"{directory}: its sizes are not those of its target {settings['target']!r}")
    if model.threads:
        torch.set_num_threads(model.threads)
    source = dataclasses.replace(
        target, name=model.name, directory=directory, full_config=config, config=config
    )
    try:
        checkpoint = DistilledCheckpoint(directory, target.directory)
        return load_lean(source, kv_slots=kv_slots, max_context=max_context, checkpoint=checkpoint)
    except Unsuitable as error:
        raise ConfigError(f"{directory}: {error}") from error
