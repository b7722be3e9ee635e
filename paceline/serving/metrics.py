"""The HTTP endpoint of a process, answered by threads of its own: ``/metrics`` for Prometheus, ``/healthz`` for who
starts and stops containers.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from paceline.telemetry.metrics import Metrics

_POLL_S = 0.1
"""How soon the endpoint notices that it is to end."""
_IDLE_S = 10.0
"""A connection on which nothing is said for so long is closed."""
_MOST_CONNECTIONS = 32


class _Quiet(WSGIRequestHandler):
    """A scrape every few seconds is nothing to log."""

    timeout = _IDLE_S

    def handle(self) -> None:
        """One request. Who says nothing, or goes away, is nothing to log either."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing."""


class _Bounded(ThreadingWSGIServer):
    """A thread a connection, for so many at once; for one more the oldest is cut."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """As the base class does it."""
        with self._lock:
            self._open[request] = None
            if len(self._open) > _MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and ends
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """As the base class does it."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)


class MetricsEndpoint:
    """``GET /metrics``: text, or OpenMetrics with exemplars for those who ask for it. ``GET /healthz``: 200 or 503."""

    def __init__(self, metrics: Metrics, host: str, port: int, is_serving: Callable[[], bool]) -> None:
        """Listens from here on. Raises OSError where the address cannot be had."""
        self._host = host

        class Server(_Bounded):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        scraped: Callable[[dict[str, Any], Any], Iterable[bytes]] = make_wsgi_app(metrics.registry)

        def app(environ: dict[str, Any], respond: Any) -> Iterable[bytes]:
            if environ["PATH_INFO"] != "/healthz":
                return scraped(environ, respond)
            well = is_serving()
            respond("200 OK" if well else "503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"SERVING\n" if well else b"NOT_SERVING\n"]

        self._server = make_server(host.strip("[]"), port, app, Server, _Quiet)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self._host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop answering. Blocks for a tenth of a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
