"""``paceline costs`` against a real verify replica."""

from pathlib import Path

import pytest
import torch

import verify_service.service
from cluster.cost_table import cost_lines, cost_table
from cluster.plan_words import plan_lines
from gates.plan import Scenario, plan
from paceline.config import load_config
from paceline.errors import IncompatiblePeerError
from paceline.serving import TierServer
from paceline.simulation import DeviceCost
from paceline.testing.tiny_models import tiny_model_dir

torch.set_num_threads(1)


async def test_a_verify_replica_shows_what_its_steps_cost(tmp_path: Path, monkeypatch) -> None:
    """Measured at start, by sequences and rows; with a budget of 0 it says that nothing was measured."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    path = tiny_model_dir(tmp_path / "model")
    settings = [f'model.name="{path}"', 'model.dtype="float32"', "verify.server.port=0", "verify.kv_slots=2"]
    for more, expected in ([], "measured at start"), (["verify.cost_budget_s=0"], "an earlier start"):
        server = await verify_service.service.create_server(load_config(None, [*settings, *more]))
        await server.start()
        try:
            lines = await cost_lines(server.address)
            table = await cost_table(server.address)
        finally:
            await server.stop(0)
        assert expected in lines[0]
        answer = plan(Scenario((0.8,), table, DeviceCost(1e-5, 64, 0.0), sequences=2, context=table.context))
        assert answer.depths[0].round_s == table.step_s(2, 2)
        assert answer.depths[4].round_s == pytest.approx(table.step_s(10, 2) + 4e-5)
        assert any(server.address in line for line in plan_lines(answer))
        assert "1 sequence" in lines
        assert "2 sequences" in lines
        assert any(line.strip().startswith("1 row  ") for line in lines)
        assert any(line.strip().startswith("5 rows ") for line in lines)


async def test_the_address_of_another_tier_is_told_in_words() -> None:
    """The router's port in place of the verify tier's."""
    server = TierServer(load_config(None, ["router.server.port=0"]).router.server, services=[])
    await server.start()
    try:
        with pytest.raises(IncompatiblePeerError, match="is not the verify tier"):
            await cost_lines(server.address)
    finally:
        await server.stop(0)
