import json
import shutil

import pytest
import safetensors.torch
import torch
import transformers

from paceline.config import ModelConfig
from paceline.engine import Segment, load_runner
from paceline.engine.linear import can_pack
from paceline.engine.weights import _resolve_dtype
from paceline.errors import ConfigError
from paceline.testing.tiny_models import tiny_model_dir, tiny_pair


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("llama"), layers=3)


@pytest.fixture
def copy(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "copy")


def load(directory, *, slots=2, context=128, layers=0, **settings):
    return load_runner(
        ModelConfig(name=str(directory), **settings), kv_slots=slots, max_context=context, layers=layers
    )


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def logits_of(runner, tokens):
    slot = runner.kv.acquire()
    logits = runner.forward([Segment(slot, 0, tokens, len(tokens))])
    runner.kv.release(slot)
    return logits


def test_info_says_what_runs_and_why(directory):
    """Identity, precision and its reason, in words."""
    info = load(directory).info
    assert (info.name, info.device, info.runner) == (str(directory), "cpu", "lean")
    assert (info.vocab_size, info.max_context) == (512, 128)
    assert info.numerics == "deterministic"
    assert info.dtype in info.runner_reason
    assert "kernels" in info.runner_reason or "torch operations" in info.runner_reason
    assert len(info.fingerprint) == len(info.tokenizer_fingerprint) == 64


def test_the_runner_is_chosen_with_a_reason(directory, tmp_path):
    """auto takes what is lean; a setting wins; what cannot be lean is said to be so, or refused when asked for."""
    assert load(directory, runner="reference").info.runner == "reference"
    assert load(directory, runner="reference").info.runner_reason.startswith("reference as set")
    other = tiny_model_dir(tmp_path, family="gpt2")
    info = load(other).info
    assert info.runner == "reference"
    assert info.runner_reason.startswith("not lean: model type 'gpt2'")
    with pytest.raises(ConfigError, match=r"model\.runner = 'lean'.*model type 'gpt2'"):
        load(other, runner="lean")


def test_context_is_cut_to_the_models_own(directory):
    """Nobody is promised more positions than the model was made for."""
    assert load(directory, context=5000).info.max_context == 1024
    assert load(directory, context=5000).kv.capacity == 1024


def test_loading_leaves_all_slots_free(directory):
    """The checks at start give their slots back."""
    runner = load(directory, slots=1)
    assert runner.kv.is_idle()
    assert runner.kv.num_free == 1


def test_fingerprint_is_of_architecture_and_weights(directory, copy):
    """The same files have the same; one changed weight, one changed setting or fewer layers another."""
    first = load(directory).info.fingerprint
    assert load(copy, runner="reference").info.fingerprint == first
    assert load(copy).info.fingerprint == first
    assert load(copy, dtype="bfloat16").info.fingerprint == first
    assert load(copy, layers=2).info.fingerprint != first
    weights = safetensors.torch.load_file(copy / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    safetensors.torch.save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert load(copy).info.fingerprint != first


def test_fewer_layers_compute_what_a_shorter_model_computes(tmp_path):
    """Cutting a target to its first layers gives the draft that was made of the same layers."""
    target, draft = tiny_pair(tmp_path)
    cut, short = load(target, layers=2), load(draft)
    tokens = list(range(3, 40))
    assert torch.equal(logits_of(cut, tokens), logits_of(short, tokens))
    assert cut.info.tokenizer_fingerprint == short.info.tokenizer_fingerprint
    assert cut.kv.keys.shape[0] == 2


def test_bfloat16_is_served_when_asked_for(directory):
    """The setting wins over what would be fast, and the logits are float32 all the same."""
    runner = load(directory, dtype="bfloat16")
    assert runner.info.dtype == "bfloat16"
    tokens = list(range(3, 90))
    logits = logits_of(runner, tokens)
    assert logits.dtype == torch.float32
    plain = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = plain(torch.tensor([tokens])).logits[0].float()
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("runner", ["reference", "lean"])
def test_bfloat16_on_a_processor_that_cannot_pack_it(directory, runner, monkeypatch):
    """oneDNN packs it from AVX-512 on; elsewhere its layers stay as they are, in place of an error of torch's."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    info = load(directory, dtype="bfloat16", runner=runner).info
    assert (info.dtype, info.runner) == ("bfloat16", runner)
    assert "packed once for oneDNN" not in info.runner_reason
    assert not can_pack(torch.device("cpu"), torch.bfloat16)
    assert can_pack(torch.device("cpu"), torch.float32)


def test_automatic_precision_follows_the_processor(monkeypatch):
    """bfloat16 only where it is computed in hardware."""
    cpu = torch.device("cpu")
    for avx512, amx, expected in ((False, False, torch.float32), (True, False, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda found=avx512: found)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda found=amx: found)
        assert _resolve_dtype("auto", cpu)[0] is expected
    assert _resolve_dtype("auto", torch.device("cuda"))[0] is torch.bfloat16


def test_threads_are_set(directory):
    """model.threads is the number of threads that the engine computes with."""
    before = torch.get_num_threads()
    try:
        load(directory, threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_missing_weights_are_refused(copy):
    """transformers would go on with random numbers."""
    weights = safetensors.torch.load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="1 weights are missing"):
        load(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_kinds_that_cannot_be_packed_are_refused(copy, changes, message):
    """What has a state that a length cannot roll back, or is no causal model, is told so."""
    edit_config(copy, **changes)
    with pytest.raises(ConfigError, match=message):
        load(copy)


def test_a_window_that_attention_does_not_mention_is_refused(copy):
    """Served only within the window, where it makes no difference."""
    edit_config(copy, sliding_window=40)
    with pytest.raises(ConfigError, match="set max_context to 40 or less"):
        load(copy)
    assert load(copy, context=40).info.max_context == 40


def test_an_attention_with_something_unknown_is_refused(tmp_path):
    """Gemma 2 caps its attention scores: ignoring that would give other tokens, so it is not served."""
    config = transformers.Gemma2Config(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    directory = tiny_model_dir(tmp_path)
    transformers.Gemma2ForCausalLM(config).save_pretrained(directory)
    with pytest.raises(ConfigError, match="softcap"):
        load(directory)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "expected auto, cpu or cuda:N"),
        ({"device": "meta"}, "expected auto, cpu or cuda:N"),
        ({"device": "cuda:99"}, "sees 0 CUDA devices"),
        ({"layers": 4}, "this model has 3"),
        ({"slots": 10_000_000}, "MiB are free"),
    ],
)
def test_settings_that_cannot_work_are_refused(directory, settings, message):
    """The message names the setting, its value and what would be right."""
    if "cuda" in settings.get("device", "") and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigError, match=message):
        load(directory, **settings)
