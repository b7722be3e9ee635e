"""One tier's gRPC server: health, reflection, rich errors, and an orderly end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.config import ServerConfig
from paceline.errors import ConfigError
from paceline.serving.channel import MAX_MESSAGE_BYTES
from paceline.serving.health import HealthService
from paceline.serving.in_flight import InFlight
from paceline.serving.interceptors import ErrorInterceptor
from paceline.serving.metrics import MetricsEndpoint
from paceline.telemetry.metrics import Metrics

_logger = logging.getLogger(__name__)

_OPTIONS = (
    # Two servers on one port would share its requests by chance; the second one must fail instead.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # Find out about clients whose machine is gone, so that their memory comes back.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Let our own clients ask as often as they do (channel.py); the default answers with a hang-up.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

CANNOT_LISTEN = "cannot listen on"
"""In the message of every address that cannot be had: whoever chose it may choose another one."""

_LAST_WORDS_S = 1.0  # for calls that were cut, to send their status
_SETTLE_S = 0.05  # for calls that have answered and are on their way out
_FOREVER_S = 1e6

Callback = Callable[[], Awaitable[None]]


class TierServer:
    """A server that is built, started and stopped once. Every method belongs to one event loop.

    ``services`` are the full names of what will be added to ``grpc_server`` before ``start``; ``section`` is where the
    settings come from, for messages. ``metrics`` are served for as long as the server is; None: nothing is.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        services: Sequence[str],
        section: str = "server",
        metrics: Metrics | None = None,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._endpoint: MetricsEndpoint | None = None
        self._section = section
        self._in_flight = InFlight()
        self._background = InFlight()
        self._health = HealthService(services)
        self._serving = True
        self._port = config.port
        self._stop_callbacks: list[Callback] = []
        self._drain_callbacks: list[Callback] = []
        self._stopping: asyncio.Task[None] | None = None
        self._cut_at = float("inf")
        self._cut_sooner = asyncio.Event()
        self._stopped = asyncio.Event()
        self.grpc_server = grpc.aio.server(
            interceptors=[ErrorInterceptor(self._in_flight, self._background)], options=_OPTIONS
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc_server)

    @property
    def port(self) -> int:
        """The port listened on, once started."""
        return self._port

    @property
    def address(self) -> str:
        """host:port, once started."""
        return f"{self._config.host}:{self._port}"

    @property
    def metrics_address(self) -> str:
        """host:port of ``/metrics`` once started; empty where it is off."""
        return self._endpoint.address if self._endpoint is not None else ""

    @property
    def draining(self) -> bool:
        """Whether ``stop`` has begun."""
        return self._stopping is not None

    @property
    def num_in_flight(self) -> int:
        """Calls being worked on, health and reflection aside."""
        return len(self._in_flight)

    def on_drain(self, callback: Callback) -> None:
        """Run ``callback`` when a drain begins: end streams that would never end by themselves."""
        self._drain_callbacks.append(callback)

    def on_stop(self, callback: Callback) -> None:
        """Run ``callback`` after the last call has ended; callbacks run last added first."""
        self._stop_callbacks.append(callback)

    def set_serving(self, serving: bool) -> None:
        """What health says from now on; once stopping it stays NOT_SERVING."""
        self._serving = serving
        if self._stopping is None:
            self._health.set(serving)

    async def start(self) -> None:
        """Listen. Raises ConfigError where the address cannot be had."""
        try:
            self._port = self.grpc_server.add_insecure_port(self._config.address)
        except RuntimeError as error:
            raise ConfigError(
                f"{self._section}.host, {self._section}.port: {CANNOT_LISTEN} {self._config.address} (in use, or not of this machine)"
            ) from error
        self._serve_metrics()
        await self.grpc_server.start()
        self._health.set(self._serving)

    def _serve_metrics(self) -> None:
        port = self._config.metrics_on
        if self._metrics is None or port is None:
            return
        try:
            self._endpoint = MetricsEndpoint(self._metrics, self._config.host, port, self._health.is_serving)
        except OSError as error:
            raise ConfigError(
                f"{self._section}.metrics_port: {CANNOT_LISTEN} {self._config.host}:{port} ({error.strerror or error}); "
                'set it to another port, to 0 for any free one, or to "off"'
            ) from error
        _logger.info("metrics", extra={"url": f"http://{self._endpoint.address}/metrics"})

    async def wait(self) -> None:
        """Until the server has stopped, whoever stopped it."""
        await self._stopped.wait()

    async def stop(self, drain_s: float | None = None) -> None:
        """Stop in order: health says NOT_SERVING and new calls are refused at once; calls in flight have ``drain_s``
        (the configured time by default) and are then cut with UNAVAILABLE; then the stop callbacks run.

        Calling again waits for the same end, and a shorter ``drain_s`` shortens it. Works on a server that was never
        started, too.
        """
        loop = asyncio.get_running_loop()
        wanted = loop.time() + (self._config.drain_s if drain_s is None else drain_s)
        if wanted < self._cut_at:
            self._cut_at = wanted
            self._cut_sooner.set()
        if self._stopping is None:
            self._stopping = loop.create_task(self._stop(), name="server stop")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        try:
            self._health.set(False)
            # From here on new calls are refused; the end of the grace is ours to decide.
            refusing = asyncio.create_task(self.grpc_server.stop(grace=_FOREVER_S))
            await _run(self._drain_callbacks)
            await self._drain()
            await self._end_background()
            # Left: statuses on their way, requests that never came in whole, handlers that swallow a cancel.
            await asyncio.wait({refusing}, timeout=self._cut_in() + _LAST_WORDS_S)
            if not refusing.done():
                await self.grpc_server.stop(grace=None)
            await refusing
            await _run(list(reversed(self._stop_callbacks)))
            if self._endpoint is not None:  # to the end: a drain is when one looks
                await asyncio.to_thread(self._endpoint.close)
        finally:
            self._stopped.set()

    def _cut_in(self) -> float:
        return max(0.0, self._cut_at - asyncio.get_running_loop().time())

    async def _drain(self) -> None:
        """Wait for the calls in flight as long as they may take, then cut the rest."""
        while len(self._in_flight) and self._cut_in():
            self._cut_sooner.clear()
            idle = asyncio.create_task(self._in_flight.wait_idle())
            sooner = asyncio.create_task(self._cut_sooner.wait())
            await asyncio.wait({idle, sooner}, timeout=self._cut_in(), return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            sooner.cancel()
        await _within(_SETTLE_S, self._in_flight.wait_idle())
        if num_cut := self._in_flight.cut():
            _logger.warning("drain time is over, calls are cut", extra={"num_calls": num_cut})
            await _within(_LAST_WORDS_S, self._in_flight.wait_idle())

    async def _end_background(self) -> None:
        """End health watches, after their last news, and reflection streams."""
        self._health.end_watches()
        await _within(_LAST_WORDS_S, self._background.wait_idle())
        self._background.cut()


async def _within(limit_s: float, awaitable: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await awaitable
    except TimeoutError:
        pass


async def _run(callbacks: Sequence[Callback]) -> None:
    """Run every callback, whatever the others do."""
    for callback in callbacks:
        try:
            await callback()
        except Exception:
            _logger.exception("a callback of the server's end failed")
