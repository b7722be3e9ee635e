"""What the router's spans say of a request. No prompt, no output text."""

from dataclasses import dataclass

from paceline.telemetry import names
from paceline.telemetry.spans import AttributeValue
from paceline.types import Plan, SpeculativeStats, Timings
from router.accept import Accepted


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: finish reason or status code, and the same again in ``error`` if it failed."""

    word: str
    error: str | None = None

    @classmethod
    def failed(cls, code: str) -> "Outcome":
        """It ended in this status."""
        return cls(code, code)


def plan_attributes(accepted: Accepted) -> dict[str, AttributeValue]:
    """Of the ``plan`` span."""
    attributes: dict[str, AttributeValue] = {
        names.TASK_TYPE: accepted.task_type,
        names.TASK_ORIGIN: accepted.task.origin,
        names.PLAN_ARM: accepted.decision.arm.value,
        names.PLAN_CONSIDERED: list(accepted.decision.considered),
        **_plan(accepted.plan),
    }
    if accepted.task.confidence is not None:
        attributes[names.TASK_CONFIDENCE] = accepted.task.confidence
    return attributes


def generate_attributes(
    accepted: Accepted | None,
    outcome: Outcome,
    *,
    completion_tokens: int,
    timings: Timings,
    stats: SpeculativeStats,
    resumed: int,
) -> dict[str, AttributeValue]:
    """Of the ``Generate`` span; a request that was never accepted has only its error."""
    attributes: dict[str, AttributeValue] = {names.GEN_AI_PROVIDER_NAME: names.PROVIDER}
    if outcome.error is not None:
        attributes[names.ERROR_TYPE] = outcome.error
    if accepted is None:
        return attributes
    attributes |= _request(accepted) | _plan(accepted.plan) | _times(timings) | _speculation(stats)
    attributes |= {
        names.GEN_AI_USAGE_OUTPUT_TOKENS: completion_tokens,
        names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: timings.time_to_first_token_s,
        names.RESUMED: resumed,
    }
    if outcome.error is None:
        attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] = [outcome.word]
    return attributes


def _request(accepted: Accepted) -> dict[str, AttributeValue]:
    sampling, info = accepted.sampling, accepted.facts.info
    return {
        names.REQUEST_ID: accepted.request_id,
        names.GEN_AI_RESPONSE_ID: accepted.request_id,
        names.GEN_AI_OPERATION_NAME: "chat" if accepted.chat else "text_completion",
        names.GEN_AI_REQUEST_MODEL: info.name,
        names.GEN_AI_RESPONSE_MODEL: info.name,
        names.GEN_AI_REQUEST_MAX_TOKENS: accepted.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        names.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        # OTLP integers are signed: a larger seed is told in digits.
        names.GEN_AI_REQUEST_SEED: sampling.seed if sampling.seed < 2**63 else str(sampling.seed),
        names.GEN_AI_USAGE_INPUT_TOKENS: len(accepted.prompt_ids),
        names.TASK_TYPE: accepted.task_type,
        names.NUMERICS: info.numerics,
    }


def _plan(plan: Plan) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {names.PLAN_MODE: plan.mode.value, names.PLAN_REASON: plan.reason}
    if plan.law is not None:
        attributes |= {
            names.PLAN_DRAFTER: plan.drafter,
            names.PLAN_K_MAX: plan.k_max,
            names.PLAN_LAW: plan.law.value,
        }
    return attributes


def _times(timings: Timings) -> dict[str, AttributeValue]:
    return {
        names.QUEUE_S: timings.queue_s,
        names.PREFILL_S: timings.prefill_s,
        names.DECODE_S: timings.decode_s,
        names.DRAFT_S: timings.draft_s,
        names.NETWORK_S: timings.network_s,
        names.WAIT_S: timings.wait_s,
        names.VERIFY_S: timings.verify_s,
        names.OVERHEAD_S: timings.overhead_s,
    }


def _speculation(stats: SpeculativeStats) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.NUM_ROUNDS: stats.num_rounds,
        names.NUM_SPEC_STEPS: stats.num_spec_steps,
        names.NUM_DRAFT_TOKENS: stats.num_draft_tokens,
        names.NUM_ACCEPTED_DRAFT_TOKENS: stats.num_accepted_draft_tokens,
        names.NUM_IGNORED_DRAFT_TOKENS: stats.num_ignored_draft_tokens,
        names.NUM_LATE_ROUNDS: stats.num_late_rounds,
        names.NUM_UNAVAILABLE_ROUNDS: stats.num_unavailable_rounds,
        names.NUM_EMPTY_ROUNDS: stats.num_empty_rounds,
    }
    if stats.mean_acceptance_length is not None:
        attributes[names.MEAN_ACCEPTANCE_LENGTH] = stats.mean_acceptance_length
    if stats.draft_acceptance_rate is not None:
        attributes[names.DRAFT_ACCEPTANCE_RATE] = stats.draft_acceptance_rate
        attributes[names.ACCEPTANCE_HISTOGRAM] = list(stats.acceptance_histogram)
    return attributes
