"""The actor that hosts one tier: a plain class, so that Ray is needed only to place and restart it.

The constructor starts the tier's asyncio loop in a thread of its own and returns when the tier serves. After a crash
Ray runs the constructor again, and nothing else: the same settings, the same port.
"""

import asyncio
import concurrent.futures
import contextlib
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from cluster.topology import WILDCARD_HOSTS
from paceline.config import PacelineConfig
from paceline.errors import PacelineError
from paceline.serving.logs import KeyValueFormatter
from paceline.serving.steady import steady

if TYPE_CHECKING:
    from paceline.serving.server import TierServer

CreateServer = Callable[[PacelineConfig], Awaitable["TierServer"]]

RETRY_S = 1.0
"""Between two attempts to come back after a crash."""

HOST_NAME = "PACELINE_HOST_NAME"
"""Environment variable of a node: the name by which other nodes reach it; without it they use its address."""

LOG_FILE = "PACELINE_LOG_FILE"
"""Environment variable of a node: where its tiers log. Ray keeps their standard error in files of its own, which in a
container nobody would find; the container's own output is /proc/1/fd/2."""

logger = logging.getLogger("paceline.cluster")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What an actor hosts; travels to it once."""

    name: str
    """Shown to people, for example verify-0."""
    factory: str
    """``package.module:function``, the function of type CreateServer: the actor knows no service by name."""
    config: PacelineConfig
    log_path: str = ""
    """Where the process logs; empty: its standard error."""


class TierActor:
    """One tier in one process.

    A restarted process serves on the same port; a tier that ends by itself ends the process, so that Ray starts it
    again.
    """

    def __init__(self, spec: TierSpec) -> None:
        """Returns when the tier serves. Raises what the tier raised when it cannot."""
        self._spec = spec
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: TierServer | None = None
        self._started: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._log = _log_to(spec.log_path or os.environ.get(LOG_FILE, ""))
        logger.info("starting", extra={"tier": spec.name, "pid": os.getpid()})
        self._thread = threading.Thread(target=self._run, name=f"{spec.name}-loop", daemon=True)
        self._thread.start()
        try:
            self._address = _advertised(self._started.result())
        except Exception:
            if not _was_restarted():
                raise
            # Ray gives an actor up whose constructor raises, but restarts one whose process ends.
            time.sleep(RETRY_S)
            _end_process()
        logger.info("serving", extra={"tier": spec.name, "address": self._address})

    def address(self) -> str:
        """host:port where the tier listens; known from the moment it serves."""
        return self._address

    def ready(self) -> bool:
        """Whether the tier's loop runs."""
        return self._thread.is_alive() and not self._stopping

    def pid(self) -> int:
        """Id of the process."""
        return os.getpid()

    def stop(self, drain_s: float | None = None) -> None:
        """Takes no more requests, gives those in flight ``drain_s`` (default: the tier's setting), then ends the loop.

        The process stays until it is killed: an actor that exits would be started again.
        """
        if self._stopping or self._loop is None or self._server is None:
            return
        self._stopping = True
        logger.info("draining", extra={"tier": self._spec.name, "num_calls": self._server.num_in_flight})
        stopping = asyncio.run_coroutine_threadsafe(self._server.stop(drain_s), self._loop)
        with contextlib.suppress(concurrent.futures.CancelledError):  # the loop ends with the server
            stopping.result()
        self._thread.join()
        logger.info("stopped", extra={"tier": self._spec.name})
        logging.getLogger().removeHandler(self._log)
        self._log.close()

    def _run(self) -> None:
        """The body of the loop's thread."""
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            # What was raised on purpose says all in its message; of a fault of ours the log needs the traceback.
            meant = isinstance(error, PacelineError)
            fields = {"tier": self._spec.name, "error": f"{type(error).__name__}: {error}"}
            logger.error("tier failed", exc_info=None if meant else error, extra=fields)
            if not self._started.done():
                self._started.set_exception(error)
                return
        if not self._stopping:
            logger.error("tier ended by itself", extra={"tier": self._spec.name})
            _end_process()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        create_server = _load(self._spec.factory)
        self._server = await create_server(self._spec.config)
        steady()
        await self._server.start()
        self._started.set_result(self._server.address)
        await self._server.wait()


class DraftTier(TierActor):
    """The name by which Ray shows the process, in ``ps`` too: ray::DraftTier."""


class VerifyTier(TierActor):
    """ray::VerifyTier."""


class RouterTier(TierActor):
    """ray::RouterTier."""


class LedgerTier(TierActor):
    """ray::LedgerTier."""


TIER_CLASSES: dict[str, type[TierActor]] = {
    "draft": DraftTier,
    "verify": VerifyTier,
    "router": RouterTier,
    "ledger": LedgerTier,
}


def _load(factory: str) -> CreateServer:
    module, _, name = factory.partition(":")
    function: CreateServer = getattr(importlib.import_module(module), name)
    return function


def _advertised(address: str) -> str:
    """``address`` as other nodes reach it."""
    host, _, port = address.rpartition(":")
    if host not in WILDCARD_HOSTS:
        return address
    if name := os.environ.get(HOST_NAME):  # outlives the container, which its address need not
        return f"{name}:{port}"
    import ray

    return f"{ray.util.get_node_ip_address()}:{port}"  # type: ignore[no-untyped-call]


def _was_restarted() -> bool:
    """Whether Ray runs this constructor again, after a crash."""
    # Not imported here: Ray reads its environment then, and the launcher sets it.
    ray = sys.modules.get("ray")
    return bool(ray and ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed)


def _end_process() -> NoReturn:
    logging.shutdown()
    os._exit(1)


def _log_to(path: str) -> logging.Handler:
    """The process is the tier's own, so its root logger is ours to set. An empty path is standard error."""
    handler = logging.FileHandler(path, encoding="utf-8") if path else logging.StreamHandler()
    handler.setFormatter(KeyValueFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    return handler
