"""How gRPC is told to pass messages."""

import os
import subprocess
import sys

import pytest

from paceline.few_wakes import VALUE, VARIABLE, few_wakes


@pytest.mark.parametrize("given", ["", "call_tracer_in_transport"])
def test_whoever_chose_grpcs_experiments_is_not_overruled(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is set."""
    monkeypatch.setattr(os, "environ", {VARIABLE: given} if given else {})
    few_wakes()
    assert os.environ[VARIABLE] == (given or VALUE)


@pytest.mark.parametrize("module", ["draft_service", "verify_service", "router", "router.ledger"])
def test_a_tier_tells_grpc_before_it_is_imported(module: str) -> None:
    """Later is without effect. A name that gRPC does not know is complained about when it is read."""
    code = (
        "import runpy, sys, paceline.few_wakes\n"
        "paceline.few_wakes.VALUE = '-no_such_thing'\n"
        "assert 'grpc' not in sys.modules\n"
        f"runpy.run_module({module!r})\n"
        "import asyncio, grpc\n"
        "async def main(): grpc.aio.server()\n"
        "asyncio.run(main())\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert "Unknown experiment: no_such_thing" in done.stderr


def test_grpc_knows_the_names() -> None:
    """When it does not any more, the poller of before is gone, and so should be the setting."""
    code = "import asyncio, grpc\nasync def main(): grpc.aio.server()\nasyncio.run(main())\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {VARIABLE: VALUE},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "Unknown experiment" not in done.stderr
