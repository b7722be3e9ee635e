"""protobuf <-> types, nothing else: no validation, no defaults beyond those of the protocol."""

from dataclasses import replace
from operator import attrgetter

from paceline import types
from paceline.errors import IncompatiblePeerError
from paceline.v1 import common_pb2 as pb

_MODE = {types.Mode.PLAIN: pb.DECODING_MODE_PLAIN, types.Mode.SPECULATIVE: pb.DECODING_MODE_SPECULATIVE}
_LAW = {
    types.Law.COUPLED: pb.ACCEPTANCE_LAW_COUPLED,
    types.Law.RATIO: pb.ACCEPTANCE_LAW_RATIO,
    types.Law.BLOCK: pb.ACCEPTANCE_LAW_BLOCK,
}
_FINISH = {
    types.FinishReason.STOP: pb.FINISH_REASON_STOP,
    types.FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_OUTCOME = {
    types.ProposalOutcome.NONE: pb.PROPOSAL_OUTCOME_NONE,
    types.ProposalOutcome.USED: pb.PROPOSAL_OUTCOME_USED,
    types.ProposalOutcome.EMPTY: pb.PROPOSAL_OUTCOME_EMPTY,
    types.ProposalOutcome.LATE: pb.PROPOSAL_OUTCOME_LATE,
    types.ProposalOutcome.UNAVAILABLE: pb.PROPOSAL_OUTCOME_UNAVAILABLE,
    types.ProposalOutcome.CUT: pb.PROPOSAL_OUTCOME_CUT,
}
_DEPTH = {
    types.DepthReason.UNSAID: pb.DEPTH_REASON_UNSPECIFIED,
    types.DepthReason.PLAIN: pb.DEPTH_REASON_PLAIN,
    types.DepthReason.FIXED: pb.DEPTH_REASON_FIXED,
    types.DepthReason.ALL: pb.DEPTH_REASON_ALL,
    types.DepthReason.COST: pb.DEPTH_REASON_COST,
    types.DepthReason.TAIL: pb.DEPTH_REASON_TAIL,
    types.DepthReason.ASKING: pb.DEPTH_REASON_ASKING,
    types.DepthReason.SUSPENDED: pb.DEPTH_REASON_SUSPENDED,
    types.DepthReason.DWELL: pb.DEPTH_REASON_DWELL,
    types.DepthReason.ROOM: pb.DEPTH_REASON_ROOM,
    types.DepthReason.LOOKED_UP: pb.DEPTH_REASON_LOOKED_UP,
    types.DepthReason.NOT_FOUND: pb.DEPTH_REASON_NOT_FOUND,
}
_DEPTH_BACK = {value: key for key, value in _DEPTH.items()}
_MODE_BACK = {value: key for key, value in _MODE.items()}
_LAW_BACK = {value: key for key, value in _LAW.items()}
_FINISH_BACK = {value: key for key, value in _FINISH.items()}
_OUTCOME_BACK = {value: key for key, value in _OUTCOME.items()}

_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


def sampling_to_pb(params: types.SamplingParams) -> pb.SamplingParams:
    """All fields set."""
    return pb.SamplingParams(
        **{name: getattr(params, name) for name in _SAMPLING_FIELDS}, logit_bias=dict(params.logit_bias)
    )


def sampling_from_pb(message: pb.SamplingParams) -> types.SamplingParams:
    """Absent fields take the defaults of ``types.SamplingParams``."""
    given = {name: getattr(message, name) for name in _SAMPLING_FIELDS if message.HasField(name)}  # type: ignore[arg-type]  # names checked by a test
    return types.SamplingParams(**given, logit_bias=dict(message.logit_bias))


def law_to_pb(law: types.Law) -> "pb.AcceptanceLaw.ValueType":
    """As it is."""
    return _LAW[law]


def law_from_pb(value: "pb.AcceptanceLaw.ValueType") -> types.Law:
    """Unspecified, and one that this version does not know: coupled, which is exact with any drafter."""
    return _LAW_BACK.get(value, types.Law.COUPLED)


def plan_to_pb(plan: types.Plan) -> pb.Plan:
    """As it is."""
    return pb.Plan(
        mode=_MODE[plan.mode],
        drafter=plan.drafter,
        k_max=plan.k_max,
        law=_LAW[plan.law] if plan.law else pb.ACCEPTANCE_LAW_UNSPECIFIED,
        reason=plan.reason,
        k_fixed=plan.k_fixed,
        drafter_version=plan.drafter_version,
        prior=pb.AcceptancePrior(
            mean=plan.prior.mean, strength=plan.prior.strength, by_position=plan.prior.by_position
        )
        if plan.prior
        else None,
    )


def plan_from_pb(message: pb.Plan) -> types.Plan:
    """An unspecified mode is plain; a speculative plan without a law is coupled."""
    if _MODE_BACK.get(message.mode, types.Mode.PLAIN) is types.Mode.PLAIN:
        return types.Plan.plain(message.reason)
    law = law_from_pb(message.law)
    prior = None
    if message.HasField("prior"):
        given = message.prior
        prior = types.AcceptancePrior(given.mean, given.strength, tuple(given.by_position))
    plan = types.Plan.speculative(
        message.drafter, message.k_max, message.reason, law, k_fixed=message.k_fixed, prior=prior
    )
    return replace(plan, drafter_version=message.drafter_version)


def finish_to_pb(reason: types.FinishReason) -> pb.FinishReason.ValueType:
    """As it is."""
    return _FINISH[reason]


def finish_from_pb(value: pb.FinishReason.ValueType) -> types.FinishReason:
    """Raises IncompatiblePeerError for a value that this version does not know."""
    if value not in _FINISH_BACK:
        raise IncompatiblePeerError(
            f"the peer ended a request for reason {value}, which this version does not know"
        )
    return _FINISH_BACK[value]


_ROUND_FIELDS = types.RoundRecord._fields
"""In the protocol's message they have the same names."""
_round_fields_of = attrgetter(*_ROUND_FIELDS)
_OUTCOME_AT, _DEPTH_AT = _ROUND_FIELDS.index("outcome"), _ROUND_FIELDS.index("depth_reason")


def round_to_pb(record: types.RoundRecord) -> pb.RoundRecord:
    """As it is."""
    values = record._asdict()
    values["outcome"] = _OUTCOME[record.outcome]
    values["depth_reason"] = _DEPTH[record.depth_reason]
    return pb.RoundRecord(**values)


def round_from_pb(message: pb.RoundRecord) -> types.RoundRecord:
    """As it is."""
    values = list(_round_fields_of(message))
    values[_OUTCOME_AT] = _OUTCOME_BACK.get(message.outcome, types.ProposalOutcome.NONE)
    values[_DEPTH_AT] = _DEPTH_BACK.get(message.depth_reason, types.DepthReason.UNSAID)
    return types.RoundRecord(*values)


_STATS_FIELDS = (
    "num_rounds",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_ignored_draft_tokens",
    "acceptance_histogram",
    "num_late_rounds",
    "num_unavailable_rounds",
    "num_empty_rounds",
)


def stats_to_pb(stats: types.SpeculativeStats) -> pb.SpeculativeStats:
    """Ratios without data stay absent."""
    return pb.SpeculativeStats(
        **{name: getattr(stats, name) for name in _STATS_FIELDS},
        mean_acceptance_length=stats.mean_acceptance_length,
        draft_acceptance_rate=stats.draft_acceptance_rate,
    )


def stats_from_pb(message: pb.SpeculativeStats) -> types.SpeculativeStats:
    """As it is; the committed tokens of rounds with a block follow from their mean."""
    given = {name: getattr(message, name) for name in _STATS_FIELDS}
    given["acceptance_histogram"] = tuple(message.acceptance_histogram)
    committed = round(message.mean_acceptance_length * message.num_spec_steps)
    return types.SpeculativeStats(**given, num_spec_committed=committed)


_TIMING_FIELDS = (
    "queue_s",
    "prefill_s",
    "decode_s",
    "draft_s",
    "network_s",
    "wait_s",
    "verify_s",
    "time_to_first_token_s",
    "total_s",
)


def timings_to_pb(timings: types.Timings) -> pb.Timings:
    """As it is, overhead included."""
    return pb.Timings(
        **{name: getattr(timings, name) for name in _TIMING_FIELDS}, overhead_s=timings.overhead_s
    )


def timings_from_pb(message: pb.Timings) -> types.Timings:
    """As it is; overhead follows from the rest."""
    return types.Timings(**{name: getattr(message, name) for name in _TIMING_FIELDS})


_MODEL_FIELDS = (
    "name",
    "fingerprint",
    "tokenizer_fingerprint",
    "vocab_size",
    "max_context",
    "dtype",
    "device",
    "runner",
    "runner_reason",
    "numerics",
)


def model_info_to_pb(info: types.ModelInfo) -> pb.ModelInfo:
    """As it is."""
    return pb.ModelInfo(**{name: getattr(info, name) for name in _MODEL_FIELDS})


def model_info_from_pb(message: pb.ModelInfo) -> types.ModelInfo:
    """As it is."""
    return types.ModelInfo(**{name: getattr(message, name) for name in _MODEL_FIELDS})
