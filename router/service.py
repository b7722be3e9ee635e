"""``RouterService``: the gRPC surface, and how the router is put together."""

import asyncio
import os
import socket

import paceline
from paceline import codec
from paceline.config import PacelineConfig
from paceline.errors import InvalidRequestError
from paceline.model_store import resolve_model_dir
from paceline.serving.server import TierServer
from paceline.telemetry import names
from paceline.telemetry.spans import Telemetry
from paceline.tokenizer import Tokenizer
from paceline.types import Law
from paceline.v1 import common_pb2, router_pb2, router_pb2_grpc
from router.accept import RouterParts
from router.generation import Context, Generation
from router.plan import PlanTable
from router.recent import RecentRequests
from router.replicas import Replicas
from router.task_type import TASK_TYPES
from router.validate import unknown_field_violations

SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """The servicer; one per process."""

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts
        self._running = 0

    async def Generate(self, request: router_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802  # aio also takes a coroutine
        """See router.proto. Cancelling the call, or its deadline, ends it in the verify tier too."""
        self._running += 1
        try:
            await Generation(self._parts, request, context).run()
        finally:
            self._running -= 1

    async def GetServerInfo(  # noqa: N802
        self, request: router_pb2.GetServerInfoRequest, context: object
    ) -> router_pb2.GetServerInfoResponse:
        """See router.proto. UNAVAILABLE until a verify replica has told what it serves."""
        _refuse_unknown(request)
        facts = await self._parts.replicas.facts()
        return router_pb2.GetServerInfoResponse(
            version=paceline.__version__,
            model=codec.model_info_to_pb(facts.info),
            drafters=[
                common_pb2.DrafterInfo(name=d.name, version=d.version, available=d.available)
                for d in sorted(facts.drafters.values(), key=lambda drafter: drafter.name)
            ],
            task_types=TASK_TYPES,
            default_max_tokens=self._parts.config.default_max_tokens,
            running=self._running,
        )

    async def ListRequests(  # noqa: N802
        self, request: router_pb2.ListRequestsRequest, context: object
    ) -> router_pb2.ListRequestsResponse:
        """See router.proto."""
        _refuse_unknown(request)
        kept = self._parts.recent.newest(request_id=request.request_id, limit=request.limit)
        return router_pb2.ListRequestsResponse(requests=kept)


def _refuse_unknown(request: router_pb2.GetServerInfoRequest | router_pb2.ListRequestsRequest) -> None:
    violations = list(unknown_field_violations(request))
    if violations:
        raise InvalidRequestError(violations)


async def create_server(config: PacelineConfig) -> TierServer:
    """The router, ready to start; it begins to look for its verify replicas at once. Raises ConfigError."""
    tokenizer = Tokenizer.load(resolve_model_dir(config.model.name))
    plans = PlanTable(config.router.plans, Law(config.router.law))
    telemetry = Telemetry.setup(
        config.telemetry,
        service_name=names.SERVICE_ROUTER,
        instance_id=f"{socket.gethostname()}:{os.getpid()}",
    )
    replicas = Replicas(config.router.verify_endpoints, tokenizer.fingerprint)
    parts = RouterParts(
        config.router, tokenizer, replicas, plans, RecentRequests(config.router.keep_requests), telemetry
    )
    server = TierServer(config.router.server, services=[SERVICE], section="router.server")
    router_pb2_grpc.add_RouterServiceServicer_to_server(RouterService(parts), server.grpc_server)

    async def stop() -> None:
        await replicas.stop()
        await asyncio.to_thread(telemetry.shutdown)

    server.on_stop(stop)
    replicas.start()
    return server
