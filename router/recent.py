"""The last requests with their plans and rounds, for people who ask why; no prompt and no output text."""

from collections import deque

from paceline.v1 import router_pb2

DEFAULT_LIMIT = 20
MAX_ROUNDS = 512
"""Rounds kept of one request."""


class RecentRequests:
    """A ring of the last ``keep`` summaries."""

    def __init__(self, keep: int) -> None:
        self._ring: deque[router_pb2.RequestSummary] = deque(maxlen=keep)

    def add(self, summary: router_pb2.RequestSummary) -> None:
        """Remember ``summary``; the oldest one gives way."""
        self._ring.append(summary)

    def newest(self, *, request_id: str = "", limit: int = 0) -> list[router_pb2.RequestSummary]:
        """Newest first, at most ``limit`` (0: 20), only those of ``request_id`` if it is given."""
        chosen = [s for s in reversed(self._ring) if not request_id or s.request_id == request_id]
        return chosen[: limit or DEFAULT_LIMIT]
