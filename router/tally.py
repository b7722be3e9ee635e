"""What one request cost: its rounds, their sums, and where its time went, over all replicas that decoded it."""

from dataclasses import fields, replace

from paceline.types import RoundRecord, SpeculativeStats, Timings
from router.ledger.group import batch_bucket
from router.ledger.sums import RoundSums


def cut_round(record: RoundRecord, delivered: int) -> RoundRecord:
    """``record`` when only the first ``delivered`` of its committed tokens belong to the output.

    A round commits its accepted draft tokens first, then the target's own. Accepted ones behind the cut are ``ignored``
    (I6): they agreed with the target, and nobody got them.
    """
    if delivered >= record.committed:
        return record
    accepted = min(record.accepted, delivered)
    ignored = record.ignored + record.accepted - accepted
    return record._replace(accepted=accepted, ignored=ignored, committed=delivered)


class _Attempt:
    """Times of one Decode call as the router saw them; only used where the verify tier could not report its own."""

    __slots__ = (
        "_draft_s", "_network_s", "_verify_s", "_wait_s", "admitted_at", "first_run_at", "last_run_at", "queue_s",
    )  # fmt: skip

    def __init__(self, queue_s: float, now: float) -> None:
        self.queue_s = queue_s
        self.admitted_at = now
        self.first_run_at: float | None = None
        self.last_run_at: float | None = None
        self._draft_s = self._network_s = self._wait_s = self._verify_s = 0.0

    def add(self, record: RoundRecord) -> None:
        self._draft_s += record.draft_s
        self._network_s += record.network_s
        self._wait_s += record.wait_s
        self._verify_s += record.verify_s

    def timings(self) -> Timings:
        if self.first_run_at is None or self.last_run_at is None:
            return Timings(queue_s=self.queue_s)
        # The rounds tile the time from the first token to the last; what the network did to the arrivals must not
        # make the whole smaller than its parts.
        parts_s = self._draft_s + self._network_s + self._wait_s + self._verify_s
        return Timings(
            queue_s=self.queue_s,
            prefill_s=self.first_run_at - self.admitted_at,
            decode_s=max(self.last_run_at - self.first_run_at, parts_s),
            draft_s=self._draft_s,
            network_s=self._network_s,
            wait_s=self._wait_s,
            verify_s=self._verify_s,
        )


class Tally:
    """Sums of one request. Owned by it; ``now`` is monotonic time in seconds."""

    def __init__(self, arrived_at: float, *, keep_rounds: int) -> None:
        self.stats = SpeculativeStats()
        self.rounds: list[RoundRecord] = []
        """The first ``keep_rounds`` rounds."""
        self.sums: dict[str, RoundSums] = {}
        """What goes into the ledger, by batch bucket."""
        self.longest_pause_s = 0.0
        """Between two arrivals of output."""
        self._arrived_at = arrived_at
        self._keep_rounds = keep_rounds
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._done = Timings()  # attempts that are over
        self._attempt: _Attempt | None = None
        self._is_resumed = False  # the attempt goes on with a request that has delivered tokens

    @property
    def rounds_elided(self) -> int:
        """Rounds that are not in ``rounds``."""
        return self.stats.num_rounds - len(self.rounds)

    def admitted(self, queue_s: float, now: float) -> None:
        """A replica took the request, for the first time or to go on with it."""
        self._end_attempt()
        self._attempt = _Attempt(queue_s, now)
        self._is_resumed = self._first_token_at is not None

    def run(self, record: RoundRecord | None, delivered: int, now: float) -> int | None:
        """A run arrived, of which ``delivered`` tokens are output; gives the round's index within the request.

        ``record`` is None for the token of a prefill. A replica that takes over counts its rounds from 0 again.
        """
        if self._first_token_at is None:
            self._first_token_at = now
        else:
            assert self._last_token_at is not None, "set with the first"
            self.longest_pause_s = max(self.longest_pause_s, now - self._last_token_at)
        self._last_token_at = now
        if self._attempt is not None:
            if self._attempt.first_run_at is None:
                self._attempt.first_run_at = now
            self._attempt.last_run_at = now
        if record is None:
            return None
        if record.index != self.stats.num_rounds:
            record = record._replace(index=self.stats.num_rounds)
        record = cut_round(record, delivered)
        self.stats = self.stats.plus(record)
        bucket = batch_bucket(record.batch_sequences)
        if (sums := self.sums.get(bucket)) is None:
            sums = self.sums[bucket] = RoundSums()
        sums.add(record)
        if len(self.rounds) < self._keep_rounds:
            self.rounds.append(record)
        if self._attempt is not None:
            self._attempt.add(record)
        return record.index

    def finished(self, timings: Timings) -> None:
        """The replica's own account of the Decode call that just ended."""
        self._attempt = None
        self._count(timings)

    def timings(self, now: float) -> Timings:
        """Where the time went up to ``now``, the router's own two times included."""
        self._end_attempt()
        known, first = self._done, self._first_token_at
        return replace(
            known,
            time_to_first_token_s=first - self._arrived_at if first is not None else 0.0,
            total_s=now - self._arrived_at,
        )

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._count(self._attempt.timings())
            self._attempt = None

    def _count(self, timings: Timings) -> None:
        """Add an attempt. One that goes on with a request makes its decode time longer by the whole outage: from the
        first token to the last one as the router saw them, of which the new queue and prefill are part (overhead).
        """
        if not self._is_resumed:
            self._done = _plus(self._done, timings)
            return
        assert self._first_token_at is not None, "resumed behind the first token"
        assert self._last_token_at is not None, "resumed behind the first token"
        known = _plus(self._done, replace(timings, queue_s=0.0, prefill_s=0.0, decode_s=0.0))
        parts_s = known.draft_s + known.network_s + known.wait_s + known.verify_s
        self._done = replace(known, decode_s=max(self._last_token_at - self._first_token_at, parts_s))


def _plus(a: Timings, b: Timings) -> Timings:
    return Timings(**{f.name: getattr(a, f.name) + getattr(b, f.name) for f in fields(Timings)})
