"""Kernels for other kinds of processor: what a weaker one computes, this one computes too, bit for bit."""

import ctypes

import pytest
import torch

from paceline.compiled import NotCompiledError, find_compiler
from paceline.config import ModelConfig
from paceline.engine import Segment, load_runner
from paceline.engine.kernels import build
from paceline.testing.quantised import four_bit, quantise_model
from paceline.testing.tiny_models import tiny_model_dir

try:
    COMPILER = find_compiler()
except NotCompiledError as error:
    pytest.skip(str(error), allow_module_level=True)

LEVELS = [level for level, (_, flags) in build.LEVELS.items() if flags <= set(build._processor().split())]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return quantise_model(tiny_model_dir(tmp_path_factory.mktemp("levels"), layers=3), four_bit)


@pytest.fixture(scope="module", params=LEVELS)
def library(request, tmp_path_factory):
    target = tmp_path_factory.mktemp("kernels") / f"lean-{request.param}-0.so"
    options = [option for option in build._OPTIONS if not option.startswith("-march")]
    build._compile(COMPILER, [*options, *build.LEVELS[request.param][0], "-ffp-contract=off"], target)
    return build.Library(target, ctypes.CDLL(str(target)))


def logits_of(model, dtype):
    runner = load_runner(ModelConfig(name=str(model), dtype=dtype), kv_slots=2, max_context=300)
    assert (runner.info.runner, runner.info.dtype) == ("lean", dtype)
    tokens = torch.randint(3, 512, (270,), generator=torch.Generator().manual_seed(1)).tolist()
    slot = runner.kv.acquire()
    prompt = runner.forward([Segment(slot, 0, tokens[:250], 250)])
    rounds = [
        runner.forward([Segment(slot, at, tokens[at : at + rows], rows)])
        for at, rows in ((250, 1), (251, 4), (255, 9), (264, 6))
    ]
    return torch.cat([prompt, *rounds]), runner.info.runner_reason


@pytest.mark.parametrize("dtype", ["w4a8", "float32"])
def test_every_kind_of_processor_computes_the_same(model, library, dtype, monkeypatch):
    """A fleet of different machines, and an image that brings its kernels along, give the tokens of any one of them."""
    expected, _ = logits_of(model, dtype)
    monkeypatch.setattr(build, "_loaded", [library])
    found, reason = logits_of(model, dtype)
    assert library.name in reason
    assert torch.equal(found, expected)
