"""protobuf <-> types: nothing is lost, and no field of a message is forgotten."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import codec, types
from paceline.errors import IncompatiblePeerError
from paceline.v1 import common_pb2 as pb

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
number = st.floats(allow_nan=False)
text = st.text(max_size=20)

sampling_params = st.builds(
    types.SamplingParams,
    temperature=number,
    top_k=uint32,
    top_p=number,
    min_p=number,
    repetition_penalty=number,
    presence_penalty=number,
    frequency_penalty=number,
    logit_bias=st.dictionaries(uint32, number, max_size=5),
    seed=uint64,
)
plans = st.one_of(
    st.builds(types.Plan.plain, text),
    st.builds(
        types.Plan.speculative,
        text,
        uint32,
        text,
        st.sampled_from(types.Law),
        k_fixed=st.booleans(),
        prior=st.none()
        | st.builds(types.AcceptancePrior, number, number, st.lists(number, max_size=4).map(tuple)),
    ),
)
rounds = st.builds(
    types.RoundRecord,
    **dict.fromkeys(
        (
            "index",
            "base_len",
            "drafted",
            "accepted",
            "ignored",
            "committed",
            "batch_sequences",
            "batch_rows",
            "asked",
            "step",
            "ahead_level",
        ),
        uint32,
    ),
    **dict.fromkeys(
        (
            "draft_s",
            "network_s",
            "wait_s",
            "verify_s",
            "forward_s",
            "accept_s",
            "expected_tokens",
            "next_worth_s",
            "next_cost_s",
            "hidden_draft_s",
        ),
        number,
    ),
    depth_reason=st.sampled_from(types.DepthReason),
    outcome=st.sampled_from(types.ProposalOutcome),
    drafter=text,
)
timings = st.builds(types.Timings, **{f.name: st.floats(0, 1e6) for f in dataclasses.fields(types.Timings)})
infos = st.builds(
    types.ModelInfo,
    **{f.name: uint32 if f.type is int else text for f in dataclasses.fields(types.ModelInfo)},
)


@st.composite
def statistics(draw):
    """Sums as ``SpeculativeStats.plus`` makes them."""
    stats = types.SpeculativeStats()
    for _ in range(draw(st.integers(0, 12))):
        drafted = draw(st.integers(0, 8))
        accepted = draw(st.integers(0, drafted))
        ignored = draw(st.integers(0, drafted - accepted))
        outcome = draw(st.sampled_from(types.ProposalOutcome))
        parts = dict.fromkeys(("draft_s", "network_s", "wait_s", "verify_s", "forward_s", "accept_s"), 0.0)
        stats = stats.plus(
            types.RoundRecord(0, 0, drafted, accepted, ignored, accepted + 1, outcome, "", 1, 1, **parts)
        )
    return stats


def over_the_wire(message):
    """The message as its reader gets it."""
    return type(message).FromString(message.SerializeToString())


@given(sampling_params)
def test_sampling_parameters_round_trip(params):
    """Every field is set on the wire, zeros and defaults too, and comes back bit by bit."""
    message = over_the_wire(codec.sampling_to_pb(params))
    assert all(
        message.HasField(field.name) for field in message.DESCRIPTOR.fields if field.name != "logit_bias"
    )
    assert codec.sampling_from_pb(message) == params


@pytest.mark.parametrize(
    "field", [f.name for f in pb.SamplingParams.DESCRIPTOR.fields if f.name != "logit_bias"]
)
def test_an_absent_sampling_field_is_the_default_and_a_zero_is_a_zero(field):
    """``optional`` is honoured: not said and said to be 0 are two things."""
    assert codec.sampling_from_pb(pb.SamplingParams()) == types.SamplingParams()
    zero = codec.sampling_from_pb(pb.SamplingParams(**{field: 0}))
    assert zero == dataclasses.replace(types.SamplingParams(), **{field: 0})


@given(plans)
def test_plans_round_trip(plan):
    """Plain and speculative plans come back as they were."""
    assert codec.plan_from_pb(over_the_wire(codec.plan_to_pb(plan))) == plan


def test_a_plan_that_does_not_say_is_plain():
    """An unspecified or unknown mode decodes plainly; a missing law is the coupled one."""
    assert codec.plan_from_pb(pb.Plan(drafter="x", k_max=3)).mode is types.Mode.PLAIN
    assert codec.plan_from_pb(pb.Plan(mode=99, drafter="x", k_max=3)).mode is types.Mode.PLAIN  # type: ignore[arg-type]
    speculative = codec.plan_from_pb(pb.Plan(mode=pb.DECODING_MODE_SPECULATIVE, drafter="x", k_max=3))
    assert speculative.law is types.Law.COUPLED


@given(rounds)
def test_rounds_round_trip(record):
    """As it is."""
    assert codec.round_from_pb(over_the_wire(codec.round_to_pb(record))) == record


@given(statistics())
def test_statistics_round_trip(stats):
    """Sums come back; ratios without data are absent on the wire, never NaN or 0."""
    message = over_the_wire(codec.stats_to_pb(stats))
    assert message.HasField("mean_acceptance_length") == (stats.num_spec_steps > 0)
    assert message.HasField("draft_acceptance_rate") == (stats.num_draft_tokens > 0)
    assert codec.stats_from_pb(message) == stats
    if stats.num_draft_tokens:
        assert message.draft_acceptance_rate == stats.draft_acceptance_rate


@given(timings)
def test_timings_round_trip(value):
    """Overhead is on the wire and follows from the rest when read."""
    message = over_the_wire(codec.timings_to_pb(value))
    assert message.overhead_s == value.overhead_s
    assert codec.timings_from_pb(message) == value


@given(infos)
def test_model_info_round_trips(info):
    """As it is."""
    assert codec.model_info_from_pb(over_the_wire(codec.model_info_to_pb(info))) == info


@pytest.mark.parametrize("reason", types.FinishReason)
def test_finish_reasons_round_trip(reason):
    """As it is; one that this version does not know is the peer's fault, said in an error of ours."""
    assert codec.finish_from_pb(codec.finish_to_pb(reason)) is reason
    with pytest.raises(IncompatiblePeerError, match="reason 0"):
        codec.finish_from_pb(pb.FINISH_REASON_UNSPECIFIED)


@pytest.mark.parametrize(
    ("enum", "table", "meaningless"),
    [
        (pb.DecodingMode, codec._MODE, {"DECODING_MODE_UNSPECIFIED"}),
        (pb.AcceptanceLaw, codec._LAW, {"ACCEPTANCE_LAW_UNSPECIFIED"}),
        (pb.FinishReason, codec._FINISH, {"FINISH_REASON_UNSPECIFIED"}),
        (pb.ProposalOutcome, codec._OUTCOME, {"PROPOSAL_OUTCOME_UNSPECIFIED"}),
    ],
)
def test_every_enum_value_has_its_counterpart(enum, table, meaningless):
    """The tables cover the protocol's enums and ours, one to one, under the same names."""
    names = {enum.Name(value).rpartition("_")[2].lower(): value for value in table.values()}
    assert {key.value.rpartition("_")[2] for key in table} == set(names)
    assert {enum.Name(value) for value in table.values()} == set(enum.keys()) - meaningless
    assert len(set(table.values())) == len(table)
    (ours,) = {type(key) for key in table}
    assert set(table) == set(ours)


@pytest.mark.parametrize(
    ("message", "covered"),
    [
        (pb.SamplingParams, {*codec._SAMPLING_FIELDS, "logit_bias"}),
        (pb.Plan, {"mode", "drafter", "k_max", "law", "reason", "k_fixed", "prior", "drafter_version"}),
        (pb.RoundRecord, set(types.RoundRecord._fields)),
        (pb.SpeculativeStats, {*codec._STATS_FIELDS, "mean_acceptance_length", "draft_acceptance_rate"}),
        (pb.Timings, {*codec._TIMING_FIELDS, "overhead_s"}),
        (pb.ModelInfo, set(codec._MODEL_FIELDS)),
    ],
    ids=lambda value: getattr(getattr(value, "DESCRIPTOR", None), "name", ""),
)
def test_the_codec_covers_every_field(message, covered):
    """A field added to the protocol and forgotten in the codec fails here."""
    assert covered == {field.name for field in message.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("ours", "covered", "derived"),
    [
        (types.SamplingParams, {*codec._SAMPLING_FIELDS, "logit_bias"}, {"prepared"}),
        (
            types.Plan,
            {"mode", "drafter", "k_max", "law", "reason", "k_fixed", "prior", "drafter_version"},
            set(),
        ),
        (types.SpeculativeStats, {*codec._STATS_FIELDS}, {"num_spec_committed"}),
        (types.Timings, {*codec._TIMING_FIELDS}, set()),
        (types.ModelInfo, set(codec._MODEL_FIELDS), set()),
    ],
)
def test_the_codec_covers_every_value(ours, covered, derived):
    """A field added to a value and forgotten in the codec fails here; ``derived`` travels as a ratio, or is made anew."""
    assert covered | derived == {field.name for field in dataclasses.fields(ours)}
