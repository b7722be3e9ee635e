"""The draft tier's server: drafters, their threads, and the Link streams of the verify replicas."""

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
from prometheus_client.metrics_core import Metric

from draft_service.drafters import AheadDrafter, Drafter, TwoSpeed, build_drafters, prompt_tokens
from draft_service.meter import DraftMeter
from draft_service.mirror import LinkMirrors
from draft_service.scoring import Text
from draft_service.self_scoring import SelfScores
from draft_service.stream import LinkStream
from draft_service.worker import DraftWorker
from paceline.config import DraftConfig, PacelineConfig
from paceline.errors import IncompatiblePeerError, InvalidRequestError
from paceline.link import Fate
from paceline.model_store import resolve_model_dir
from paceline.serving.host import host_name
from paceline.serving.server import TierServer
from paceline.telemetry import Telemetry, names
from paceline.telemetry.metrics import Metrics, build_info, counter, gauge, spans_lost
from paceline.tokenizer import Tokenizer
from paceline.v1 import draft_pb2 as pb
from paceline.v1.draft_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["DraftService"].full_name

HELLO_S = 10.0
"""A stream that says nothing for so long is not a link."""

_STOP_S = 2.0


class DraftService(DraftServiceServicer):
    """Link for any number of verify replicas. ``start`` before the first call, ``stop`` after the last."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        *,
        draft_id: str,
        tokenizer_fingerprint: str,
        telemetry: Telemetry,
        scores: SelfScores | None = None,
        clock: Callable[[], float] = time.monotonic,
        meter: DraftMeter | None = None,
    ) -> None:
        self.draft_id = draft_id
        self.meter = meter
        self.fates: Counter[Fate] = Counter()
        """Entries that did not apply, by fate; none of them is an error of the request."""
        self._drafters = dict(drafters)
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self.telemetry = telemetry
        self._clock = clock
        # Two threads: a look-up of microseconds must not wait behind a forward of tens of milliseconds.
        slow, quick = _by_speed(drafters)
        self.scores = scores
        quick_scorer, slow_scorer = (scores.quick, scores.slow) if scores is not None else (None, None)
        slow_worker = DraftWorker("slow", slow, scorer=slow_scorer, clock=clock) if slow else None
        relayed = slow_worker.post if slow_worker is not None else None
        quick_worker = (
            DraftWorker("quick", quick, slower=relayed, scorer=quick_scorer, clock=clock) if quick else None
        )
        self._workers = [worker for worker in (quick_worker, slow_worker) if worker is not None]
        if scores is not None:
            for worker in self._workers:
                worker.ended = self._ended
                worker.may_score = self._may_score
        # A drafter of two speeds is on both, and is asked on the quick one.
        self._worker_of = {
            name: worker for worker in reversed(self._workers) for name in worker.drafter_names
        }
        self._handles = itertools.count(1)
        self._streams: set[LinkStream] = set()

    def start(self) -> None:
        """Start the drafters' threads."""
        for worker in self._workers:
            worker.start()

    async def end_links(self) -> None:
        """Let all links end in good order: they would never end by themselves."""
        for stream in self._streams:
            stream.end()

    async def stop(self) -> None:
        """End the threads and send the last spans."""
        for worker in self._workers:
            if not await asyncio.to_thread(worker.stop, _STOP_S):
                log.warning("a drafter hangs, its thread is left behind", extra={"worker": worker.name})
        if self.scores is not None:
            await asyncio.to_thread(self.scores.close)
        await asyncio.to_thread(self.telemetry.shutdown)

    def _ended(self, text: Text | None) -> None:
        """A text is over; on the thread of its drafter."""
        assert self.scores is not None, "else nobody is told"
        if text is not None:
            self.scores.offer(text)
        for worker in self._workers:
            worker.nudge()

    def _may_score(self) -> bool:
        """While no sequence is open: on shared cores even idle drafters would slow the target down."""
        return self.scores is not None and (self.scores.while_serving or not self.num_sequences)

    @property
    def num_mirrors(self) -> int:
        """Sequences mirrored over all links."""
        return sum(stream.num_mirrors for stream in self._streams)

    @property
    def num_sequences(self) -> int:
        """Sequences that the drafters hold state for; follows ``num_mirrors`` with the workers' next step."""
        return sum(worker.num_sequences for worker in self._workers)

    @property
    def num_links(self) -> int:
        """Verify replicas that are connected."""
        return len(self._streams)

    def busy_s(self) -> float:
        """Longest time that a worker has been at its current step."""
        return max(worker.busy_s() for worker in self._workers)

    async def Link(  # type: ignore[override]  # noqa: N802  # a coroutine that writes; the protocol's name
        self, request_iterator: Any, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """See draft.proto."""
        hello = await self._hello(context)
        stream = LinkStream(telemetry=self.telemetry, clock=self._clock, meter=self.meter)
        mirrors = LinkMirrors(
            vocab_size=hello.vocab_size,
            workers=self._worker_of,
            handles=self._handles,
            deliver=stream.deliver,
            verify_id=hello.verify_id,
            fates=self.fates,
        )
        await context.write(pb.LinkResponse(welcome=self._welcome()))
        log.info("link opened", extra={"verify_id": hello.verify_id})
        self._streams.add(stream)
        try:
            await stream.run(mirrors, context)
        finally:
            self._streams.discard(stream)
            log.info("link closed", extra={"verify_id": hello.verify_id})

    async def _hello(self, context: "grpc.aio.ServicerContext[Any, Any]") -> pb.LinkHello:
        """The first message, checked. Raises IncompatiblePeerError or InvalidRequestError."""
        try:
            async with asyncio.timeout(HELLO_S):
                request = await context.read()
        except TimeoutError:
            raise IncompatiblePeerError(f"no hello within {HELLO_S:g} s of opening the link") from None
        if request is grpc.aio.EOF or not request.HasField("hello"):
            raise IncompatiblePeerError("the first message of a link must be a hello")
        hello: pb.LinkHello = request.hello
        theirs, ours = hello.tokenizer_fingerprint, self._tokenizer_fingerprint
        if theirs != ours:
            raise IncompatiblePeerError(
                f"tokenizers differ: verify replica {hello.verify_id!r} has {theirs[:16] or 'none'}, "
                f"draft replica {self.draft_id!r} has {ours[:16]}; set model.name alike in both tiers"
            )
        if hello.vocab_size < 1:
            raise InvalidRequestError.single("hello.vocab_size", "0: expected the rows of the target's head")
        return hello

    def _welcome(self) -> pb.LinkWelcome:
        offers = [
            pb.DrafterOffer(
                name=name,
                version=drafter.version,
                max_context=drafter.max_context,
                max_level=drafter.max_level if isinstance(drafter, AheadDrafter) else 0,
                device=drafter.device if isinstance(drafter, AheadDrafter) else "cpu",
                one_pass=drafter.one_pass if isinstance(drafter, AheadDrafter) else False,
                weights_bytes=memory[0],
                kv_bytes_per_token=memory[1],
                prompt_tokens=prompt_tokens(drafter),
            )
            for name, drafter in self._drafters.items()
            for memory in (getattr(drafter, "memory", (0, 0)),)
        ]
        return pb.LinkWelcome(draft_id=self.draft_id, drafters=offers, host=host_name())


def _by_speed(drafters: Mapping[str, Drafter]) -> tuple[dict[str, Drafter], dict[str, Drafter]]:
    """The slow ones, slower halves among them, and the quick ones."""
    slow = {name: drafter for name, drafter in drafters.items() if drafter.slow}
    quick = {name: drafter for name, drafter in drafters.items() if not drafter.slow}
    for name, drafter in quick.items():
        if isinstance(drafter, TwoSpeed) and drafter.slower is not None:
            slow[name] = drafter.slower
    return slow, quick


async def create_server(config: PacelineConfig) -> TierServer:
    """The draft tier, models loaded, not yet listening. Raises ConfigError for settings that cannot work."""
    fingerprint, drafters, scores = await asyncio.to_thread(_load, config)
    draft_id = f"draft-{secrets.token_hex(4)}"
    telemetry = Telemetry.setup(config.telemetry, service_name=names.SERVICE_DRAFT, instance_id=draft_id)
    service = DraftService(
        drafters,
        draft_id=draft_id,
        tokenizer_fingerprint=fingerprint,
        telemetry=telemetry,
        meter=DraftMeter() if config.draft.server.metrics_on is not None else None,
        scores=scores,
    )
    return serve(service, config.draft)


def _metrics(service: DraftService) -> Metrics | None:
    meter = service.meter
    if meter is None:
        return None
    metrics = Metrics()
    metrics.add(lambda: [build_info(names.SERVICE_DRAFT, service.draft_id), spans_lost(service.telemetry)])
    metrics.add(meter.collect)
    metrics.add(lambda: _state(service))
    if service.scores is not None:
        metrics.add(service.scores.metrics)
    return metrics


def _state(service: DraftService) -> Iterator[Metric]:
    """The tier as it stands."""
    now: dict[str, tuple[str, float]] = {
        "paceline_draft_num_running": ("Sequences that are mirrored.", service.num_mirrors),
        "paceline_draft_sequences": ("Sequences that drafters hold state for.", service.num_sequences),
        "paceline_draft_links": ("Verify replicas that are connected.", service.num_links),
        "paceline_draft_busy_seconds": (
            "For how long a drafter has been at its present batch.",
            service.busy_s(),
        ),
    }
    for name, (text, value) in now.items():
        yield gauge(name, text, (), {(): value})
    yield counter(
        "paceline_draft_link_entries",
        "Entries of links that did not apply, by fate; none of them is an error of a request.",
        ("fate",),
        {(fate.value,): count for fate, count in list(service.fates.items())},
    )


def serve(service: DraftService, config: DraftConfig) -> TierServer:
    """A server around ``service``, whose threads it starts, watches and ends."""
    server = TierServer(config.server, services=[SERVICE], section="draft.server", metrics=_metrics(service))
    add_DraftServiceServicer_to_server(service, server.grpc_server)
    service.start()
    watch = asyncio.get_running_loop().create_task(_watch(service, server, config.stall_s))

    async def stop() -> None:
        watch.cancel()
        await service.stop()

    server.on_drain(service.end_links)
    server.on_stop(stop)
    return server


def _load(config: PacelineConfig) -> tuple[str, dict[str, Drafter], SelfScores | None]:
    """Fingerprint of the target's tokenizer, the drafters, and their scores if they are wanted. Blocks."""
    tokenizer = Tokenizer.load(resolve_model_dir(config.model.name))
    drafters = build_drafters(config, tokenizer)
    scores = SelfScores(config, drafters, tokenizer) if config.draft.scores.dir else None
    return tokenizer.fingerprint, drafters, scores


async def _watch(service: DraftService, server: TierServer, stall_s: float) -> None:
    """Health tells of a drafter that hangs: NOT_SERVING while a step lasts longer than ``stall_s``."""
    healthy = True
    while True:
        await asyncio.sleep(stall_s / 4)
        stalled = service.busy_s() > stall_s
        if stalled is healthy:
            healthy = not stalled
            server.set_serving(healthy)
            log.warning("draft tier %s", "works again" if healthy else "is stuck in a drafter")
