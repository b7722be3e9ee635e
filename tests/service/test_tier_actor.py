"""The actor that hosts a tier, without Ray: a plain object."""

import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.actor import TierActor, TierSpec
from paceline.config import load_config
from paceline.errors import ConfigError, EngineError

CONFIG = load_config(None, ["router.server.port=0"])


async def create_broken_server(config):
    raise EngineError("no weights")


def test_the_tier_serves_when_the_constructor_returns(tmp_path):
    """Health is SERVING at the address; after stop nobody listens there, and the log tells the story."""
    log = tmp_path / "router-0.log"
    actor = TierActor(TierSpec("router-0", "scripted_router:create_server", CONFIG, str(log)))
    assert actor.ready()
    with grpc.insecure_channel(actor.address()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        actor.stop(0.5)
        with pytest.raises(grpc.RpcError):
            stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
    assert not actor.ready()
    actor.stop()
    text = log.read_text()
    assert "msg=serving tier=router-0 address=127.0.0.1:" in text
    assert "msg=stopped tier=router-0" in text
    assert all(line.startswith("ts=") for line in text.splitlines())  # the form of a tier without Ray


def test_a_tier_that_cannot_start_raises_its_own_error(tmp_path):
    """The constructor raises what the tier raised; the log says it in one line, without a traceback."""
    log = tmp_path / "broken.log"
    with pytest.raises(EngineError, match="no weights"):
        TierActor(TierSpec("verify-0", "test_tier_actor:create_broken_server", CONFIG, str(log)))
    text = log.read_text()
    assert 'msg="tier failed" tier=verify-0 error="EngineError: no weights"' in text
    assert "Traceback" not in text


def test_a_port_that_is_taken_is_a_settings_error(tmp_path):
    """Two actors on one port: the second one does not serve."""
    first = TierActor(TierSpec("router-0", "scripted_router:create_server", CONFIG, str(tmp_path / "a.log")))
    port = first.address().rpartition(":")[2]
    taken = load_config(None, [f"router.server.port={port}"])
    with pytest.raises(ConfigError, match=port):
        TierActor(TierSpec("router-1", "scripted_router:create_server", taken, str(tmp_path / "b.log")))
    first.stop(0.0)


def test_a_tier_that_ends_by_itself_ends_its_process(tmp_path):
    """Whoever watches the process starts it again; a live process without a tier would look healthy."""
    code = f"""
import asyncio, threading, time
from cluster.actor import TierActor, TierSpec
from paceline.config import load_config
actor = TierActor(TierSpec("router-0", "scripted_router:create_server",
    load_config(None, ["router.server.port=0"]), {str(tmp_path / "log")!r}))
asyncio.run_coroutine_threadsafe(actor._server.stop(0.0), actor._loop)
time.sleep(20)
"""
    environment = {"PYTHONPATH": "tests/service:.", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert done.returncode == 1
    assert "tier ended by itself" in (tmp_path / "log").read_text()
