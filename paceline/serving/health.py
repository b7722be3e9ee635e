"""``grpc.health.v1``: whether this server wants requests.

The servicer that comes with grpc forgets all watchers of a service when one of them leaves, and lets a slow watcher
hold up everybody; watchers here are independent, and a drain can end them.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """One answer for the whole server and each of its services. Lives on the event loop."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = frozenset(["", *services])
        self._serving = False
        self._ended = False
        self._watchers: set[asyncio.Event] = set()

    def set(self, serving: bool) -> None:
        """From now on. Watchers hear of it; one that is slow may miss a state that did not last."""
        self._serving = serving
        self._wake()

    def is_serving(self) -> bool:
        """What Check says now; from any thread."""
        return self._serving

    def end_watches(self) -> None:
        """Let every watcher hear the last state, and end its stream."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(_UNKNOWN)
        return int(_SERVING if self._serving else _NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        """The state now; NOT_FOUND for a service that is not here."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802 - the protocol's name
        """The state now and whenever it changes."""
        changed, told = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                status = self._status(request.service)
                if status != told:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                elif self._ended:
                    return
                else:
                    await changed.wait()
                    changed.clear()
        finally:
            self._watchers.discard(changed)
