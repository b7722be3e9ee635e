"""Records of what was served, as files for later study: one JSON object a line, and Parquet where it is asked for.

``RecordWriter`` is the one way in: a bounded queue and a thread, so that whoever has something to record never waits. What
a line says belongs to whoever writes it (``verify_service.recording``, ``draft_service.self_scoring``).
"""

from paceline.records.parquet import Schema, require_parquet
from paceline.records.writer import RecordWriter

__all__ = ["RecordWriter", "Schema", "require_parquet"]
