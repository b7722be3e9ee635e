"""What a cascade learns: how guesses fare by position, what drafting costs, how long a round takes.

Objects here are written by one thread and may be read by another: every write leaves them usable, and a reading that is
a moment old does no harm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.ranges import MAX_K

_PRIOR_ACCEPTED, _PRIOR_SEEN = 2.4, 4.0  # a new drafter is trusted somewhat, so that it gets its rounds
_FORGET_RECORD, _FORGET_TRACK = 2000.0, 48.0  # observations at a position, at which all are halved
_FROM_RECORD = 6.0  # observations that the past of other sequences counts for in a new one
_CLIP = 4.0  # a measured time counts for at most so many times the mean: a stall is not a cost
_DISCOUNT = 0.98
_FEW = 64  # unread tokens that cost no more than the forward they are read in
_READ_FOR = 16  # rounds that share the cost of reading a prompt


@dataclass(slots=True)
class Positions:
    """Of guesses at each position whose predecessors were right: how many were seen, how many were right."""

    forget_at: float
    seen: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def observe(self, position: int, *, right: bool) -> None:
        """One guess, whose predecessors were right."""
        while len(self.seen) <= position:
            self.right.append(0.0)
            self.seen.append(0.0)
        self.seen[position] += 1.0
        self.right[position] += right
        if self.seen[position] >= self.forget_at:
            self.right[:] = [0.5 * value for value in self.right]
            self.seen[:] = [0.5 * value for value in self.seen]

    def at(self, position: int) -> tuple[float, float]:
        """(right, seen); nothing beyond what was seen."""
        if position < len(self.seen):
            return self.right[position], self.seen[position]
        return 0.0, 0.0


class Record:
    """One member over all sequences. ``bucket``: acceptance differs by temperature."""

    def __init__(self) -> None:
        self._by_bucket: dict[int, Positions] = {}
        self._guess_s: float | None = None  # of one guess
        self._read_s: float | None = None  # of one token that is read without guessing behind it

    def positions(self, bucket: int) -> Positions:
        """Counts of a bucket."""
        known = self._by_bucket.get(bucket)
        if known is None:
            known = self._by_bucket[bucket] = Positions(_FORGET_RECORD)
        return known

    def chance(self, bucket: int, position: int) -> float:
        """That a guess at ``position`` is right, its predecessors being right."""
        right, seen = self.positions(bucket).at(position)
        return (right + _PRIOR_ACCEPTED) / (seen + _PRIOR_SEEN)

    def took(self, num_guesses: int, num_unread: int, seconds: float) -> None:
        """Drafting so many guesses behind so many tokens not read yet took so long, the batch it was in included."""
        if num_unread <= _FEW:
            self._guess_s = _moved(self._guess_s, seconds / max(num_guesses, 1))
        elif self._guess_s is not None:
            self._read_s = _moved(self._read_s, max(seconds - num_guesses * self._guess_s, 0.0) / num_unread)

    def cost_s(self, num_guesses: int, num_unread: int = 0) -> float:
        """Expected time of it. Reading is spread over the rounds that will have its benefit; 0 before the first."""
        reading_s = (self._read_s or 0.0) * num_unread / _READ_FOR if num_unread > _FEW else 0.0
        return (self._guess_s or 0.0) * num_guesses + reading_s


def _moved(mean: float | None, value: float) -> float:
    """The running mean with one more value."""
    return value if mean is None else mean + 0.05 * (min(value, _CLIP * mean) - mean)


def bucket_of(temperature: float) -> int:
    """Temperatures among which acceptance is much the same."""
    return 0 if temperature == 0.0 else 1 + int(min(2 * temperature, 3))


class Track:
    """One member in one sequence."""

    def __init__(self, record: Record, temperature: float) -> None:
        self._record = record
        self._bucket = bucket_of(temperature)
        self._own = Positions(_FORGET_TRACK)
        self._base_len = 0
        self._guesses: Sequence[int] = ()
        self.num_read = 0
        """Tokens that the member has seen."""

    def guessed(self, base_len: int, guesses: Sequence[int]) -> None:
        """The guesses after ``base_len`` tokens, to be judged once more is known."""
        self._base_len, self._guesses = base_len, guesses
        self.num_read = base_len

    def committed(self, token_ids: Sequence[int]) -> None:
        """Judge the last guesses by the text as it stands now.

        The text does not depend on them, so each guess counts whose predecessors were right, verified or not.
        """
        guesses, self._guesses = self._guesses, ()
        truth = token_ids[self._base_len : self._base_len + len(guesses)]
        shared = self._record.positions(self._bucket)
        for position, (guess, token) in enumerate(zip(guesses, truth, strict=False)):
            for positions in (shared, self._own):
                positions.observe(position, right=guess == token)
            if guess != token:
                break

    def survival(self, num_guesses: int) -> list[float]:
        """Probability that the first, the first two, ... guesses are right."""
        survival, alive = [], 1.0
        for position in range(min(num_guesses, MAX_K)):
            right, seen = self._own.at(position)
            prior = self._record.chance(self._bucket, position)
            alive *= (right + _FROM_RECORD * prior) / (seen + _FROM_RECORD)
            survival.append(alive)
        return survival


class RoundTime:
    """Seconds of a round from the answer to the next question, as a straight line over the number of guesses."""

    _ROW = 0.1  # of a round without guesses: what a guess is taken to cost before it is known

    def __init__(self) -> None:
        self._weight = self._guesses = self._squares = self._seconds = self._products = 0.0
        self._base_s, self._each_s = 1.0, self._ROW

    def of(self, num_guesses: int) -> float:
        """Expected seconds with so many guesses."""
        return self._base_s + self._each_s * num_guesses

    def took(self, num_guesses: int, seconds: float) -> None:
        """A round was so long."""
        if self._weight > 4.0:
            seconds = min(seconds, _CLIP * self.of(num_guesses))
        self._weight = _DISCOUNT * self._weight + 1.0
        self._guesses = _DISCOUNT * self._guesses + num_guesses
        self._squares = _DISCOUNT * self._squares + num_guesses**2
        self._seconds = _DISCOUNT * self._seconds + seconds
        self._products = _DISCOUNT * self._products + num_guesses * seconds
        self._fit()

    def _fit(self) -> None:
        mean_guesses, mean_s = self._guesses / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_guesses**2
        shared = self._products / self._weight - mean_guesses * mean_s
        # The slope is drawn to its prior as by a few rounds: guesses that are always as many say nothing of it.
        prior = self._ROW * mean_s / (1.0 + self._ROW * mean_guesses)
        pull = 4.0 / self._weight
        each = (shared + pull * prior) / (spread + pull)
        self._each_s = min(max(each, 0.0), mean_s / (1.0 + mean_guesses))
        self._base_s = max(mean_s - self._each_s * mean_guesses, 1e-6)
