"""The hand-written encoding of spans against the SDK's."""

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode

from paceline.telemetry.wire import encode

RESOURCE = Resource.create({"service.name": "a", "service.instance.id": "b"})
SCOPE = InstrumentationScope("paceline", "1.0")

texts = st.text(st.characters(codec="utf-8"), max_size=200)
integers = st.integers(-(2**63), 2**63 - 1)
scalars = texts | st.booleans() | integers | st.floats(allow_nan=False)
values = (
    scalars
    | st.lists(texts, max_size=4)
    | st.lists(integers, max_size=4)
    | st.lists(st.booleans(), max_size=4)
)
ids = st.integers(1, 2**64 - 1)


@st.composite
def spans(draw: st.DrawFn) -> ReadableSpan:
    trace_id = draw(st.integers(1, 2**128 - 1))
    parent = draw(st.none() | ids)
    return ReadableSpan(
        draw(texts),
        context=SpanContext(trace_id, draw(ids), is_remote=False),
        parent=None if parent is None else SpanContext(trace_id, parent, is_remote=False),
        resource=RESOURCE,
        attributes=draw(st.dictionaries(texts.filter(bool), values, max_size=6)),
        kind=draw(st.sampled_from(list(SpanKind))),
        status=draw(
            st.sampled_from(
                [Status(StatusCode.UNSET), Status(StatusCode.ERROR, "bad"), Status(StatusCode.ERROR)]
            )
        ),
        start_time=draw(st.integers(0, 2**63)),
        end_time=draw(st.integers(0, 2**63)),
        instrumentation_scope=SCOPE,
    )


@given(st.lists(spans(), min_size=1, max_size=4))
def test_the_bytes_say_what_the_sdks_message_says(batch: list[ReadableSpan]) -> None:
    """Any spans with any attributes: parsed, both are the same message."""
    assert ExportTraceServiceRequest.FromString(encode(batch)) == encode_spans(batch)


def test_true_and_one_are_not_the_same_attribute() -> None:
    """They are equal as Python values, so a cache could take one for the other."""
    made = [
        ReadableSpan(
            "x",
            context=SpanContext(1, 2, is_remote=False),
            resource=RESOURCE,
            attributes={"k": value},
            instrumentation_scope=SCOPE,
            start_time=1,
            end_time=2,
        )
        for value in (True, 1, 1.0, "1", 0, False)
    ]
    parsed = ExportTraceServiceRequest.FromString(encode(made))
    kinds = [
        span.attributes[0].value.WhichOneof("value") for span in parsed.resource_spans[0].scope_spans[0].spans
    ]
    assert kinds == ["bool_value", "int_value", "double_value", "string_value", "int_value", "bool_value"]


def test_no_spans_are_no_bytes() -> None:
    """An empty batch is an empty request."""
    assert encode([]) == b""
