"""From a request to what will be decoded and how: validated, tokenised, classified, planned."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline import codec
from paceline.config import RouterConfig
from paceline.errors import FieldViolation, InvalidRequestError
from paceline.telemetry.spans import Telemetry
from paceline.tokenizer import Tokenizer
from paceline.types import Law, Mode, Plan, SamplingParams
from paceline.v1 import common_pb2, router_pb2
from router.ledger.memory import Memory
from router.plan import DecodingWish
from router.policy import Ask, Decision, Policy
from router.recent import RecentRequests
from router.replicas import ModelFacts, Replicas
from router.task_rules import NamedTask, TaskNamer
from router.validate import budget, concerns_input, field_violations

if TYPE_CHECKING:
    from router.meter import RequestMeter

_LONG_INPUT_CHARACTERS = 2_048
"""Inputs above this are tokenised beside the event loop: digits and rare signs take two microseconds each."""
_MESSAGE_CHARACTERS = 64
"""What a message costs beside its text: the template goes through each."""
_CLASSIFIED_TOKENS = 512
"""Of a prompt given as ids, so many at either end are read to classify it."""

_MODES = {
    common_pb2.DECODING_MODE_UNSPECIFIED: None,
    common_pb2.DECODING_MODE_PLAIN: Mode.PLAIN,
    common_pb2.DECODING_MODE_SPECULATIVE: Mode.SPECULATIVE,
}


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What all requests share."""

    config: RouterConfig
    tokenizer: Tokenizer
    replicas: Replicas
    namer: TaskNamer
    policy: Policy
    memory: Memory
    recent: RecentRequests
    telemetry: Telemetry
    meter: "RequestMeter | None" = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A valid request: what will be decoded, and how."""

    request_id: str
    tenant: str
    priority: int
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: frozenset[int]
    task: NamedTask
    decision: Decision
    version: str
    """Of the drafter, behind it the target's: what the ledger keeps apart."""
    tenant_group: str
    facts: ModelFacts
    chat: bool

    @property
    def task_type(self) -> str:
        """As given, ruled or classified."""
        return self.task.name

    @property
    def plan(self) -> Plan:
        """How it is decoded."""
        return self.decision.plan


async def accept(parts: RouterParts, request: router_pb2.GenerateRequest, facts: ModelFacts) -> Accepted:
    """The request as it will be decoded. Raises InvalidRequestError naming all that is wrong with it."""
    prompt_ids, max_tokens = await _validated(parts, request, facts)
    task = parts.namer.name(
        request.task_type,
        request.tenant,
        request.metadata,
        lambda: _words(parts.tokenizer, request, prompt_ids),
    )
    request_id = request.request_id or secrets.token_hex(8)
    sampling = codec.sampling_from_pb(request.sampling)
    if not request.sampling.HasField("seed"):
        sampling = replace(sampling, seed=secrets.randbits(64))
    stop_token_ids = frozenset(request.stop_token_ids)
    target = facts.info.fingerprint[:12]
    versions = {name: f"{drafter.version}@{target}" for name, drafter in facts.drafters.items()}
    decision = parts.policy.decide(
        Ask(
            request_id=request_id,
            task=task.name,
            tenant=request.tenant,
            temperature=sampling.temperature,
            prompt_tokens=len(prompt_ids),
            max_tokens=max_tokens,
            wish=_wish(request.decoding),
            drafters=versions,
            available={name: drafter.available for name, drafter in facts.drafters.items()},
            has_room=facts.has_room,
        )
    )
    decision = replace(decision, plan=_lawful(decision.plan, sampling))
    return Accepted(
        request_id=request_id,
        tenant=request.tenant,
        priority=request.priority,
        prompt_ids=prompt_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids if request.ignore_eos else stop_token_ids.union(facts.eos_token_ids),
        task=task,
        decision=decision,
        version=versions.get(decision.plan.drafter, f"@{target}"),
        tenant_group=parts.config.ledger.tenant_groups.get(request.tenant, ""),
        facts=facts,
        chat=request.WhichOneof("input") == "chat",
    )


def _lawful(plan: Plan, sampling: SamplingParams) -> Plan:
    """The plan with the law that will be used: without a draw all laws are one."""
    if plan.law is None or not plan.law.sampled or not sampling.greedy:
        return plan
    return replace(
        plan, law=Law.COUPLED, reason=f"{plan.reason}; at temperature 0 every law is the coupled one"
    )


async def _validated(
    parts: RouterParts, request: router_pb2.GenerateRequest, facts: ModelFacts
) -> tuple[list[int], int]:
    """Prompt ids and max_tokens."""
    violations = field_violations(
        request,
        vocab_size=facts.info.vocab_size,
        max_context=facts.info.max_context,
        longest_token_bytes=parts.tokenizer.longest_token_bytes,
        drafters=facts.drafters,
        task_types=parts.namer.types,
    )
    prompt_ids: list[int] = []
    max_tokens = 0
    if not any(map(concerns_input, violations)):
        try:
            prompt_ids = await _tokenise(parts.tokenizer, request)
            max_tokens, wrong = budget(
                request,
                len(prompt_ids),
                max_context=facts.info.max_context,
                default_max_tokens=parts.config.default_max_tokens,
            )
            violations += wrong
        except InvalidRequestError as error:
            violations += error.violations
    if violations:
        raise InvalidRequestError(violations)
    return prompt_ids, max_tokens


async def _tokenise(tokenizer: Tokenizer, request: router_pb2.GenerateRequest) -> list[int]:
    """At least one id. Raises InvalidRequestError, about the template too."""
    match request.WhichOneof("input"):
        case "tokens":
            return list(request.tokens.ids)
        case "text":
            ids = await _aside(len(request.text), lambda: tokenizer.encode(request.text))
        case _:
            messages = [(message.role, message.content) for message in request.chat.messages]
            size = sum(_MESSAGE_CHARACTERS + len(content) for _, content in messages)
            try:
                ids = await _aside(size, lambda: tokenizer.encode_chat(messages))
            except InvalidRequestError as error:
                # The tokenizer does not know the request's shape.
                raise InvalidRequestError(
                    [FieldViolation("chat.messages", v.description) for v in error.violations]
                ) from error
    if not ids:
        raise InvalidRequestError.single("text", "holds no token; give something that the tokenizer keeps")
    return ids


async def _aside(num_characters: int, encode: Callable[[], list[int]]) -> list[int]:
    """``encode()``, in a thread where it takes long (the tokenizer lets go of the interpreter)."""
    return await asyncio.to_thread(encode) if num_characters > _LONG_INPUT_CHARACTERS else encode()


def _words(tokenizer: Tokenizer, request: router_pb2.GenerateRequest, prompt_ids: Sequence[int]) -> str:
    """What the type of task is read from."""
    match request.WhichOneof("input"):
        case "text":
            return request.text
        case "chat":
            # The last turn says what is wanted now; the system's turn may hold the standing order.
            told = [m.content for m in request.chat.messages if m.role == "system"][:1]
            asked = [m.content for m in request.chat.messages if m.role == "user"][-1:]
            return "\n".join(told + asked)
        case _:
            ends = [*prompt_ids[:_CLASSIFIED_TOKENS], *prompt_ids[_CLASSIFIED_TOKENS:][-_CLASSIFIED_TOKENS:]]
            return tokenizer.decode(ends)


def _wish(decoding: router_pb2.DecodingOverride) -> DecodingWish:
    return DecodingWish(
        _MODES[decoding.mode],
        decoding.drafter if decoding.HasField("drafter") else None,
        decoding.k if decoding.HasField("k") else None,
        codec.law_from_pb(decoding.law) if decoding.law else None,
    )
