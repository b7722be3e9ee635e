"""Which models are lean, that they compute what transformers computes, and what is refused with which reason."""

import json

import pytest
import safetensors.torch
import torch
import transformers

from paceline.config import ModelConfig
from paceline.engine import Segment, load_runner
from paceline.errors import ConfigError
from paceline.testing.tiny_models import tiny_model_dir

SHAPE = {
    "vocab_size": 520, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 4.0,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip

T = transformers
CONFIGS = {
    "llama": lambda: T.LlamaConfig(**SHAPE),
    "llama-tied": lambda: T.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-biases": lambda: T.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama-llama3": lambda: T.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama-yarn": lambda: T.LlamaConfig(**SHAPE, rope_parameters=YARN),
    "llama-linear": lambda: T.LlamaConfig(**SHAPE, rope_parameters=LINEAR),
    "llama-dynamic": lambda: T.LlamaConfig(**SHAPE, rope_parameters=DYNAMIC),
    "llama-one-head-a-key": lambda: T.LlamaConfig(**SHAPE | {"num_key_value_heads": 6}),
    "llama-one-key": lambda: T.LlamaConfig(**SHAPE | {"num_key_value_heads": 1}),
    "llama-odd-sizes": lambda: T.LlamaConfig(**SHAPE | {"vocab_size": 517, "intermediate_size": 176}),
    "llama-heads-of-24": lambda: T.LlamaConfig(**SHAPE, head_dim=24),
    "qwen2": lambda: T.Qwen2Config(**SHAPE),
    "qwen2-tied": lambda: T.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: T.Qwen3Config(**SHAPE, head_dim=32),
    "mistral": lambda: T.MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
    "mistral-wide-window": lambda: T.MistralConfig(**SHAPE, head_dim=16, sliding_window=256),
}
TORCH_ONLY = {"llama-heads-of-24"}
"""No native attention for such heads: the same in torch operations."""


def model_dir(path, config, *, dtype=torch.float32):
    """A random model of ``config`` with norms and biases that matter."""
    generator = torch.Generator().manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.3 * noise)
            else:
                weight.copy_(0.15 * noise)
    tiny_model_dir(path)
    model.to(dtype).save_pretrained(path)
    return path


def load(path, *, context=200, **settings):
    return load_runner(ModelConfig(name=str(path), **settings), kv_slots=4, max_context=context)


def whole(runner, tokens):
    slot = runner.kv.acquire()
    logits = runner.forward([Segment(slot, 0, tokens, len(tokens))])
    runner.kv.release(slot)
    return logits


def ids(count):
    return torch.randint(3, 500, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    path = model_dir(tmp_path_factory.mktemp(request.param), CONFIGS[request.param]())
    return request.param, path


@pytest.mark.parametrize("compiler", [True, False])
def test_lean_computes_what_transformers_computes(case, compiler, monkeypatch):
    """Each family and variant, with and without native kernels: the same logits within rounding, the same argmax."""
    name, path = case
    if not compiler:
        monkeypatch.setenv("PACELINE_NO_COMPILER", "1")
    runner = load(path)
    assert runner.info.runner == "lean"
    assert runner.info.numerics == "deterministic"
    if not compiler or name in TORCH_ONLY:
        assert "torch operations" in runner.info.runner_reason
    tokens = ids(180)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = plain(torch.tensor([tokens]), use_cache=False).logits[0]
    logits = whole(runner, tokens)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    top = expected.topk(2).values
    clear = top[:, 0] - top[:, 1] > 1e-3
    assert torch.equal(logits.argmax(1)[clear], expected.argmax(1)[clear])


def test_lean_in_bfloat16(tmp_path):
    """Logits as near to float32 as transformers' own bfloat16 is."""
    path = model_dir(tmp_path, CONFIGS["qwen3"]())
    runner = load(path, dtype="bfloat16")
    assert (runner.info.runner, runner.info.dtype) == ("lean", "bfloat16")
    tokens = ids(100)
    exact = whole(load(path, dtype="float32"), tokens)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        own = plain(torch.tensor([tokens]), use_cache=False).logits[0].float()
    assert (whole(runner, tokens) - exact).abs().mean() < 1.3 * (own - exact).abs().mean()


def test_several_files_of_weights(tmp_path):
    """Large models come in shards with an index."""
    whole_dir, shards = tmp_path / "whole", tmp_path / "shards"
    model_dir(whole_dir, CONFIGS["llama"]())
    tiny_model_dir(shards)
    (shards / "model.safetensors").unlink()
    plain = transformers.AutoModelForCausalLM.from_pretrained(whole_dir)
    plain.save_pretrained(shards, max_shard_size="200KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    runner = load(shards)
    assert runner.info.runner == "lean"
    assert torch.equal(whole(runner, ids(30)), whole(load(whole_dir), ids(30)))


def reason(path, **settings):
    info = load(path, **settings).info
    assert info.runner == "reference"
    return info.runner_reason


def test_a_window_smaller_than_the_context_is_not_lean(tmp_path):
    """The native attention has no window: such a model runs through the reference."""
    path = model_dir(tmp_path, T.MistralConfig(**SHAPE, head_dim=16, sliding_window=100))
    assert "slides over 100 tokens" in reason(path)
    assert load(path, context=100).info.runner == "lean"


def test_a_rotation_that_depends_on_the_length_is_not_lean(tmp_path):
    """Keys would have to be rotated anew when a sequence grows."""
    path = model_dir(tmp_path, T.LlamaConfig(**SHAPE))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] = LONG
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match="depends on the length of the sequence"):
        load(path, runner="lean")


def test_weights_that_the_family_does_not_have_are_not_lean(tmp_path):
    """A likeness in names is no proof: what is not understood is left to transformers."""
    path = model_dir(tmp_path, T.LlamaConfig(**SHAPE))
    weights = safetensors.torch.load_file(path / "model.safetensors")
    for layer in range(2):
        weights[f"model.layers.{layer}.self_attn.gate.weight"] = torch.ones(3)
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"no weight of the name model.layers.0.self_attn.gate.weight"):
        load(path, runner="lean")


def test_another_activation_is_not_lean(tmp_path):
    """The kernels know SwiGLU only."""
    assert "its activation is 'gelu'" in reason(
        model_dir(tmp_path, T.LlamaConfig(**SHAPE, hidden_act="gelu"))
    )
