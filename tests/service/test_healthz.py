"""``/healthz`` and the health command of the image."""

import asyncio
import subprocess
import sys
from pathlib import Path

from paceline.config import ServerConfig
from paceline.serving.server import TierServer
from paceline.telemetry.metrics import Metrics

COMMAND = Path(__file__).resolve().parents[2] / "deploy/health.py"


async def ask(*urls: str) -> tuple[int, str]:
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, str(COMMAND), *urls], capture_output=True, text=True
    )
    return done.returncode, done.stderr


async def test_the_health_command_follows_the_servers_health() -> None:
    """0 while it serves; 1 with words while it does not, and when nobody is there."""
    server = TierServer(ServerConfig(), services=[], metrics=Metrics())
    await server.start()
    url = f"http://{server.metrics_address}/healthz"
    try:
        assert (await ask(url)) == (0, "")
        server.set_serving(False)
        code, words = await ask(url, url)
        assert code == 1
        assert words.count("NOT_SERVING") == 2
    finally:
        await server.stop(0)
    code, words = await ask(url)
    assert code == 1
    assert "refused" in words
