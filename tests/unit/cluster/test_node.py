"""One Ray node in the foreground, and the names by which nodes reach each other."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster import node
from cluster.actor import HOST_NAME, _advertised
from cluster.launch import _environment


def test_a_node_that_never_comes_up_is_tried_again_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives its processes 30 s; on a busy machine that can be too little. The exit code is Ray's."""
    starts = tmp_path / "starts"
    code = f"open({str(starts)!r}, 'a').write('x'); raise SystemExit(3)"
    monkeypatch.setattr(node, "_ray", lambda *arguments: [sys.executable, "-c", code])
    monkeypatch.setattr(node, "_await_port", lambda *arguments: None)
    assert node._join("head:6379", ["verify"]) == 3
    assert starts.read_text() == "x" * node.ATTEMPTS


def test_a_node_that_was_up_and_ends_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the container ends, and its restart policy decides."""
    monkeypatch.setattr(node, "_ray", lambda *arguments: [sys.executable, "-c", "raise SystemExit(0)"])
    monkeypatch.setattr(node, "_await_port", lambda *arguments: None)
    monkeypatch.setattr(node, "EARLY_S", -1.0)
    assert node._join("head:6379", []) == 0


def test_what_a_node_started_ends_with_it(tmp_path: Path) -> None:
    """Its children too: they are one group."""
    said = tmp_path / "pid"
    script = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(said)!r}, 'w').write(f'{{child.pid}} '); time.sleep(60)"
    )
    with node._running([sys.executable, "-c", script]) as process:
        deadline = time.monotonic() + 20
        while not (said.exists() and said.read_text().endswith(" ")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None
        child = int(said.read_text())
        assert _runs(child)
    deadline = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_follows_two_dashes_is_the_launchers() -> None:
    """``head -- --config FILE`` hands on the rest."""
    assert node._split(["head", "--", "--config", "x"]) == (["head"], ["--config", "x"])
    assert node._split(["join", "verify"]) == (["join", "verify"], [])


def test_sigterm_ends_a_waiting_node_at_once() -> None:
    """A node whose head is not there yet waits, and ends with 0 when it is told to."""
    waiting = subprocess.Popen(
        [sys.executable, "-m", "cluster.node", "join", "verify", "--head", "127.0.0.1:1"],
        cwd=Path(__file__).resolve().parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "waiting for 127.0.0.1:1\n"
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(20) == 0


def test_a_node_with_a_name_is_reached_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name outlives the container; an address that was set on purpose stays; the name stays with its node."""
    monkeypatch.setenv(HOST_NAME, "verify")
    assert _advertised("0.0.0.0:7441") == "verify:7441"
    assert _advertised("10.0.0.5:7441") == "10.0.0.5:7441"
    assert HOST_NAME in os.environ
    assert HOST_NAME not in _environment(1)
