"""The native kernels: what they must equal, to the bit or within rounding, and how they come to be."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compiled import NotCompiledError
from paceline.config import ModelConfig
from paceline.engine import Segment, load_runner
from paceline.engine.kernels import build, native
from paceline.engine.kernels.build import load_library
from paceline.testing.tiny_models import tiny_model_dir

try:
    LIBRARY = load_library().functions
except NotCompiledError as error:
    pytest.skip(f"no native kernels: {error}", allow_module_level=True)


def load(path, **settings):
    return load_runner(ModelConfig(name=str(path), **settings), kv_slots=3, max_context=300)


def ids(count, seed=0):
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole(runner, tokens):
    slot = runner.kv.acquire()
    logits = runner.forward([Segment(slot, 0, tokens, len(tokens))])
    runner.kv.release(slot)
    return logits


def four_bit(outputs, inputs, seed):
    """Numbers as a Q4_1 file holds them, in float32."""
    random = np.random.default_rng(seed)
    scale = random.uniform(0.001, 0.1, (outputs, inputs // 32, 1)).astype(np.float16).astype(np.float32)
    minimum = random.uniform(-1, 0.1, (outputs, inputs // 32, 1)).astype(np.float16).astype(np.float32)
    q = random.integers(0, 16, (outputs, inputs // 32, 32))
    q[..., 3], q[..., 17] = 0, 15
    return torch.from_numpy((scale * q.astype(np.float32) + minimum).reshape(outputs, inputs))


def eight_bit(outputs, inputs, seed):
    """Numbers as a Q8_0 file holds them, in float32."""
    random = np.random.default_rng(seed)
    scale = random.uniform(0.001, 0.1, (outputs, inputs // 32, 1)).astype(np.float16).astype(np.float32)
    q = random.integers(-127, 128, (outputs, inputs // 32, 32))
    q[..., 5] = 127
    return torch.from_numpy((scale * q.astype(np.float32)).reshape(outputs, inputs))


def test_extreme_activations_are_limits(tmp_path):
    """A gate of minus a thousand closes: no overflow on the way."""
    path = tiny_model_dir(tmp_path)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    for name in weights:
        if "gate_proj" in name:
            weights[name] *= 300
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    runner = load(path)
    assert "native" in runner.info.runner_reason
    assert whole(runner, ids(40)).isfinite().all()


def test_lean_equals_the_reference_of_the_same_weights(tmp_path):
    """Logits within rounding, and the same best token wherever it is not a tie."""
    path = tiny_model_dir(tmp_path, layers=3)
    tokens = ids(250)
    lean, reference = (whole(load(path, runner=kind), tokens) for kind in ("lean", "reference"))
    torch.testing.assert_close(lean, reference, atol=1e-4, rtol=0)
    top = reference.topk(2).values
    clear = top[:, 0] - top[:, 1] > 1e-3
    assert clear.sum() > 200
    assert torch.equal(lean.argmax(1)[clear], reference.argmax(1)[clear])


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 12, 13, 25, 70])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_for_any_number_of_rows_and_threads(tmp_path_factory, rows, threads):
    """Also where a tile of rows is cut in another way, and where threads outnumber cores."""
    path = tiny_model_dir(tmp_path_factory.getbasetemp() / "rows")
    before = torch.get_num_threads()
    try:
        tokens = ids(90, 1)
        expected = whole(load(path, threads=1), tokens)
        runner = load(path, threads=threads)
        slot = runner.kv.acquire()
        parts = [
            runner.forward([Segment(slot, at, tokens[at : at + rows], len(tokens[at : at + rows]))])
            for at in range(0, len(tokens), rows)
        ]
        assert torch.equal(torch.cat(parts), expected)
    finally:
        torch.set_num_threads(before)


def quantised_model(path, make):
    """A tiny model whose matrices are numbers of a quantised file."""
    tiny_model_dir(path)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    for index, (name, weight) in enumerate(sorted(weights.items())):
        if weight.dim() == 2:
            weights[name] = make(*weight.shape, index) * 1.0
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(("make", "said"), [(four_bit, "4-bit blocks"), (eight_bit, "8-bit blocks")])
def test_blocks_give_the_bits_of_float32(tmp_path, monkeypatch, make, said):
    """Where the numbers are those of a quantised file they are kept as such, and nothing changes but the time."""
    if not LIBRARY.paceline_block_bytes(2):
        pytest.skip("this processor's kernels have no blocks")
    path = quantised_model(tmp_path, make)
    blocks = load(path)
    assert f"kept exactly in {said};" in blocks.info.runner_reason
    monkeypatch.setattr(native, "_BLOCK", 1 << 40)
    plain = load(path)
    assert "kept exactly in float32;" in plain.info.runner_reason
    for length in (1, 5, 12, 13, 60):
        tokens = ids(length, length)
        assert torch.equal(whole(blocks, tokens), whole(plain, tokens))


def test_bfloat16_checkpoints_are_kept_as_they_are(tmp_path):
    """Half the memory, the bits of the same numbers in float32."""
    path, wide = tmp_path / "narrow", tmp_path / "wide"
    for place in (path, wide):
        tiny_model_dir(place)
        weights = safetensors.torch.load_file(place / "model.safetensors")
        weights = {name: weight.bfloat16() for name, weight in weights.items()}
        if place is wide:
            weights = {name: weight.float() for name, weight in weights.items()}
        safetensors.torch.save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    narrow = load(path, dtype="float32")
    assert "kept exactly in bfloat16;" in narrow.info.runner_reason
    for length in (1, 13, 60):
        tokens = ids(length, length)
        assert torch.equal(whole(narrow, tokens), whole(load(wide), tokens))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), outputs=st.integers(1, 70), blocks=st.integers(1, 3))
def test_only_exact_numbers_become_blocks(seed, outputs, blocks):
    """One number that is off by the last bit, and the matrix stays float32."""
    if not LIBRARY.paceline_block_bytes(2):
        pytest.skip("this processor's kernels have no blocks")
    inputs = 32 * blocks
    for kind, make in ((2, four_bit), (3, eight_bit)):
        weight = make(outputs, inputs, seed)
        size = -(-outputs // 32) * blocks * LIBRARY.paceline_block_bytes(kind)
        room = torch.empty(size, dtype=torch.uint8)
        arguments = ctypes.c_int64(kind), ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(inputs)
        arguments += (ctypes.c_int64(outputs), ctypes.c_void_p(room.data_ptr()))
        assert LIBRARY.paceline_pack(*arguments) == 1
        place = np.random.default_rng(seed).integers(0, outputs), seed % inputs
        weight[place] = torch.nextafter(weight[place] + 1e-3, torch.tensor(9.0))
        assert LIBRARY.paceline_pack(*arguments) == 0


def test_two_processes_build_once(tmp_path):
    """The second waits for the first, and both get the same finished file."""
    code = "from paceline.engine.kernels.build import _built; print(_built().functions._name)"
    environment = os.environ | {"PACELINE_CACHE": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=200)[0].strip() for process in running]
    assert said[0] == said[1]
    built = tmp_path / "kernels"
    assert [str(path) for path in built.iterdir() if path.suffix == ".so"] == said[:1]
    assert len(list(built.iterdir())) == 2  # and the lock


def test_without_a_working_compiler_there_is_a_reason(tmp_path, monkeypatch):
    """The runner falls back to torch operations and says why."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setattr(build, "_loaded", [])
    runner = load(tiny_model_dir(tmp_path / "model"))
    assert runner.info.runner == "lean"
    assert "torch operations" in runner.info.runner_reason
    assert "the kernels cannot be built" in runner.info.runner_reason


def kibibytes_in_large_pages():
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells")
def test_weights_lie_in_large_pages_where_the_system_has_them():
    """Memory that could be shared has none on most systems, and small pages cost a tenth of a step."""
    size = 8 << 20
    before = kibibytes_in_large_pages()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as probe:
        probe.madvise(mmap.MADV_HUGEPAGE)
        probe.write(bytes(size))
        if kibibytes_in_large_pages() == before:
            pytest.skip("this system has no large pages to give")
    arena, before = native._Arena(), kibibytes_in_large_pages()
    numbers = torch.arange(size // 4, dtype=torch.int32)
    kept = arena.put(numbers)
    assert kept.data_ptr() % (2 << 20) == 0
    assert torch.equal(kept, numbers)
    assert kibibytes_in_large_pages() > before
