"""Stops asking a drafter that does not answer, and asks again later: a circuit breaker per link.

Closed: rounds ask. Open, after 3 misses in the last 16 answers: nobody asks until a back-off is over, which doubles
from miss to miss. Half open: one sequence probes, and decodes plainly meanwhile; its answer in good time closes the
breaker, its miss opens it again. The
back-off carries jitter, so that many verify replicas do not probe a recovering draft replica in step.
"""

import random
from collections import deque
from collections.abc import Callable

WINDOW = 16
MISSES = 3
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 2.0
"""With jitter 3 s, then the probe, which has to answer twice: a drafter that works again is used again within 5 s."""


class Breaker:
    """One link's breaker. Times are monotonic seconds, handed in."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._recent: deque[bool] = deque(maxlen=WINDOW)  # True: missed
        self._jitter = jitter
        self._open_until: float | None = None  # None: closed
        self._probing = False
        self._backoff_s = FIRST_BACKOFF_S
        self.times_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether sequences must not ask (a probe may)."""
        return self._open_until is not None

    def may_attach(self, now: float) -> bool:
        """Whether one more sequence may ask now; when half open, the answer is yes once."""
        if self._open_until is None:
            return True
        if now < self._open_until or self._probing:
            return False
        self._probing = True
        return True

    def answered(self) -> None:
        """A proposal came in time."""
        self._recent.append(False)
        if self._open_until is not None:
            self._open_until = None
            self._probing = False
            self._recent.clear()
            self._backoff_s = FIRST_BACKOFF_S

    def missed(self, now: float) -> bool:
        """A proposal did not come in time; True if this opened the breaker (again)."""
        self._recent.append(True)
        if self._open_until is None and sum(self._recent) < MISSES:
            return False
        self._open(now)
        return True

    def probe_ended(self, now: float) -> None:
        """The probing sequence ended without an answer and without a miss: the next one may probe."""
        if self._open_until is not None:
            self._probing = False
            self._open_until = now

    def _open(self, now: float) -> None:
        self._open_until = now + self._backoff_s * (0.5 + self._jitter())
        self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        self._probing = False
        self._recent.clear()
        self.times_opened += 1
