"""``VerifyService``: takes sequences from the router, streams what the engine commits."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc

from paceline import codec
from paceline.config import PacelineConfig
from paceline.engine import Runner, load_runner
from paceline.engine.memory import device_bytes, give_back_free_memory, kv_bytes_per_token, weights_bytes
from paceline.records import RecordWriter
from paceline.serving.delay_line import DelayLine
from paceline.serving.host import host_name
from paceline.serving.server import TierServer
from paceline.simulation import MODEL_NAME, pair_of
from paceline.telemetry import names
from paceline.telemetry.context import extract
from paceline.telemetry.metrics import Metrics, build_info, spans_lost
from paceline.telemetry.spans import Telemetry
from paceline.v1 import common_pb2, draft_pb2, verify_pb2, verify_pb2_grpc
from verify_service.beside import build_beside
from verify_service.call_stream import CallStream
from verify_service.calls import Calls, Records
from verify_service.costs import CostTable, load_or_measure, simulated_table
from verify_service.engine import Engine
from verify_service.link_client import LinkClient, LinkEvents
from verify_service.meter import Meter, engine_state
from verify_service.recording import open_records, records_lost
from verify_service.sequence import Event

log = logging.getLogger(__name__)

SERVICE = verify_pb2.DESCRIPTOR.services_by_name["VerifyService"].full_name

_Context = grpc.aio.ServicerContext[verify_pb2.DecodeRequest, verify_pb2.DecodeResponse]
_ManyContext = grpc.aio.ServicerContext[verify_pb2.DecodeManyRequest, verify_pb2.DecodeManyResponse]


class VerifyService(verify_pb2_grpc.VerifyServiceServicer):
    """The servicer; one per process."""

    def __init__(
        self, calls: Calls, memory: verify_pb2.ModelMemory, links: Sequence[LinkClient] = ()
    ) -> None:
        self._calls = calls
        self._engine = calls.engine
        self._runner = calls.runner
        self._memory = memory
        self._links = links
        self._streams: set[CallStream] = set()
        self._draining = False

    async def Decode(self, request: verify_pb2.DecodeRequest, context: _Context) -> None:  # type: ignore[override]  # noqa: N802  # aio also takes a coroutine
        """See verify.proto. Cancelling the call, or its deadline, frees the sequence at the next step."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        caller = extract(context.invocation_metadata())
        call = self._calls.begin(request, caller, context.time_remaining(), events.put_nowait)
        try:
            while not call.over:
                await context.write(call.response(await events.get()))
        finally:
            call.end()

    async def DecodeMany(self, request_iterator: object, context: _ManyContext) -> None:  # type: ignore[override]  # noqa: N802  # aio also takes a coroutine
        """See verify.proto. Ending the stream frees its sequences at the next step."""
        stream = CallStream(self._calls)
        if self._draining:  # taken before the drain, begun after it
            stream.drain()
        self._streams.add(stream)
        try:
            await stream.run(context)
        finally:
            self._streams.discard(stream)

    async def drain(self) -> None:
        """Take no more sequences on streams that are open; each ends with its last one."""
        self._draining = True
        for stream in self._streams:
            stream.drain()

    async def GetModelInfo(  # noqa: N802
        self,
        request: verify_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[verify_pb2.GetModelInfoRequest, verify_pb2.GetModelInfoResponse],
    ) -> verify_pb2.GetModelInfoResponse:
        """See verify.proto."""
        state = self._engine.state()
        return verify_pb2.GetModelInfoResponse(
            model=codec.model_info_to_pb(self._runner.info),
            eos_token_ids=self._runner.eos_token_ids,
            drafters=[
                common_pb2.DrafterInfo(name=name, version=version, available=available)
                for name, (version, available) in state.drafters.items()
            ],
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            kv_slots=state.kv_slots,
            kv_slots_free=state.kv_slots_free,
            prefix_tokens_asked=state.prefix_tokens_asked,
            prefix_tokens_reused=state.prefix_tokens_reused,
            preemptions=state.preemptions,
            costs=_costs(self._engine, self._engine.costs) if self._engine.costs else None,
            memory=self._memory,
            drafter_memory=_drafter_memory(self._links),
        )


def _memory(config: PacelineConfig, runner: Runner) -> verify_pb2.ModelMemory:
    if config.model.name == MODEL_NAME:
        sizes = pair_of(config.simulation).sizes
        return verify_pb2.ModelMemory(
            device_bytes=sizes.device_bytes,
            weights_bytes=sizes.target_bytes,
            kv_bytes_per_token=sizes.target_kv_bytes,
        )
    return verify_pb2.ModelMemory(
        device_bytes=device_bytes(runner.device),
        weights_bytes=weights_bytes(runner),
        kv_bytes_per_token=kv_bytes_per_token(runner),
    )


def _drafter_memory(links: Sequence[LinkClient]) -> list[verify_pb2.DrafterMemory]:
    """One of each name: replicas of a drafter are alike, and each lies on a device of its own."""
    found = {name: memory for link in links for name, memory in link.memory.items() if any(memory[:2])}
    return [
        verify_pb2.DrafterMemory(
            name=name,
            weights_bytes=one.weights_bytes,
            kv_bytes_per_token=one.kv_bytes_per_token,
            shared=one.shared,
        )
        for name, one in found.items()
    ]


def _costs(engine: Engine, table: CostTable) -> verify_pb2.StepCosts:
    return verify_pb2.StepCosts(
        origin=table.origin,
        points=[
            verify_pb2.StepCost(
                sequences=sequences, rows=rows, step_s=step_s, now_s=engine.step_s(sequences, rows)
            )
            for sequences, curve in table.curves
            for rows, step_s in curve
        ],
        context=table.context,
        row_key_s=table.row_key_s,
        sequence_key_s=table.sequence_key_s,
    )


async def create_server(config: PacelineConfig) -> TierServer:
    """The verify tier, loaded and ready to start."""
    loop = asyncio.get_running_loop()
    started = time.monotonic()
    log.info("loading the model and checking its numerics", extra={"model": config.model.name})
    runner = await asyncio.to_thread(_load, config)
    log.info(
        "model loaded",
        extra={
            "model": runner.info.name,
            "dtype": runner.info.dtype,
            "runner": runner.info.runner,
            "numerics": runner.info.numerics,
            "seconds": round(time.monotonic() - started, 2),
        },
    )
    costs = await asyncio.to_thread(_step_costs, config, runner)
    await asyncio.to_thread(give_back_free_memory)
    verify_id = f"{socket.gethostname()}:{os.getpid()}"
    telemetry = Telemetry.setup(config.telemetry, service_name=names.SERVICE_VERIFY, instance_id=verify_id)
    writer = open_records(config.verify, verify_id, runner, costs)
    records = Records(writer, verify_id, config.verify.records.token_ids) if writer is not None else None
    meter = Meter() if config.verify.server.metrics_on is not None else None
    beside = build_beside(config.draft, runner.info.tokenizer_fingerprint, runner.info.vocab_size)
    engine = Engine(runner, config.verify, loop, costs, beside, meter)
    metrics = _metrics(engine, meter, runner, telemetry, verify_id) if meter is not None else None
    if metrics is not None and writer is not None:
        metrics.add(lambda: [records_lost(writer)])
    server = TierServer(config.verify.server, services=[SERVICE], section="verify.server", metrics=metrics)
    hello = draft_pb2.LinkHello(
        verify_id=verify_id,
        tokenizer_fingerprint=runner.info.tokenizer_fingerprint,
        vocab_size=runner.info.vocab_size,
    )
    events = LinkEvents(engine.link_up, engine.link_down, engine.proposed, engine.refused)
    endpoints, lines = _endpoints(config)
    shares = _sharing(config.verify.draft_shares_device, runner.info.device, config.model.name)
    links = [LinkClient(endpoint, hello, events, shares) for endpoint in endpoints]
    service = VerifyService(Calls(engine, runner, telemetry, records), _memory(config, runner), links)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(service, server.grpc_server)
    server.on_drain(service.drain)
    background = [asyncio.create_task(link.run()) for link in links]
    background.append(asyncio.create_task(_watch(engine, server, config.verify.stall_s)))
    server.on_stop(_stopper(background, engine, telemetry, lines, writer))
    engine.start()
    return server


def _metrics(engine: Engine, meter: Meter, runner: Runner, telemetry: Telemetry, instance: str) -> Metrics:
    metrics = Metrics()
    metrics.add(lambda: [build_info(names.SERVICE_VERIFY, instance), spans_lost(telemetry)])
    metrics.add(meter.collect)
    metrics.add(lambda: engine_state(engine, runner.info))
    return metrics


def _load(config: PacelineConfig) -> Runner:
    """The target model, or what stands for it. Blocks."""
    sizes = {"kv_slots": config.verify.kv_slots, "max_context": config.verify.max_context}
    if config.model.name == MODEL_NAME:
        from paceline.engine.simulated import SimulatedRunner

        return SimulatedRunner(config.simulation, **sizes)
    return load_runner(config.model, **sizes)


def _step_costs(config: PacelineConfig, runner: Runner) -> CostTable | None:
    """What steps cost here. Blocks."""
    if config.model.name == MODEL_NAME:
        return simulated_table(pair_of(config.simulation).verify)
    return load_or_measure(runner, config.verify.cost_budget_s)


def _sharing(setting: str, device: str, model: str) -> Callable[[str, str], bool]:
    """Whether a drafter on (host, device) works on what the target model computes on."""
    ours = host_name()

    def shares(host: str, drafter_device: str) -> bool:
        if setting != "auto":
            return setting == "yes"
        if MODEL_NAME in {model, drafter_device}:
            return False
        return not host or (host == ours and drafter_device == device)

    return shares


def _endpoints(config: PacelineConfig) -> tuple[list[str], list[DelayLine]]:
    """Where the draft replicas are; in a simulation with a distance between the tiers, behind delay lines."""
    endpoints = list(dict.fromkeys(config.verify.draft_endpoints))
    distance = config.simulation
    if config.model.name != MODEL_NAME or not (distance.rtt_ms or distance.jitter_ms):
        return endpoints, []
    lines = [
        DelayLine(endpoint, rtt_s=distance.rtt_ms / 1e3, jitter_s=distance.jitter_ms / 1e3)
        for endpoint in endpoints
    ]
    for line in lines:
        line.start()
    return [line.address for line in lines], lines


def _stopper(
    background: list[asyncio.Task[None]],
    engine: Engine,
    telemetry: Telemetry,
    lines: list[DelayLine],
    writer: RecordWriter | None,
) -> Callable[[], Awaitable[None]]:
    async def stop() -> None:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await asyncio.to_thread(engine.stop)
        for line in lines:
            line.stop()
        if writer is not None:
            await asyncio.to_thread(writer.close)
        await asyncio.to_thread(telemetry.shutdown)

    return stop


async def _watch(engine: Engine, server: TierServer, stall_s: float) -> None:
    """Health says NOT_SERVING while work waits and no step finishes."""
    stalled = False
    while True:
        await asyncio.sleep(min(1.0, stall_s / 4))
        now_stalled = engine.stalled_s() > stall_s
        if now_stalled != stalled:
            stalled = now_stalled
            log.error("engine stalled" if stalled else "engine runs again", extra={"stall_s": stall_s})
            server.set_serving(not stalled)
