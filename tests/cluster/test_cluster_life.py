"""The stack under a real local Ray, on tiny models: up, asked, hurt, down. One cluster for the whole file."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.launch import Cluster, LaunchError, running_cluster
from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.config import PacelineConfig, load_config
from paceline.testing.collector import OtlpCollector
from paceline.testing.tiny_models import tiny_pair
from paceline.types import Mode

pytestmark = pytest.mark.ray

NUM_TOKENS = 400


class Stack:
    """The running cluster, and the way to end it before the file does."""

    def __init__(self, directory: Path) -> None:
        self.target, self.draft = tiny_pair(directory)
        self.exit = contextlib.ExitStack()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = self.exit.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        self.cluster: Cluster = self.exit.enter_context(running_cluster(self.config()))
        self.collector = OtlpCollector(port)
        asyncio.run(self.collector.__aenter__())
        self.exit.callback(lambda: asyncio.run(self.collector.__aexit__(None, None, None)))

    def config(self, *overrides: str) -> PacelineConfig:
        return load_config(
            None,
            [
                f"model.name='{self.target}'",
                "model.dtype='float32'",
                f"draft.drafters.small={{ kind='model', model={{ name='{self.draft}', dtype='float32' }} }}",
                *(f"{tier}.server.port=0" for tier in ("draft", "verify", "router")),
                *(f"{tier}.server.drain_s=1.0" for tier in ("draft", "verify", "router")),
                *overrides,
            ],
        )


@pytest.fixture(scope="module")
def stack(tmp_path_factory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("models"))
    yield stack
    stack.exit.close()


def request(mode: Mode, max_tokens: int = NUM_TOKENS):
    return generate_request(
        text="The paceline rides on, and the paceline rides on",
        temperature=0.8,
        seed=7,
        max_tokens=max_tokens,
        ignore_eos=True,
        mode=mode,
        drafter="small" if mode is Mode.SPECULATIVE else None,
        k=4 if mode is Mode.SPECULATIVE else None,
    )


async def answer(client: Client, mode: Mode, max_tokens: int = NUM_TOKENS) -> tuple[list[int], Finished]:
    token_ids: list[int] = []
    async for event in client.generate(request(mode, max_tokens), timeout_s=60):
        if isinstance(event, Chunk):
            token_ids += event.token_ids
        elif isinstance(event, Finished):
            return token_ids, event
    raise AssertionError("no answer")


async def until_drafter_is_back(client: Client) -> None:
    async with asyncio.timeout(30):
        while not any(one.name == "small" and one.available for one in (await client.server_info()).drafters):
            await asyncio.sleep(0.1)


async def test_every_tier_is_a_process_of_its_own_and_answers(stack):
    """Three processes; speculative output equals plain output, and blocks were verified."""
    pids = stack.cluster.pids()
    assert set(pids) == {"draft-0", "verify-0", "router-0"}
    assert len({*pids.values(), os.getpid()}) == 4
    async with Client(stack.cluster.router_address) as client:
        plain, _ = await answer(client, Mode.PLAIN, 64)
        speculative, finished = await answer(client, Mode.SPECULATIVE, 64)
    assert speculative == plain
    assert finished.speculative.num_spec_steps > 0


async def test_the_traces_of_all_tiers_go_where_the_environment_says(stack):
    """OTEL_EXPORTER_OTLP_ENDPOINT of the launching process reaches every tier: one trace, three services."""
    async with Client(stack.cluster.router_address) as client:
        events = [event async for event in client.generate(request(Mode.SPECULATIVE, 32))]
    started = events[0]
    assert isinstance(started, Started)
    await stack.collector.wait_for(
        lambda spans: (
            {span["service"] for span in spans if span["trace_id"] == started.trace_id}
            == {"paceline-router", "paceline-verify", "paceline-draft"}
        ),
        timeout_s=20,
    )


async def test_a_killed_draft_costs_no_token_and_comes_back(stack):
    """Kill -9 in mid-stream: no error, the tokens of an undisturbed run; the draft is back on its port and used."""
    cluster = stack.cluster
    async with Client(cluster.router_address) as client:
        undisturbed, _ = await answer(client, Mode.SPECULATIVE)
        pid = cluster.pid("draft-0")
        token_ids: list[int] = []
        killed = False
        async for event in client.generate(request(Mode.SPECULATIVE), timeout_s=60):
            if isinstance(event, Chunk):
                token_ids += event.token_ids
                if len(token_ids) > 40 and not killed:
                    os.kill(pid, signal.SIGKILL)
                    killed = True
            elif isinstance(event, Finished):
                assert event.usage.completion_tokens == NUM_TOKENS
        assert killed
        assert token_ids == undisturbed

        assert await asyncio.to_thread(cluster.pid, "draft-0") != pid
        await until_drafter_is_back(client)
        again, finished = await answer(client, Mode.SPECULATIVE)
    assert again == undisturbed
    assert finished.speculative.num_spec_steps > 0
    assert cluster.log_tail("draft-0").count("serves on") >= 1


def test_trace_shows_the_last_request(stack):
    """`paceline trace` draws the rounds that the router remembers."""
    result = CliRunner().invoke(app, ["trace", "--address", stack.cluster.router_address])
    assert result.exit_code == 0
    assert "speculative small k=4" in result.stdout
    assert "used" in result.stdout


def test_a_tier_that_cannot_start_is_named_with_its_reason(stack, tmp_path):
    """A second stack in the same Ray with a model that cannot be loaded: which tier, why, its last log lines."""
    broken = tmp_path / "broken"
    shutil.copytree(stack.target, broken)
    (broken / "config.json").write_text("{}")
    message = failure(stack.config(f"model.name='{broken}'"))
    assert re.search(r"^verify-0 \(127\.0\.0\.1:\d+\): \w+", message)
    assert "last lines of" in message


def test_tiers_that_are_late_are_named(stack):
    """The time-out says how many are up and which are missing."""
    message = failure(stack.config("cluster.ready_s=0.2"))
    assert re.search(r"^[0-2] of 3 tiers are up after .*; missing:\n", message)
    assert "verify-0" in message


def failure(config: PacelineConfig) -> str:
    """What is said of a stack that does not come up; its logs, kept for a person, are removed."""
    with pytest.raises(LaunchError) as caught, running_cluster(config):
        pass
    for directory in set(re.findall(r"\S+/paceline-\w+", str(caught.value))):
        shutil.rmtree(directory)
    return str(caught.value)


def test_going_down_leaves_nothing_behind(stack):
    """The last test: after leaving, no process of ours runs, no socket, no log directory."""
    pids = stack.cluster.pids().values()
    log_dir = stack.cluster.log_dir
    assert _processes_of(log_dir)
    stack.exit.close()
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    assert not _processes_of(log_dir)
    assert not log_dir.exists()


def _processes_of(directory: Path) -> list[str]:
    """Command lines of processes that name ``directory``: the raylet and all that it started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(directory) in command:
                found.append(command)
    return found
