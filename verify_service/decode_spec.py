"""A ``DecodeRequest`` as a value, and what is wrong with one."""

import math
from collections.abc import Iterator

from paceline import codec
from paceline.engine import Runner
from paceline.errors import FieldViolation, InvalidRequestError, PeerLostError
from paceline.ranges import MAX_K, sampling_violations
from paceline.telemetry.context import TraceContext
from paceline.types import AcceptancePrior, Mode
from paceline.v1 import verify_pb2
from verify_service.sequence import DecodeSpec


def decode_spec(
    request: verify_pb2.DecodeRequest,
    runner: Runner,
    trace: TraceContext | None,
    *,
    deadline: float = math.inf,
) -> DecodeSpec:
    """The request as a value. Raises InvalidRequestError: the router validates for people, this guards the engine; PeerLostError: for another model."""
    info = runner.info
    if request.identity and tuple(request.identity) != info.identity:
        # Started anew since the router asked: what another model would say is no continuation (I2).
        raise PeerLostError(f"this replica serves another model now: {', '.join(info.identity)}")
    violations = []
    known = len(request.prompt_ids) + len(request.committed_ids)
    if not request.prompt_ids:
        violations.append(FieldViolation("prompt_ids", "is empty; expected at least one token"))
    if known >= info.max_context:
        violations.append(
            FieldViolation("prompt_ids", f"{known} tokens leave no room in a context of {info.max_context}")
        )
    for field, ids in (("prompt_ids", request.prompt_ids), ("committed_ids", request.committed_ids)):
        if ids and max(ids) >= info.vocab_size:
            violations.append(FieldViolation(field, f"{max(ids)} is not below {info.vocab_size}"))
    if request.max_tokens <= len(request.committed_ids):
        violations.append(
            FieldViolation(
                "max_tokens",
                f"{request.max_tokens} leaves nothing to decode after {len(request.committed_ids)} committed tokens",
            )
        )
    if len(request.stop_token_ids) > info.vocab_size:
        violations.append(FieldViolation("stop_token_ids", f"{len(request.stop_token_ids)} ids"))
    violations += sampling_violations(request.sampling, info.vocab_size)
    plan = codec.plan_from_pb(request.plan)
    if plan.mode is Mode.SPECULATIVE and not 1 <= plan.k_max <= MAX_K:
        violations.append(FieldViolation("plan.k_max", f"{plan.k_max}; expected 1 to {MAX_K}"))
    if plan.prior is not None:
        violations += _wrong_prior(plan.prior)
    if violations:
        raise InvalidRequestError(violations)
    return DecodeSpec(
        request_id=request.request_id,
        prompt_ids=tuple(request.prompt_ids),
        committed_ids=tuple(request.committed_ids),
        sampling=codec.sampling_from_pb(request.sampling),
        max_tokens=request.max_tokens,
        stop_ids=frozenset(request.stop_token_ids),
        plan=plan,
        trace=trace,
        tenant=request.tenant,
        priority=request.priority,
        deadline=deadline,
    )


def _wrong_prior(prior: AcceptancePrior) -> Iterator[FieldViolation]:
    """What the controller could not calculate with; it goes on to the beliefs about other sequences of the drafter."""
    shares = [
        ("mean", prior.mean),
        *((f"by_position[{i}]", one) for i, one in enumerate(prior.by_position[:MAX_K])),
    ]
    for name, share in shares:
        if not 0.0 < share < 1.0:
            yield FieldViolation(f"plan.prior.{name}", f"{share}; expected a number in (0, 1)")
    if not 0.0 < prior.strength < math.inf:
        yield FieldViolation("plan.prior.strength", f"{prior.strength}; expected a number above 0")
    if len(prior.by_position) > MAX_K:
        yield FieldViolation(
            "plan.prior.by_position", f"{len(prior.by_position)} values; expected {MAX_K} at most"
        )
