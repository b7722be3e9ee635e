"""Linear layers in 8-bit integers: equal to the slow reference to the bit, a row for itself, refused where impossible."""

import ctypes
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

from paceline.compiled import NotCompiledError
from paceline.config import ModelConfig
from paceline.engine import Segment, load_runner, weights
from paceline.engine.kernels import native
from paceline.engine.kernels.build import load_library
from paceline.errors import ConfigError
from paceline.model_store import REGISTRY
from paceline.sampling import BadLogitsError, TokenRow, choose, largest, scan
from paceline.testing.quantised import BLOCK, eight_bit, four_bit, quantise_model
from paceline.testing.tiny_models import tiny_model_dir
from paceline.types import SamplingParams

try:
    LIBRARY = load_library().functions
except NotCompiledError as error:
    pytest.skip(f"no native kernels: {error}", allow_module_level=True)
LIBRARY.paceline_block_bytes.restype = ctypes.c_int64
if not LIBRARY.paceline_block_bytes(ctypes.c_int64(native._INTEGERS_4)):
    pytest.skip("this processor has no AVX2 instructions", allow_module_level=True)

ROUND = {
    native._INTEGERS_4: four_bit,
    native._INTEGERS_8: eight_bit,
    native._FINE_4: four_bit,
    native._FINE_8: eight_bit,
}
FINE = (native._FINE_4, native._FINE_8)


# ---- The slow reference: one row, one block, one operation after the other ----


def rounded_inputs(x, highest):
    """q [blocks, 32] and the float32 scale a of each block: q = rint(x * (highest / max|x|)), a = max|x| / highest."""
    blocks = x.reshape(-1, BLOCK)
    most = np.abs(blocks).max(axis=1)
    usable = most >= np.float32(1e-30)
    by = np.divide(np.float32(highest), most, out=np.zeros_like(most), where=usable)
    scale = np.where(usable, most / np.float32(highest), np.float32(0))
    return np.rint(blocks * by[:, None]).astype(np.int64), scale.astype(np.float32)


def fma(a, b, c):
    """The product is exact in 64 bits of mantissa and the sum as good as exact, unless what is added lies very far below: not here."""
    return (np.longdouble(1) * a * b + c).astype(np.float32)


def slow_product(kind, blocks, x):
    """[outputs] of one row x [inputs], float32, by the formula of integer.h."""
    q, scale = rounded_inputs(x, 127 * 256 if kind in FINE else 127)
    total = np.zeros(len(blocks.scale), dtype=np.float32)
    for b in range(len(q)):
        dot = blocks.steps[:, b].astype(np.int64) @ q[b]
        if ROUND[kind] is four_bit:
            total = fma(blocks.minimum[:, b, 0], scale[b] * np.float32(q[b].sum()), total)
        total = fma(dot.astype(np.float32), blocks.scale[:, b, 0] * scale[b], total)
    return total


# ---- The kernels alone ----


class Layer:
    """One linear layer in blocks of ``kind``."""

    def __init__(self, kind, blocks):
        weight = blocks.weight
        self.outputs, self.inputs = weight.shape
        self.panels = -(-self.outputs // native.PANEL)
        size = self.panels * (self.inputs // BLOCK) * LIBRARY.paceline_block_bytes(ctypes.c_int64(kind))
        self.room = torch.empty(size, dtype=torch.uint8)
        assert LIBRARY.paceline_pack(
            ctypes.c_int64(kind), ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(self.inputs),
            ctypes.c_int64(self.outputs), ctypes.c_void_p(self.room.data_ptr()),
        )  # fmt: skip
        self.linear = native._Linear(
            weight=self.room.data_ptr(), bias=None, inputs=self.inputs, outputs=self.outputs, format=kind
        )

    def __call__(self, x):
        x = np.ascontiguousarray(x, dtype=np.float32)
        found = np.empty((len(x), self.panels * native.PANEL), dtype=np.float32)
        LIBRARY.paceline_multiply(
            ctypes.byref(self.linear), ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(len(x)),
            ctypes.c_void_p(found.ctypes.data),
        )  # fmt: skip
        return found[:, : self.outputs]


def matrix(outputs, inputs, seed):
    random = np.random.default_rng(seed)
    spread = random.uniform(0.01, 2.0, (outputs, inputs // BLOCK, 1))
    values = random.standard_normal((outputs, inputs // BLOCK, BLOCK)) * spread + random.uniform(-0.3, 0.3)
    return torch.from_numpy(values.astype(np.float32).reshape(outputs, inputs))


def inputs_of(rows, inputs, seed):
    """Rows of very different size, with zeros, outliers and ties among them."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, inputs)) * np.exp(random.uniform(-6, 6, (rows, 1)))
    x[rows // 2, :BLOCK] = 0
    x[-1, -BLOCK:] = np.arange(BLOCK) - 15.5
    x[-1, -1] = 127
    x[0, inputs // 2] *= 1000
    x[0, :BLOCK] *= 1e-36
    return x.astype(np.float32)


@pytest.mark.parametrize("kind", ROUND)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (16, 96), (33, 64), (70, 576), (96, 1536)])
def test_the_kernels_equal_the_slow_reference_to_the_bit(kind, outputs, inputs):
    """Exact integers and one chain of float32 operations: nothing is left to the order of anything."""
    blocks = ROUND[kind](matrix(outputs, inputs, outputs))
    x = inputs_of(5, inputs, inputs)
    expected = np.stack([slow_product(kind, blocks, row) for row in x])
    assert np.array_equal(Layer(kind, blocks)(x), expected)
    weight = blocks.weight.numpy().astype(np.float64)
    exact = x.astype(np.float64) @ weight.T
    length = np.linalg.norm(x, axis=1, keepdims=True) * np.linalg.norm(weight, axis=1)
    assert (np.abs(expected - exact) <= (1e-4 if kind in FINE else 0.02) * length + 1e-30).all()


@pytest.mark.parametrize("kind", ROUND)
def test_a_row_is_the_same_beside_any_number_of_others(kind):
    """Every number of rows from 1 to 60: tiles are cut in every way, and no bit moves."""
    layer = Layer(kind, ROUND[kind](matrix(48, 192, 1)))
    x = inputs_of(60, 192, 2)
    whole = layer(x)
    for rows in range(1, 61):
        assert np.array_equal(layer(x[:rows]), whole[:rows])
        assert np.array_equal(layer(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("kind", ROUND)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_visible(kind, bad):
    """A row that has gone wrong does not come out as a plausible one, and harms nobody else."""
    layer = Layer(kind, ROUND[kind](matrix(40, 128, 3)))
    x = inputs_of(4, 128, 4)
    expected = layer(x)
    x[2, 77] = bad
    found = layer(x)
    assert not np.isfinite(found[2]).any()
    assert np.array_equal(found[[0, 1, 3]], expected[[0, 1, 3]])


# ---- A whole model ----


@pytest.fixture(scope="module", params=[four_bit, eight_bit], ids=["4-bit", "8-bit"])
def path(request, tmp_path_factory):
    return quantise_model(tiny_model_dir(tmp_path_factory.mktemp("blocks"), layers=3), request.param)


def load(path, **settings):
    return load_runner(ModelConfig(name=str(path), **settings), kv_slots=4, max_context=300)


def ids(count, seed=0):
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole(runner, tokens):
    slot = runner.kv.acquire()
    logits = runner.forward([Segment(slot, 0, tokens, len(tokens))])
    runner.kv.release(slot)
    return logits


def test_info_names_the_precision(path):
    """Whoever compares replicas or reads a report sees which arithmetic it was."""
    info = load(path, dtype="w4a8").info
    assert (info.dtype, info.runner, info.numerics) == ("w4a8", "lean", "deterministic")
    assert "w4a8 as set" in info.runner_reason
    assert "in blocks of 8 and 16 bits, keys and values in float16" in info.runner_reason
    assert load(path, dtype="float32").info.dtype == "float32"


def test_it_stays_near_float32(path):
    """As near as rounding the inputs allows, and with the same best token nearly everywhere."""
    tokens = ids(250)
    found, exact = (whole(load(path, dtype=dtype), tokens) for dtype in ("w4a8", "float32"))
    assert (found - exact).abs().mean() < 0.03 * exact.std()
    assert (found.argmax(1) == exact.argmax(1)).float().mean() > 0.95
    assert not torch.equal(found, exact)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_sequence_has_the_same_bits_in_any_chunks_and_company(path, threads):
    """Whole, cut into pieces of 1 to 40 rows, and beside other sequences that come and go."""
    before = torch.get_num_threads()
    try:
        tokens = ids(160, 1)
        expected = whole(load(path, dtype="w4a8", threads=1), tokens)
        runner = load(path, dtype="w4a8", threads=threads)
        slot, *others = (runner.kv.acquire() for _ in range(4))
        parts, at = [], 0
        for index, rows in enumerate((1, 2, 5, 9, 13, 40, 1, 24, 25, 40)):
            beside = [
                Segment(other, 0, ids(1 + (7 * index + other) % 12, index), 1)
                for other in others[: index % 4]
            ]
            for other in others:
                runner.kv.truncate(other, 0)
            segment = Segment(slot, at, tokens[at : at + rows], rows)
            parts.append(runner.forward([*beside, segment])[len(beside) :])
            at += rows
        assert at == len(tokens)
        assert torch.equal(torch.cat(parts), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["w4a8", "float32"])
@pytest.mark.parametrize("threads", [1, 2])
def test_more_rows_than_a_linear_layer_takes_at_once(path, dtype, threads):
    """A prompt whose inputs fill more than the second cache goes through each layer in parts: the bits of small pieces."""
    before = torch.get_num_threads()
    try:
        model = ModelConfig(name=str(path), dtype=dtype, threads=threads)
        runner = load_runner(model, kv_slots=2, max_context=1000)
        tokens = ids(1000, 5)
        slot = runner.kv.acquire()
        pieces = [
            runner.forward([Segment(slot, at, tokens[at : at + 50], 50)]) for at in range(0, len(tokens), 50)
        ]
        assert torch.equal(whole(runner, tokens), torch.cat(pieces))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["w4a8", "float32"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_however_attention_is_cut_into_tasks(path, dtype, threads):
    """Few rows far down the context, scores in pieces of it, several sequences, more rows than a task takes, copied prefixes of any
    length: the bits of one row at a time by one thread."""
    before = torch.get_num_threads()
    rng = random.Random(threads)
    try:
        texts = [ids(290, seed) for seed in range(3)]
        expected = [whole(load(path, dtype=dtype, threads=1), text) for text in texts]
        runner = load(path, dtype=dtype, threads=threads)
        runner.kv.keys.fill_(float("nan"))
        runner.kv.values.fill_(float("nan"))
        slots = [runner.kv.acquire() for _ in range(4)]
        copy = slots.pop()
        for _ in range(60):
            segments, logits = [], []
            for slot, text, truth in zip(slots, texts, expected, strict=True):
                done = runner.kv.length(slot)
                count = min(rng.choice([0, 1, 1, 2, 4, 7, 8, 9, 17, 40]), len(text) - done)
                if count == 0:
                    runner.kv.truncate(slot, min(done, rng.choice([done, 3, 127, 130, 255])))
                    continue
                segments.append(Segment(slot, done, text[done : done + count], count))
                logits.append(truth[done : done + count])
            if segments:
                assert torch.equal(runner.forward(segments), torch.cat(logits))
            source, text, truth = rng.choice(list(zip(slots, texts, expected, strict=True)))
            kept = rng.randint(0, min(runner.kv.length(source), 280))
            runner.kv.copy_prefix(source, copy, kept)
            assert torch.equal(
                runner.forward([Segment(copy, kept, text[kept : kept + 3], 3)]), truth[kept : kept + 3]
            )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["w4a8", "float32"])
def test_many_logits_behind_a_longer_prompt(path, dtype):
    """Rows whose logits are wanted have room of their own: a step of few rows may want more of them than a long prompt did."""
    tokens = ids(240, 2)
    expected = whole(load(path, dtype=dtype), tokens)
    runner = load(path, dtype=dtype)
    slot = runner.kv.acquire()
    for _ in range(20):
        runner.kv.truncate(slot, 0)
        parts = [runner.forward([Segment(slot, 0, tokens[:150], 1)])]
        parts.append(runner.forward([Segment(slot, 150, tokens[150:], 90)]))
        assert torch.equal(torch.cat(parts), expected[149:])
    runner.kv.release(slot)


def test_keys_and_values_are_kept_in_half(path):
    """Half the memory, and half of what a long context makes a step read; float32 keeps all of them."""
    half, full = (load(path, dtype=dtype).kv for dtype in ("w4a8", "float32"))
    assert (half.keys.dtype, half.values.dtype, full.keys.dtype) == (
        torch.float16,
        torch.float16,
        torch.float32,
    )
    assert 2 * half.nbytes == full.nbytes


@pytest.mark.parametrize("dtype", ["w4a8", "float32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_keys_that_are_no_numbers_stay_visible(path, dtype, bad):
    """Attention over them is none either, not one that takes from all positions alike."""
    runner = load(path, dtype=dtype)
    slot = runner.kv.acquire()
    runner.forward([Segment(slot, 0, ids(40), 1)])
    first_block = runner.kv.keys[:, :16]
    first_block.fill_(bad)
    assert not torch.isfinite(runner.forward([Segment(slot, 40, ids(1), 1)])).any()


def test_a_model_whose_keys_do_not_fit_into_half_is_refused(path, tmp_path):
    """The check at start sees it; any other precision serves the model."""
    loud = shutil.copytree(path, tmp_path / "loud")
    stored = safetensors.torch.load_file(loud / "model.safetensors")
    for name in stored:
        if "k_proj" in name:
            stored[name] *= 2.0**18
    safetensors.torch.save_file(stored, loud / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="w4a8"):
        load(loud, dtype="w4a8")
    assert load(loud, dtype="float32").info.runner == "lean"


def test_weights_without_blocks_are_refused(tmp_path):
    """Rounding the weights as well is not what was asked for."""
    path = tiny_model_dir(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.dtype = 'w4a8'.*not all in blocks of 4 or 8 bits"):
        load(path, dtype="w4a8")
    assert load(path).info.dtype != "w4a8"


def test_other_runners_and_machines_do_not_have_it(path, monkeypatch):
    """Said in words, not computed in another precision."""
    with pytest.raises(ConfigError, match="only the lean runner has it"):
        load(path, dtype="w4a8", runner="reference")
    monkeypatch.setenv("PACELINE_NO_COMPILER", "1")
    with pytest.raises(ConfigError, match="PACELINE_NO_COMPILER is set"):
        load(path, dtype="w4a8")


def test_unasked_only_where_it_was_measured(path, monkeypatch):
    """A model of the registry whose outputs were compared gets it, with the reason; any other has to ask."""
    assert load(path).info.dtype != "w4a8"
    known = replace(REGISTRY["smollm2"], w4a8=True)
    monkeypatch.setitem(REGISTRY, "measured", known)
    monkeypatch.setattr(weights, "resolve_model_dir", lambda name: path)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    info = load("measured").info
    assert info.dtype == "w4a8"
    assert "w4a8: measured for this model" in info.runner_reason
    assert load("measured", dtype="float32").info.dtype == "float32"
    monkeypatch.setenv("PACELINE_NO_COMPILER", "1")
    info = load("measured").info
    assert info.dtype == "bfloat16"
    assert "not w4a8: PACELINE_NO_COMPILER is set" in info.runner_reason


@pytest.mark.parametrize("dtype", ["w4a8", "float32"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_largest_logits_are_told(path, dtype, threads):
    """Found while logits are made, whichever thread made them: those that a look at the logits finds."""
    before = torch.get_num_threads()
    try:
        runner = load(path, dtype=dtype, threads=threads)
        for seed, wanted in enumerate((1, 2, 5, 9, 40)):
            slot = runner.kv.acquire()
            logits = runner.forward([Segment(slot, 0, ids(40, seed), wanted)])
            runner.kv.release(slot)
            assert largest.told(logits) == scan.largest(list(logits))
            assert largest.told(logits.clone()) is largest.told(logits[:1]) is None
            logits[0, 0] = 1e9
            assert largest.told(logits) is None, "of what the logits were"
    finally:
        torch.set_num_threads(before)


def test_among_equal_logits_the_lowest_token_and_no_number_shows(path):
    """All weights of the head nothing: all logits equal. Hidden states that are no numbers: so is the largest logit."""
    runner = load(path, dtype="float32")
    slot = runner.kv.acquire()
    body = runner._body
    norm = torch.zeros(body._model.hidden)
    kept = norm.clone()
    ctypes.memmove(kept.data_ptr(), body._model.final_norm, kept.nbytes)
    try:
        ctypes.memmove(body._model.final_norm, norm.data_ptr(), norm.nbytes)
        logits = runner.forward([Segment(slot, 0, ids(3), 3)])
        assert largest.told(logits) == ([0, 0, 0], [0.0, 0.0, 0.0])
        norm.fill_(float("nan"))
        ctypes.memmove(body._model.final_norm, norm.data_ptr(), norm.nbytes)
        logits = runner.forward([Segment(slot, 3, ids(1), 1)])
        with pytest.raises(BadLogitsError):
            choose(logits, [TokenRow(SamplingParams(temperature=0.0), 4)])
    finally:
        ctypes.memmove(body._model.final_norm, kept.data_ptr(), kept.nbytes)
