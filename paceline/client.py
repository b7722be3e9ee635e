"""A small typed client of the router, for asyncio programs: no torch, no Ray, starts in a moment.

    async with Client("127.0.0.1:7440") as client:
        async for event in client.generate(generate_request(messages=[("user", "Hello")])):
            if isinstance(event, Chunk):
                print(event.text, end="", flush=True)

Every failure is one of ``paceline.errors``.
"""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline import codec
from paceline.address import address_problem
from paceline.errors import (
    EngineError,
    FieldViolation,
    IncompatiblePeerError,
    InvalidRequestError,
    PacelineError,
    PeerLostError,
)
from paceline.serving.channel import error_from_rpc, open_channel
from paceline.serving.status import DETAILS_KEY
from paceline.types import (
    FinishReason,
    Law,
    Mode,
    ModelInfo,
    Plan,
    RoundRecord,
    SpeculativeStats,
    Timings,
    Usage,
)
from paceline.v1 import common_pb2, router_pb2, router_pb2_grpc

_UINT32, _UINT64, _INT32 = range(2**32), range(2**64), range(-(2**31), 2**31)
_OTHER_TIERS = {"paceline.v1.VerifyService": "verify", "paceline.v1.DraftService": "draft"}
_LOOK_TIMEOUT_S = 2.0

_MODES = {Mode.PLAIN: common_pb2.DECODING_MODE_PLAIN, Mode.SPECULATIVE: common_pb2.DECODING_MODE_SPECULATIVE}


@dataclass(frozen=True, slots=True)
class Decision:
    """How a plan came about. ``arm``: auto, holdout, off, probe, ineligible, asked or pinned."""

    arm: str = ""
    task_origin: str = ""
    task_confidence: float | None = None
    considered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request was taken; how it will be decoded, and why."""

    request_id: str
    task_type: str
    plan: Plan
    prompt_tokens: int
    seed: int
    trace_id: str
    decision: Decision = Decision()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some output. ``round`` is None for the token of the prefill; ``text`` may be empty."""

    text: str
    token_ids: tuple[int, ...]
    position: int
    round: int | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The request's one answer."""

    finish_reason: FinishReason
    matched_stop: str | None
    usage: Usage
    timings: Timings
    speculative: SpeculativeStats
    plan: Plan
    numerics: str
    resumed: int


Event = Started | Chunk | Finished


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """What the router remembers of a request: no prompt, no output text."""

    request_id: str
    trace_id: str
    task_type: str
    plan: Plan
    outcome: str
    usage: Usage
    timings: Timings
    speculative: SpeculativeStats
    rounds: tuple[RoundRecord, ...]
    rounds_elided: int
    decision: Decision = Decision()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter that can be asked for by name."""

    name: str
    version: str
    available: bool


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server serves and how it is set."""

    version: str
    model: ModelInfo
    drafters: tuple[Drafter, ...]
    task_types: tuple[str, ...]
    default_max_tokens: int
    running: int


def generate_request(
    *,
    text: str | None = None,
    messages: Sequence[tuple[str, str]] | None = None,
    token_ids: Sequence[int] | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    task_type: str = "",
    mode: Mode | None = None,
    drafter: str | None = None,
    k: int | None = None,
    law: Law | None = None,
    request_id: str = "",
    tenant: str = "",
    priority: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> router_pb2.GenerateRequest:
    """One request; give exactly one of ``text``, ``messages`` (role, content) and ``token_ids``.

    None leaves a choice to the server, ``mode`` too (automatic). Values are checked by the server, except integers
    and texts that the wire cannot carry: they raise InvalidRequestError here, which names them all.
    """
    wrong = [
        *_beyond("sampling.top_k", top_k, _UINT32),
        *(v for token_id in logit_bias or () for v in _beyond("sampling.logit_bias", token_id, _UINT32)),
        *_beyond("sampling.seed", seed, _UINT64),
        *_beyond("max_tokens", max_tokens, _UINT32),
        *(v for token_id in stop_token_ids for v in _beyond("stop_token_ids", token_id, _UINT32)),
        *(v for token_id in token_ids or () for v in _beyond("tokens.ids", token_id, _UINT32)),
        *_beyond("decoding.k", k, _UINT32),
        *_beyond("priority", priority, _INT32),
        *_no_text("text", text),
        *_no_text("chat.messages", *(part for turn in messages or () for part in turn)),
        *_no_text("stop", *stop),
        *_no_text("task_type", task_type),
        *_no_text("decoding.drafter", drafter),
        *_no_text("request_id", request_id),
        *_no_text("tenant", tenant),
        *_no_text("metadata", *(part for entry in (metadata or {}).items() for part in entry)),
    ]
    if wrong:
        raise InvalidRequestError(wrong)
    request = router_pb2.GenerateRequest(
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        task_type=task_type,
        request_id=request_id,
        tenant=tenant,
        priority=priority,
        metadata=metadata,
        sampling=common_pb2.SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            seed=seed,
        ),
    )
    if sum(form is not None for form in (text, messages, token_ids)) != 1:
        raise ValueError("give exactly one of text, messages and token_ids")
    if text is not None:
        request.text = text
    elif messages is not None:
        request.chat.SetInParent()
        for role, content in messages:
            request.chat.messages.add(role=role, content=content)
    elif token_ids is not None:
        request.tokens.ids.extend(token_ids)
        request.tokens.SetInParent()
    if mode is not None or drafter is not None or k is not None or law is not None:
        request.decoding.CopyFrom(
            router_pb2.DecodingOverride(
                mode=_MODES[mode] if mode else common_pb2.DECODING_MODE_UNSPECIFIED,
                drafter=drafter,
                k=k,
                law=codec.law_to_pb(law) if law else common_pb2.ACCEPTANCE_LAW_UNSPECIFIED,
            )
        )
    return request


def _no_text(field: str, *values: str | None) -> Iterator[FieldViolation]:
    """A command line's bytes that are no UTF-8 are lone surrogates in its texts."""
    for value in values:
        try:
            (value or "").encode()
        except UnicodeEncodeError as error:
            yield FieldViolation(field, f"is no Unicode text: {ascii(value)[1:-1][:40]} ({error.reason})")
            return


def _beyond(field: str, value: int | None, carried: range) -> Iterator[FieldViolation]:
    if value is not None and value not in carried:
        yield FieldViolation(field, f"{value}; expected {carried[0]} to {carried[-1]}")


class Client:
    """One channel to a router. Use it as an async context manager, within one event loop."""

    def __init__(self, address: str) -> None:
        """Raises InvalidRequestError where ``address`` is no host:port."""
        if problem := address_problem(address):
            raise InvalidRequestError.single("address", f"{address!r}; {problem}")
        self.address = address
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self.address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def generate(
        self,
        request: router_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[Event, None]:
        """The events of one request: one Started, Chunks, one Finished. Closing the iterator cancels the request."""
        call = self._stub.Generate(request, timeout=timeout_s, metadata=tuple(metadata))
        begun = finished = False
        try:
            async for message in call:
                begun = True
                event = _event(message)
                if event is not None:
                    finished = finished or isinstance(event, Finished)
                    yield event
        except grpc.aio.AioRpcError as error:
            raise await self._meaning(error, begun=begun) from error
        finally:
            call.cancel()  # does nothing once the call is over
        if not finished:
            raise EngineError("the stream ended without an answer")

    async def server_info(self, *, timeout_s: float | None = 10.0) -> ServerInfo:
        """What the server serves."""
        try:
            reply = await self._stub.GetServerInfo(router_pb2.GetServerInfoRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise await self._meaning(error) from error
        return ServerInfo(
            reply.version,
            codec.model_info_from_pb(reply.model),
            tuple(Drafter(d.name, d.version, d.available) for d in reply.drafters),
            tuple(reply.task_types),
            reply.default_max_tokens,
            reply.running,
        )

    async def list_requests(
        self, *, request_id: str = "", limit: int = 0, timeout_s: float | None = 10.0
    ) -> tuple[RequestSummary, ...]:
        """The last requests, newest first."""
        request = router_pb2.ListRequestsRequest(request_id=request_id, limit=limit)
        try:
            reply = await self._stub.ListRequests(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise await self._meaning(error) from error
        return tuple(_summary(message) for message in reply.requests)

    async def policy(
        self, *, audit_limit: int = 0, timeout_s: float | None = 10.0
    ) -> router_pb2.GetPolicyResponse:
        """What the router decides by: rules, guards, holdout, audit."""
        try:
            return await self._stub.GetPolicy(
                router_pb2.GetPolicyRequest(audit_limit=audit_limit), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise await self._meaning(error) from error

    async def set_policy_rule(
        self, rule: router_pb2.PolicyRule, *, timeout_s: float | None = 10.0
    ) -> tuple[router_pb2.PolicyRule, ...]:
        """Adds an operator's rule, or replaces the one of its scope; the rules in force."""
        try:
            reply = await self._stub.SetPolicyRule(
                router_pb2.SetPolicyRuleRequest(rule=rule), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise await self._meaning(error) from error
        return tuple(reply.rules)

    async def remove_policy_rule(
        self, task: str = "", tenant: str = "", drafter: str = "", *, timeout_s: float | None = 10.0
    ) -> bool:
        """Takes the rule of exactly this scope away; whether there was one."""
        request = router_pb2.RemovePolicyRuleRequest(task=task, tenant=tenant, drafter=drafter)
        try:
            return (await self._stub.RemovePolicyRule(request, timeout=timeout_s)).removed
        except grpc.aio.AioRpcError as error:
            raise await self._meaning(error) from error

    async def rollout(self, *, timeout_s: float | None = 10.0) -> router_pb2.GetRolloutResponse:
        """How far speculation is rolled out, and what moved."""
        try:
            return await self._stub.GetRollout(router_pb2.GetRolloutRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise await self._meaning(error) from error

    async def set_rollout(
        self, orders: Sequence[router_pb2.RolloutOrder], *, timeout_s: float | None = 10.0
    ) -> None:
        """Says what a check found or an operator wants; it is carried out within seconds."""
        try:
            await self._stub.SetRollout(router_pb2.SetRolloutRequest(orders=orders), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise await self._meaning(error) from error

    async def _meaning(self, error: grpc.aio.AioRpcError, *, begun: bool = False) -> PacelineError:
        """A failed call in our own terms; of a peer that is not the router or is gone, what a person should know."""
        meant = error_from_rpc(error)
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            tier = await self._other_tier()
            if tier:
                return IncompatiblePeerError(f"{self.address} is the {tier} tier; requests go to the router")
            return IncompatiblePeerError(f"{self.address} is not a Paceline router: it has no such call")
        if isinstance(meant, PeerLostError) and not _said_by_us(error):
            words = str(meant).removeprefix(f"{self.address}: ")
            if begun:
                words = f"the stream ended half-way, {words}; what has come so far stands"
            return PeerLostError(f"{self.address}: {words}", meant.retry_after_s)
        return meant

    async def _other_tier(self) -> str:
        """Which tier answers at the address, if not the router: its health service knows its own name only."""
        if self._channel is None:
            return ""
        stub = health_pb2_grpc.HealthStub(self._channel)
        for service, tier in _OTHER_TIERS.items():
            try:
                await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_LOOK_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                continue
            return tier
        return ""

    @property
    def _stub(self) -> "router_pb2_grpc.RouterServiceAsyncStub":
        if self._channel is None:
            raise RuntimeError("the client is closed: use `async with Client(address) as client`")
        return router_pb2_grpc.RouterServiceStub(self._channel)


def _said_by_us(error: grpc.aio.AioRpcError) -> bool:
    """Whether a Paceline server answered so, rather than gRPC for one that is gone."""
    return any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def _event(message: router_pb2.GenerateResponse) -> Event | None:
    """None for an event of a later protocol."""
    match message.WhichOneof("event"):
        case "started":
            started = message.started
            return Started(
                started.request_id,
                started.task_type,
                codec.plan_from_pb(started.plan),
                started.prompt_tokens,
                started.seed,
                started.trace_id,
                _decision(started.decision),
            )
        case "chunk":
            chunk = message.chunk
            return Chunk(
                chunk.text,
                tuple(chunk.token_ids),
                chunk.position,
                chunk.round if chunk.HasField("round") else None,
            )
        case "finished":
            finished = message.finished
            return Finished(
                codec.finish_from_pb(finished.finish_reason),
                finished.matched_stop if finished.HasField("matched_stop") else None,
                _usage(finished.usage),
                codec.timings_from_pb(finished.timings),
                codec.stats_from_pb(finished.speculative),
                codec.plan_from_pb(finished.plan),
                finished.numerics,
                finished.resumed,
            )
        case _:
            return None


def _usage(message: router_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_prompt_tokens)


def _summary(message: router_pb2.RequestSummary) -> RequestSummary:
    return RequestSummary(
        message.request_id,
        message.trace_id,
        message.task_type,
        codec.plan_from_pb(message.plan),
        message.outcome,
        _usage(message.usage),
        codec.timings_from_pb(message.timings),
        codec.stats_from_pb(message.speculative),
        tuple(codec.round_from_pb(record) for record in message.rounds),
        message.rounds_elided,
        _decision(message.decision),
        message.tenant,
    )


def _decision(message: router_pb2.Decision) -> Decision:
    return Decision(
        message.arm,
        message.task_origin,
        message.task_confidence if message.HasField("task_confidence") else None,
        tuple(message.considered),
    )
