"""Random models so small that the whole system runs on them in milliseconds, with a real tokenizer and template.

Their output is meaningless but well behaved: greedy text does not fall into one repeated token, the distributions
are neither flat nor certain, and a byte-level vocabulary brings multi-byte characters split over tokens.
"""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.simulation import CHAT_TEMPLATE

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)
"""Ids 0, 1 and 2."""

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt2")
"""Llama-shaped without and with biases, with norms of queries and keys, with a sliding window, and not at all."""

_HEADS, _KV_HEADS, _HEAD_SIZE = 4, 2, 16
_LOGIT_SPREAD = 4.0  # standard deviation of the logits: sharp enough to speak, flat enough to sample
_LATER_LAYERS = 0.2  # share of the usual weight that the target's later layers have in a pair

_TEXT = """
The riders take turns at the front of the line, where the wind is strongest, and then fall back to rest. When the one
in front grows tired, the line goes on without them: nobody waits, nobody is lost, and the pace stays the same.
A list of numbers: 1, 2, 3, 10, 25, 100, 2024. A price of $12.50, a share of 38 %, a date such as 2026-11-29.
def add(left, right): return left + right
for item in items: print(item["name"], item["value"])
{"name": "Ada", "age": 36, "city": "Paris", "tags": ["one", "two", "three"]}
Der schnelle Läufer über den Fluß; c'était déjà l'été, où l'on mange des crêpes; el niño comió piñas mañana.
今天天气很好，我们去公园散步。明天可能会下雨。東京タワーはとても高いです。 안녕하세요 세계. Привет, мир! Γειά σου κόσμε.
🙂🚀👩‍👩‍👧‍👦🎉 and so the answer to the question is that the text should be a little longer than it was before.
"""


def tiny_model_dir(
    path: Path,
    *,
    family: str = "llama",
    seed: int = 0,
    layers: int = 2,
    tokenizer_vocab: int = 512,
    model_vocab: int | None = None,
    max_context: int = 1024,
    sliding_window: int = 0,
    eos_token_ids: Sequence[int] = (2,),
) -> Path:
    """Write a random model in the transformers layout to ``path`` (made if missing) and return it.

    ``family`` is one of FAMILIES. ``model_vocab`` (default: the tokenizer's) may be larger, as a padded vocabulary, or
    much smaller, for exact sums over all outputs; prompts then have to be given as ids. The special tokens are about
    as unlikely as a mean token, so that outputs are long; name ordinary ids in ``eos_token_ids`` to see an early end.
    """
    vocab = model_vocab or tokenizer_vocab
    model = _random_model(_config(family, layers, vocab, max_context, sliding_window), seed)
    write_tiny_tokenizer(path, vocab_size=tokenizer_vocab)
    _write_model(model, path, eos_token_ids)
    return path


def tiny_pair(path: Path, *, seed: int = 0, layers: int = 4, draft_layers: int = 2) -> tuple[Path, Path]:
    """A target and a draft model directory under ``path`` with the same tokenizer.

    The draft is the target's first layers and its head. The target's later layers change little, so the two agree
    often, not always.
    """
    target = _random_model(_config("llama", layers, 512, 1024, 0), seed)
    with torch.no_grad():
        for layer in target.model.layers[draft_layers:]:
            layer.self_attn.o_proj.weight *= _LATER_LAYERS
            layer.mlp.down_proj.weight *= _LATER_LAYERS
    draft = transformers.LlamaForCausalLM(_config("llama", draft_layers, 512, 1024, 0))
    draft.load_state_dict(target.state_dict(), strict=False)
    write_tiny_tokenizer(path / "target")
    shutil.copytree(path / "target", path / "draft", dirs_exist_ok=True)
    _write_model(target, path / "target", (2,))
    _write_model(draft, path / "draft", (2,))
    return path / "target", path / "draft"


def write_tiny_tokenizer(path: Path, *, vocab_size: int = 512) -> Path:
    """A byte-level BPE tokenizer trained on a few lines in many scripts, with its chat template, in ``path``.

    Every byte is in the vocabulary, so ``vocab_size`` is at least 259.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": MESSAGE_START,
            "eos_token": MESSAGE_END,
            "unk_token": END_OF_TEXT,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return path


def _config(family: str, layers: int, vocab: int, max_context: int, sliding_window: int) -> Any:
    hidden = _HEADS * _HEAD_SIZE
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=vocab,
            n_positions=max_context,
            n_embd=hidden,
            n_layer=layers,
            n_head=_HEADS,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "llama":
        return transformers.LlamaConfig(**shape)
    if family == "qwen2":
        return transformers.Qwen2Config(**shape)
    if family == "qwen3":
        return transformers.Qwen3Config(**shape, head_dim=_HEAD_SIZE)
    if family == "mistral":
        return transformers.MistralConfig(**shape, head_dim=_HEAD_SIZE, sliding_window=sliding_window or None)
    raise ValueError(f"family {family!r}: expected one of {FAMILIES}")


def _random_model(config: Any, seed: int) -> Any:
    """Weights keyed by ``seed`` and the parameter's place in the model; layer norms stay at one."""
    factory: Any = transformers.AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    hidden = model.get_input_embeddings().weight.shape[1]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                if name.endswith("bias"):
                    weight.copy_(0.1 * noise)
            elif "embed_tokens" in name or "wte" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * (1.5 / math.sqrt(hidden)))
        head = model.get_output_embeddings().weight
        head.copy_(torch.randn(head.shape, generator=generator) * (_LOGIT_SPREAD / math.sqrt(hidden)))
        head[: len(SPECIAL_TOKENS)] *= 0.1
    return model


def _write_model(model: Any, path: Path, eos_token_ids: Sequence[int]) -> None:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    _write_json(path / "generation_config.json", {"bos_token_id": 1, "eos_token_id": list(eos_token_ids)})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
