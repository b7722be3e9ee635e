"""Log lines as ``key=value``, one line a record, with the trace id of the request they speak of.

Write ``logger.info("constant message", extra={"field": value})``. Only ``main`` calls ``configure``.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from paceline.telemetry.context import current_trace

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class KeyValueFormatter(logging.Formatter):
    """``ts=... level=... logger=... msg="..." field=... trace_id=... exc="..."``; newlines are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {
            "ts": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        # What starts with an underscore was put there by a library (Ray adds a time stamp), not by the caller.
        fields |= {
            key: value
            for key, value in vars(record).items()
            if key not in _STANDARD and not key.startswith("_")
        }
        trace = current_trace()
        if trace is not None:
            fields.setdefault("trace_id", trace.trace_id_hex)
        if record.exc_info:
            fields["exc"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isascii() and text.isprintable() and text and not set(text) & set(' "=\\')
    return text if plain else json.dumps(text, ensure_ascii=False)


def configure(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send every record of this process to ``stream`` (stderr) in this form. Replaces earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(KeyValueFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
