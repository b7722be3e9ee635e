"""What a link owes: the answer that was waited for in vain. While it owes one, nobody waits for it again.

A drafter that stops answering would otherwise cost a wait for each miss that the breaker has to see. So only the first
miss is waited for; as long again without an answer is one more miss, and meanwhile rounds go on plainly. An answer to
what was asked last ends it.
"""


class Arrears:
    """One link's. Times are monotonic seconds, handed in."""

    def __init__(self) -> None:
        self._next: float | None = None
        self._limit_s = 0.0

    @property
    def owes(self) -> bool:
        """Whether an answer is overdue."""
        return self._next is not None

    def missed(self, now: float, limit_s: float) -> bool:
        """A question was waited for as long as may be; True where this is news: rows that wait together miss together."""
        if self._next is not None:
            return self.overdue(now)
        self._limit_s = limit_s
        self._next = now + limit_s
        return True

    def overdue(self, now: float) -> bool:
        """Whether as long again has passed: one more miss."""
        if self._next is None or now < self._next:
            return False
        self._next = now + self._limit_s
        return True

    def settle(self) -> None:
        """An answer came, or the breaker has taken over."""
        self._next = None
