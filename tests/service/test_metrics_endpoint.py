"""``/metrics`` in bad company: idle and slow connections hold neither threads nor those who ask in earnest."""

import socket
import threading
import time
import urllib.request

import pytest

from paceline.serving import metrics
from paceline.telemetry.metrics import Metrics


def scraped(endpoint: metrics.MetricsEndpoint) -> int:
    with urllib.request.urlopen(f"http://{endpoint.address}/healthz", timeout=5) as answer:
        return int(answer.status)


def connections(endpoint: metrics.MetricsEndpoint, count: int) -> list[socket.socket]:
    host, _, port = endpoint.address.rpartition(":")
    return [socket.create_connection((host, int(port))) for _ in range(count)]


def wait_for_threads(count: int) -> None:
    deadline = time.monotonic() + 5
    while threading.active_count() > count:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def test_an_idle_connection_is_closed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a while without a word, silently; half a request is no request."""
    monkeypatch.setattr(metrics._Quiet, "timeout", 0.1)
    endpoint = metrics.MetricsEndpoint(Metrics(), "127.0.0.1", 0, lambda: True)
    before = threading.active_count()
    try:
        idle = connections(endpoint, 3)
        idle[0].sendall(b"GET /metr")
        for one in idle:
            one.settimeout(5)
            assert one.recv(100) == b""
            one.close()
        wait_for_threads(before)
        assert scraped(endpoint) == 200
    finally:
        endpoint.close()
    assert capfd.readouterr().err == ""


def test_many_connections_hold_no_more_threads_than_the_bound_and_stop_nobody(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The oldest are cut for the newest."""
    endpoint = metrics.MetricsEndpoint(Metrics(), "127.0.0.1", 0, lambda: True)
    before = threading.active_count()
    idle = connections(endpoint, 100)
    try:
        assert scraped(endpoint) == 200
        wait_for_threads(before + metrics._MOST_CONNECTIONS)
        idle[0].settimeout(5)
        assert idle[0].recv(100) == b""
    finally:
        for one in idle:
            one.close()
        endpoint.close()
    assert capfd.readouterr().err == ""
