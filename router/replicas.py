"""The verify replicas: which answer, what they serve, which is least loaded.

Each is asked for its health and its model every few seconds, more often while it is away. A replica is usable while it
answers, says SERVING and has the router's tokenizer. Replicas with different weights or precision may stand side by side
(an upgrade), but one request stays with one identity: another model would not continue the same output (I2).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline import codec
from paceline.errors import IncompatiblePeerError, PeerLostError
from paceline.serving.channel import open_channel
from paceline.serving.status import plain_words
from paceline.types import ModelInfo
from paceline.v1 import verify_pb2, verify_pb2_grpc
from router.decode_calls import DecodeCalls

_logger = logging.getLogger(__name__)

REFRESH_S = 2.0
RETRY_S = 0.25
PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter that the verify tier has seen."""

    name: str
    version: str
    available: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a verify replica serves."""

    info: ModelInfo
    eos_token_ids: tuple[int, ...]
    drafters: Mapping[str, Drafter] = field(default_factory=dict)
    has_room: bool = True
    """Whether a sequence more finds memory at once, as far as is known."""

    @property
    def identity(self) -> tuple[str, ...]:
        """Replicas of one identity continue each other's outputs: same values, same arithmetic."""
        return self.info.identity


class Replica:
    """One verify replica as far as the router knows. Lives on the event loop; changed by ``Replicas`` only."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.facts: ModelFacts | None = None
        """As last told; kept while the replica is away."""
        self.problem = "not asked yet"
        """Why it cannot be used; empty: it can."""
        self.incompatible = False
        self.channel = open_channel(address)
        self.stub: verify_pb2_grpc.VerifyServiceAsyncStub = verify_pb2_grpc.VerifyServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.decodes = DecodeCalls(address, self.stub)
        self.look_now = asyncio.Event()
        self.asked = asyncio.Event()  # at least once
        self.last_picked = 0
        self._in_flight = 0
        self._others = 0  # sequences that other routers have there
        self._slots_free = 1
        self._in_flight_then = 0  # of ours, when the free slots were told

    @property
    def usable(self) -> bool:
        """Whether requests may be sent to it."""
        return not self.problem

    @property
    def load(self) -> int:
        """Sequences there, its queue included."""
        return self._in_flight + self._others

    @property
    def has_room(self) -> bool:
        """Whether one sequence more finds memory: what was free, less what we sent since."""
        return self._slots_free > self._in_flight - self._in_flight_then

    @contextmanager
    def working(self) -> Iterator[None]:
        """A request of ours is there until the block ends."""
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def learn(self, reply: verify_pb2.GetModelInfoResponse) -> None:
        """Take in what it said of itself. A drafter seen once stays known: it may come back."""
        drafters = {d.name: Drafter(d.name, d.version, d.available) for d in reply.drafters}
        if self.facts is not None:
            drafters = {
                name: Drafter(name, known.version, available=False)
                for name, known in self.facts.drafters.items()
            } | drafters
        self.facts = ModelFacts(codec.model_info_from_pb(reply.model), tuple(reply.eos_token_ids), drafters)
        self._slots_free = reply.kv_slots_free
        self._in_flight_then = self._in_flight
        self._others = max(0, reply.num_running + reply.num_waiting - self._in_flight)


class Replicas:
    """Owner of the replicas and of the tasks that watch them. Lives on the event loop."""

    def __init__(self, endpoints: Sequence[str], tokenizer_fingerprint: str) -> None:
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._replicas = [Replica(address) for address in dict.fromkeys(endpoints)]
        self._changed = asyncio.Event()
        self._picks = 0
        self._all_asked_at = 0.0
        self._watchers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to watch."""
        self._all_asked_at = asyncio.get_running_loop().time() + PROBE_TIMEOUT_S
        self._watchers = [asyncio.create_task(self._watch(replica)) for replica in self._replicas]

    async def stop(self) -> None:
        """Stop watching and close the channels."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for replica in self._replicas:
            await replica.decodes.close()
            await replica.channel.close()

    async def facts(self) -> ModelFacts:
        """What new requests are measured by: the least loaded usable replica's model, else the last one known.

        Raises PeerLostError or IncompatiblePeerError where no replica has ever been usable.
        """
        try:
            chosen = (await self._least_loaded(_fits)).facts
        except PeerLostError:
            chosen = next((r.facts for r in self._replicas if r.facts and not r.incompatible), None)
            if chosen is None:
                raise
        assert chosen is not None, "a usable replica has told its facts"
        alike = [r for r in self._replicas if r.usable and r.facts and r.facts.identity == chosen.identity]
        has_room = not alike or any(replica.has_room for replica in alike)
        return ModelFacts(chosen.info, chosen.eos_token_ids, self._drafters(chosen.identity), has_room)

    async def pick(
        self,
        identity: tuple[str, ...] | None = None,
        *,
        min_context: int = 0,
        excluding: Collection[Replica] = (),
        wait_s: float = 0.0,
    ) -> Replica:
        """The least loaded usable replica, of ``identity`` if given, in turn among equals; waits up to ``wait_s`` for one.

        Raises PeerLostError, or IncompatiblePeerError where waiting cannot help.
        """
        chosen = await self._least_loaded(
            lambda replica: replica not in excluding and _fits(replica, identity, min_context), wait_s
        )
        self._picks += 1
        chosen.last_picked = self._picks
        return chosen

    async def _least_loaded(self, fits: Callable[[Replica], bool], wait_s: float = 0.0) -> Replica:
        """Of those that fit; only looking: its turn is not over. Raises as ``pick`` does."""
        await self._first_answers()
        give_up_at = asyncio.get_running_loop().time() + wait_s
        while True:
            if fit := [replica for replica in self._replicas if fits(replica)]:
                return min(fit, key=lambda replica: (replica.load, replica.last_picked))
            try:
                async with asyncio.timeout_at(give_up_at):
                    await self._changed.wait()
            except TimeoutError:
                raise self._why_none() from None

    def seen(self) -> list["Replica"]:
        """All of them; from any thread."""
        return list(self._replicas)

    def lost(self, replica: Replica, problem: str) -> None:
        """A call to ``replica`` broke: it is not used until it answers again."""
        if replica.usable:
            _logger.warning("verify replica lost", extra={"replica": replica.address, "problem": problem})
        replica.problem = problem
        replica.look_now.set()

    async def _first_answers(self) -> None:
        """Right after the start, give every replica the time of one question: the first to answer is not the best."""
        try:
            async with asyncio.timeout_at(self._all_asked_at):
                for replica in self._replicas:
                    await replica.asked.wait()
        except TimeoutError:
            pass

    def _drafters(self, identity: tuple[str, ...]) -> dict[str, Drafter]:
        """Of all replicas of ``identity``; one that is available anywhere is."""
        found: dict[str, Drafter] = {}
        for replica in self._replicas:
            if replica.facts is None or replica.facts.identity != identity:
                continue
            for name, drafter in replica.facts.drafters.items():
                there = drafter.available and replica.usable
                if there or name not in found:
                    found[name] = Drafter(name, drafter.version, there)
        return found

    def _why_none(self) -> IncompatiblePeerError | PeerLostError:
        said = [
            f"{r.address}: {r.problem or 'serves another model, or a smaller context'}"
            for r in self._replicas
        ]
        words = "; ".join(said) or "router.verify_endpoints is empty"
        if self._replicas and all(replica.incompatible for replica in self._replicas):
            return IncompatiblePeerError(words)
        return PeerLostError(f"no verify replica can be used now ({words})")

    # --- watching ---

    async def _watch(self, replica: Replica) -> None:
        while True:
            replica.look_now.clear()
            problem = await self._look(replica)
            if replica.look_now.is_set():
                continue  # a call broke meanwhile: the answer may be older than that
            if problem != replica.problem:
                _logger.info(
                    "verify replica", extra={"replica": replica.address, "problem": problem or "none"}
                )
            replica.problem = problem
            replica.asked.set()
            self._changed.set()  # whoever waits looks again
            self._changed = asyncio.Event()
            try:
                async with asyncio.timeout(REFRESH_S if replica.usable else RETRY_S):
                    await replica.look_now.wait()
            except TimeoutError:
                pass

    async def _look(self, replica: Replica) -> str:
        """Ask once; gives what is wrong, empty for nothing."""
        try:
            health = await replica.health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
            if health.status != health_pb2.HealthCheckResponse.SERVING:
                return "not serving"
            reply = await replica.stub.GetModelInfo(verify_pb2.GetModelInfoRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return plain_words(error.code(), error.details() or "").removeprefix(f"{replica.address}: ")
        except Exception as error:  # an answer that is no message must not end the watch over this replica
            return f"unreadable answer: {type(error).__name__}"
        replica.learn(reply)
        theirs = reply.model.tokenizer_fingerprint
        replica.incompatible = theirs != self._tokenizer_fingerprint
        if replica.incompatible:
            return (
                f"has another tokenizer than this router (fingerprint {theirs[:12] or 'missing'}, expected "
                f"{self._tokenizer_fingerprint[:12]}); give both tiers the same model.name"
            )
        return ""


def _fits(replica: Replica, identity: tuple[str, ...] | None = None, min_context: int = 0) -> bool:
    if not replica.usable or replica.facts is None or replica.facts.info.max_context < min_context:
        return False
    return identity is None or replica.facts.identity == identity
