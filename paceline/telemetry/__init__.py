"""Where a request's time went, told as one trace over three services.

Ids are handed out first (``TraceContext``) and spans are recorded afterwards from measured times (``Telemetry``), so
the decode loop never holds a half-made span. ``names`` lists every span, attribute and service name.
"""

from paceline.telemetry.context import TraceContext, bind_trace, current_trace, extract
from paceline.telemetry.spans import MAX_ROUND_SPANS, AttributeValue, Telemetry, round_context

__all__ = [
    "MAX_ROUND_SPANS",
    "AttributeValue",
    "Telemetry",
    "TraceContext",
    "bind_trace",
    "current_trace",
    "extract",
    "round_context",
]
