"""The controller's state in compiled code, and the same in Python.

Both are values: what is passed from one to the other is equal to the last bit. The compiled one serves; Python's is what a step is
decided from that compiled code leaves to Python, and what tests look into.
"""

import ctypes
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice

from paceline.types import AcceptancePrior, DepthReason
from verify_service.belief import DEPTHS, DrafterTrack, Track
from verify_service.facts import REGIONS, State

REASONS = tuple(DepthReason)
"""As compiled code numbers them."""
_NUMBERS = {reason: number for number, reason in enumerate(REASONS)}


class CompiledState:
    """A ``facts.State`` of compiled code, freed with this object. It changes no more: from any thread."""

    __slots__ = ("_library", "pointer")

    def __init__(self, library: ctypes.CDLL, pointer: int) -> None:
        """Takes over what ``pointer`` points at."""
        self._library, self.pointer = library, pointer

    def __del__(self) -> None:
        self._library.state_free(self.pointer)

    @property
    def pace(self) -> float:
        """See ``facts.State``."""
        return self._paces()[0]

    @property
    def accept_row_s(self) -> float:
        """See ``facts.State``."""
        return self._paces()[1]

    @property
    def context(self) -> float:
        """See ``facts.State``."""
        return self._paces()[2]

    @property
    def regions(self) -> tuple[float, ...]:
        """See ``facts.State``."""
        return tuple(self._paces()[3:])

    def _paces(self) -> list[float]:
        found = array("d", bytes(8 * (3 + REGIONS)))
        self._library.state_pace(self.pointer, found.buffer_info()[0])
        return found.tolist()

    def num_idle(self, ids: Iterable[int]) -> int:
        """See ``facts.State``."""
        asked = array("q", ids)
        found: int = self._library.state_idle(self.pointer, asked.buffer_info()[0], len(asked))
        return found

    def without(self, id_: int) -> "CompiledState":
        """See ``facts.State``."""
        pointer = self._library.state_without(self.pointer, id_)
        return CompiledState(self._library, pointer) if pointer else self

    @classmethod
    def of(cls, library: ctypes.CDLL, state: State) -> "CompiledState | None":
        """The same in compiled code; None: it has no room for something in it."""
        reals: list[float] = []
        numbers: list[int] = []
        names: list[bytes] = []

        def name(text: str) -> int:
            names.append(text.encode("utf-8", "surrogatepass"))
            return len(names[-1])

        reals += (state.pace, state.accept_row_s, state.quiet_gap_s, state.context, state.rate)
        reals += (state.found_gain, *state.regions)
        numbers += (len(state.drafters), len(state.tracks))
        for called, drafter in state.drafters.items():
            numbers.append(name(called))
            reals += _reals_of(drafter)
        for id_, track in state.tracks.items():
            reals += (track.accepted, track.rejected, track.filled, track.empty, *track.moods)
            reals += (track.rows, track.tokens, track.worth_s, track.better, track.worse)
            numbers += (id_, name(track.drafter), track.mood, track.zero_rounds, track.suspended, track.on)
            numbers += (track.since, track.next_probe, track.probe_gap, _NUMBERS[track.reason], track.judged)
            numbers += (track.every, track.turn)
            prior = track.prior
            numbers.append(-1 if prior is None else len(prior.by_position))
            if prior is not None:
                reals += (prior.mean, prior.strength, *prior.by_position)
        text = b"".join(names)
        try:
            exact, whole = array("d", reals), array("q", numbers)
        except (TypeError, OverflowError):
            return None
        pointer = library.state_read(
            exact.buffer_info()[0], len(exact), whole.buffer_info()[0], len(whole), text, len(text)
        )
        return cls(library, pointer) if pointer else None

    def plain(self) -> State:
        """The same in Python. Raises MemoryError."""
        sizes = array("q", [0, 0, 0])
        at = sizes.buffer_info()[0]
        write = self._library.state_write
        write(self.pointer, None, None, None, at)
        reals, numbers = array("d", bytes(8 * sizes[0])), array("q", bytes(8 * sizes[1]))
        text = ctypes.create_string_buffer(sizes[2] or 1)
        if write(self.pointer, reals.buffer_info()[0], numbers.buffer_info()[0], text, at) != 1:
            raise MemoryError("no memory to write a state down")
        return _Reading(reals, numbers, text.raw).state()


def _reals_of(drafter: DrafterTrack) -> Iterator[float]:
    yield from (drafter.accepted, drafter.rejected, drafter.filled, drafter.empty)
    for listed in (drafter.seen, drafter.true, drafter.told, drafter.moods, drafter.fills, drafter.long):
        yield from listed
    yield from drafter.wanted
    yield from (drafter.exposed_s, drafter.draft_s, drafter.k, drafter.weight)
    yield from (drafter.k_square, drafter.k_time, drafter.look_s, drafter.read_s)


class _Reading:
    """What ``passing.h`` writes, read in its order."""

    def __init__(self, reals: Iterable[float], numbers: Iterable[int], text: bytes) -> None:
        self._reals, self._numbers, self._text = iter(reals), iter(numbers), text

    def state(self) -> State:
        """All of it."""
        pace, accept_row_s, quiet_gap_s, context, rate, found_gain, *regions = self._some(6 + REGIONS)
        num_drafters, num_tracks = next(self._numbers), next(self._numbers)
        drafters = {self._name(): self._drafter() for _ in range(num_drafters)}
        tracks = {next(self._numbers): self._track() for _ in range(num_tracks)}
        return State(
            tracks, drafters, pace, tuple(regions), accept_row_s, quiet_gap_s, context, rate, found_gain
        )

    def _some(self, count: int) -> list[float]:
        return list(islice(self._reals, count))

    def _name(self) -> str:
        length = next(self._numbers)
        name, self._text = self._text[:length], self._text[length:]
        return name.decode("utf-8", "surrogatepass")

    def _drafter(self) -> DrafterTrack:
        some = self._some
        one = DrafterTrack()
        one.accepted, one.rejected, one.filled, one.empty = some(4)
        one.seen, one.true, one.told = some(DEPTHS), some(DEPTHS), some(DEPTHS)
        one.moods, one.fills = some(9), some(9)
        one.long, one.wanted = some(DEPTHS), some(DEPTHS)
        one.exposed_s, one.draft_s, one.k, one.weight, one.k_square, one.k_time, one.look_s, one.read_s = (
            some(8)
        )
        return one

    def _track(self) -> Track:
        track = Track(self._name())
        some, number = self._some, self._numbers
        track.accepted, track.rejected, track.filled, track.empty = some(4)
        track.moods = some(12)
        track.rows, track.tokens, track.worth_s, track.better, track.worse = some(5)
        track.mood, track.zero_rounds = next(number), next(number)
        track.suspended, track.on = bool(next(number)), bool(next(number))
        track.since, track.next_probe, track.probe_gap = next(number), next(number), next(number)
        track.reason, track.judged = REASONS[next(number)], next(number)
        track.every, track.turn, positions = next(number), next(number), next(number)
        if positions >= 0:
            mean, strength, *by_position = some(2 + positions)
            track.prior = AcceptancePrior(mean, strength, tuple(by_position))
        return track
