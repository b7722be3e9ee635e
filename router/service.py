"""``RouterService``: the gRPC surface, and how the router is put together."""

import asyncio
import os
import socket

from google.protobuf.message import Message

import paceline
from paceline import codec
from paceline.config import LedgerConfig, PacelineConfig
from paceline.errors import InvalidRequestError
from paceline.model_store import resolve_model_dir
from paceline.serving.server import TierServer
from paceline.telemetry import names
from paceline.telemetry.metrics import Metrics, build_info, spans_lost
from paceline.telemetry.spans import Telemetry
from paceline.tokenizer import Tokenizer
from paceline.types import Law
from paceline.v1 import common_pb2, router_pb2, router_pb2_grpc
from router.accept import RouterParts
from router.generation import Context, Generation
from router.ledger.keeper import Keeper
from router.ledger.memory import Memory, OwnKeeper
from router.ledger.remote import RemoteKeeper
from router.ledger_set_up import open_keeper
from router.meter import PolicyGauges, RequestMeter, replica_gauges
from router.plan import PlanTable
from router.policy import Policy
from router.policy_service import PolicyDesk
from router.recent import RecentRequests
from router.replicas import Replicas
from router.task_rules import TaskNamer
from router.validate import unknown_field_violations

SERVICE = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """The servicer; one per process."""

    def __init__(self, parts: RouterParts, desk: PolicyDesk) -> None:
        self._parts = parts
        self._desk = desk
        self._running = 0

    async def Generate(self, request: router_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802  # aio also takes a coroutine
        """See router.proto. Cancelling the call, or its deadline, ends it in the verify tier too."""
        meter = self._parts.meter
        self._running += 1
        if meter is not None:
            meter.num_running += 1
        try:
            await Generation(self._parts, request, context).run()
        finally:
            self._running -= 1
            if meter is not None:
                meter.num_running -= 1

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
            task_types=self._parts.namer.types,
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

    async def GetPolicy(  # noqa: N802
        self, request: router_pb2.GetPolicyRequest, context: object
    ) -> router_pb2.GetPolicyResponse:
        """See router.proto."""
        _refuse_unknown(request)
        return await self._desk.show(request)

    async def SetPolicyRule(  # noqa: N802
        self, request: router_pb2.SetPolicyRuleRequest, context: object
    ) -> router_pb2.SetPolicyRuleResponse:
        """See router.proto. UNAVAILABLE while the ledger is away."""
        _refuse_unknown(request)
        return router_pb2.SetPolicyRuleResponse(rules=await self._desk.set(request.rule))

    async def RemovePolicyRule(  # noqa: N802
        self, request: router_pb2.RemovePolicyRuleRequest, context: object
    ) -> router_pb2.RemovePolicyRuleResponse:
        """See router.proto. UNAVAILABLE while the ledger is away."""
        _refuse_unknown(request)
        rules, removed = await self._desk.remove(request)
        return router_pb2.RemovePolicyRuleResponse(rules=rules, removed=removed)

    async def GetRollout(  # noqa: N802
        self, request: router_pb2.GetRolloutRequest, context: object
    ) -> router_pb2.GetRolloutResponse:
        """See router.proto."""
        _refuse_unknown(request)
        return await self._desk.rollout()

    async def SetRollout(  # noqa: N802
        self, request: router_pb2.SetRolloutRequest, context: object
    ) -> router_pb2.SetRolloutResponse:
        """See router.proto. UNAVAILABLE while the ledger is away."""
        _refuse_unknown(request)
        return router_pb2.SetRolloutResponse(orders=await self._desk.order(request.orders))


def _refuse_unknown(request: Message) -> None:
    violations = list(unknown_field_violations(request))
    if violations:
        raise InvalidRequestError(violations)


async def create_server(config: PacelineConfig) -> TierServer:
    """The router, ready to start; it begins to look for its verify replicas at once. Raises ConfigError."""
    tokenizer = Tokenizer.load(resolve_model_dir(config.model.name))
    settings = config.router
    plans = PlanTable(settings.plans, settings.task_types, Law(settings.law))
    namer = TaskNamer(settings.task_rules, settings.task_types, settings.task_confidence)
    router_id = f"{socket.gethostname()}:{os.getpid()}"
    telemetry = Telemetry.setup(config.telemetry, service_name=names.SERVICE_ROUTER, instance_id=router_id)
    replicas = Replicas(settings.verify_endpoints, tokenizer.fingerprint)
    keeper = None if settings.ledger.endpoint else open_keeper(settings)
    remote = RemoteKeeper(settings.ledger.endpoint) if keeper is None else None
    writer = OwnKeeper(keeper) if keeper is not None else remote
    assert writer is not None, "one of the two"
    memory = Memory(writer)
    policy = Policy(settings, plans, memory)
    recent = RecentRequests(settings.keep_requests)
    meter = RequestMeter() if settings.server.metrics_on is not None else None
    parts = RouterParts(settings, tokenizer, replicas, namer, policy, memory, recent, telemetry, meter)
    desk = PolicyDesk(parts, writer, _ledger_in_words(settings.ledger, keeper))
    metrics = _metrics(parts, meter, router_id) if meter is not None else None
    server = TierServer(config.router.server, services=[SERVICE], section="router.server", metrics=metrics)
    router_pb2_grpc.add_RouterServiceServicer_to_server(RouterService(parts, desk), server.grpc_server)

    async def stop() -> None:
        await replicas.stop()
        await memory.stop()
        if keeper is not None:
            await asyncio.to_thread(keeper.stop)
        if remote is not None:
            await remote.close()
        await asyncio.to_thread(telemetry.shutdown)

    server.on_stop(stop)
    if keeper is not None:
        keeper.start()
    memory.start()
    replicas.start()
    return server


def _metrics(parts: RouterParts, meter: RequestMeter, instance: str) -> Metrics:
    policy = PolicyGauges(
        lambda: parts.policy.verdicts,
        lambda: parts.policy.standings,
        parts.memory.documents,
        parts.config.holdout,
    )
    metrics = Metrics()
    metrics.add(lambda: [build_info(names.SERVICE_ROUTER, instance), spans_lost(parts.telemetry)])
    metrics.add(meter.collect)
    metrics.add(policy.collect)
    metrics.add(lambda: replica_gauges(parts.replicas))
    return metrics


def _ledger_in_words(config: LedgerConfig, keeper: Keeper | None) -> str:
    if keeper is None:
        return f"shared, at {config.endpoint}"
    if keeper.problem:
        return f"in memory: {keeper.problem}"
    return config.path or "in memory"
