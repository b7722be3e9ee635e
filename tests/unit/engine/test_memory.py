"""What a runner says of its own size, in every way of holding weights."""

import pytest

from paceline.config import ModelConfig
from paceline.engine import load_runner
from paceline.engine.memory import kv_bytes_per_token, weights_bytes
from paceline.testing.tiny_models import tiny_model_dir


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("runner", ["lean", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_counted_once_however_they_are_held(dtype, runner, compiler, tmp_path, monkeypatch):
    """Plain, packed by oneDNN (which has no address to tell), or in our kernels' layout."""
    if not compiler:
        monkeypatch.setenv("PACELINE_NO_COMPILER", "1")
    loaded = load_runner(
        ModelConfig(name=str(tiny_model_dir(tmp_path)), dtype=dtype, runner=runner),
        kv_slots=2,
        max_context=64,
    )
    numbers = sum(weight.numel() for weight in loaded._model.parameters()) if runner == "reference" else 0
    held = weights_bytes(loaded)
    if numbers:
        assert held == numbers * (4 if dtype == "float32" else 2)
    assert 10_000 < held < 4_000_000
    assert kv_bytes_per_token(loaded) > 0
