"""The stack under a real local Ray, on tiny models: up, asked, hurt, down. One cluster for the whole file."""

import asyncio
import contextlib
import ipaddress
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster import launch
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


async def test_a_killed_draft_costs_no_token_and_comes_back(stack, capfd):
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
    assert cluster.log_tail("draft-0").count("msg=serving") >= 1
    assert "\x1b" not in capfd.readouterr().out  # Ray's message about the dead process is in a file
    assert (cluster.log_dir / "ray.log").exists()


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


def test_a_port_that_is_taken_meanwhile_is_replaced_by_another(stack, monkeypatch):
    """Somebody listens on the chosen port before the draft tier does: it comes up on another one, nobody is bothered."""
    chosen: list[int] = []
    taken: list[socket.socket] = []

    def take(replicas, *, local):
        if len(chosen) == 1:  # the check just before the tiers are started
            taken.append(socket.create_server(("127.0.0.1", replicas[0].server.port)))
        chosen.append(replicas[0].server.port)

    monkeypatch.setattr(launch, "check_ports", take)
    said: list[str] = []
    with running_cluster(stack.config(), progress=said.append) as second:
        assert second.addresses("draft") != (f"127.0.0.1:{taken[0].getsockname()[1]}",)
    taken[0].close()
    assert said.count("a port was taken meanwhile: again with others") == 1
    assert any("waiting for" in text and "verify-0 (" in text for text in said)


def test_a_port_of_the_user_that_is_taken_is_an_error_in_words(stack, monkeypatch):
    """A port that was asked for is not replaced; the message names the setting and holds no traceback."""
    monkeypatch.setattr(launch, "check_ports", lambda *_arguments, **_options: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = (
            f"{tier}.server.port={port + index}" for index, tier in enumerate(("draft", "verify", "router"))
        )
        message = failure(stack.config(*ports))
    assert f"draft.server.host, draft.server.port: cannot listen on 127.0.0.1:{port}" in message
    assert "Traceback" not in message
    assert len(message.splitlines()) < 20


def test_nothing_of_the_stack_listens_beyond_this_machine(stack):
    """Ray's processes and the tiers have sockets on loopback only."""
    pids = {path.name for path in Path("/proc").glob("[0-9]*") if _belongs(path, stack.cluster)}
    pids |= {str(pid) for pid in stack.cluster.pids().values()}  # a title of its own hides where it belongs
    assert len(pids) > 5
    for pid in pids:
        for address in _listening(pid):
            assert ipaddress.ip_address(address).is_loopback, (pid, address)


def test_the_tiers_can_be_told_apart_in_ps(stack):
    """The process of each tier has a name of its own."""
    titles = {Path(f"/proc/{pid}/cmdline").read_text().strip("\0") for pid in stack.cluster.pids().values()}
    assert titles == {"ray::DraftTier", "ray::VerifyTier", "ray::RouterTier"}


def _belongs(path: Path, cluster: Cluster) -> bool:
    """Whether it is a process that this stack's Ray started: by its command line or by its environment."""
    try:
        text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
    except OSError:
        return False
    return str(cluster.log_dir).encode() in text


def _listening(pid: str) -> list[str]:
    inodes = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table, size in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                packed = bytes.fromhex(fields[1].partition(":")[0])
                words = [
                    packed[i : i + 4][::-1] for i in range(0, size, 4)
                ]  # each in the machine's byte order
                address = ipaddress.ip_address(b"".join(words))
                found.append(str(getattr(address, "ipv4_mapped", None) or address))
    return found


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
