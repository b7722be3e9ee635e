"""Log lines: one line a record, key=value, with the trace of the current task."""

import contextvars
import io
import logging

from paceline.serving.logs import KeyValueFormatter
from paceline.telemetry import TraceContext, bind_trace


def log(message, *, exc_info=None, **fields):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(KeyValueFormatter())
    logger = logging.Logger("paceline.test")  # noqa: LOG001 - not in the tree of loggers
    logger.addHandler(handler)
    logger.warning(message, exc_info=exc_info, extra=fields)
    return stream.getvalue()


def test_fields_follow_the_constant_message():
    """Values with spaces, quotes or newlines are quoted; plain ones are not."""
    line = log("link lost", address="127.0.0.1:1", reason='say "no"\nnow', num=3, empty="")
    assert line.endswith(
        'level=warning logger=paceline.test msg="link lost" address=127.0.0.1:1 '
        'reason="say \\"no\\"\\nnow" num=3 empty=""\n'
    )
    assert line.startswith("ts=20")


def test_a_traceback_stays_on_one_line():
    """A record is always one line, so that lines can be counted and grepped."""
    try:
        raise ValueError("x")
    except ValueError as error:
        line = log("request failed", exc_info=error)
    assert line.count("\n") == 1
    assert "ValueError: x" in line


def test_the_current_trace_is_named():
    """Whoever bound a trace finds it in every line of the task."""

    def within():
        bind_trace(TraceContext(0xABC, 1, sampled=True))
        return log("m"), log("m", trace_id="mine")

    bound, own = contextvars.copy_context().run(within)
    assert bound.endswith(f"trace_id={0xABC:032x}\n")
    assert own.endswith("trace_id=mine\n")
    assert "trace_id" not in log("m")
