"""Texts to look things up in: what followed, the last times these tokens stood there?

Two implementations of one meaning: ``NativeHistory`` over ``history.h``, and ``PlainHistory`` in Python, which serves
where there is no compiler and is the truth that tests hold the other one to. ``new_history`` picks.
"""

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.lookup.native import native_library

BLOCK = 16
"""A piece takes a header and its tokens, rounded up to so many places."""
MAX_FOUND = 32
"""Places that vote, at most: the newest ones."""
MAX_STEPS = 256
"""Places that are looked at, at most: most of a chain may be of other contexts, or of other scopes."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What followed the longest match: a path of majority choices.

    Of ``votes[j]`` places ``agreed[j]`` were for ``token_ids[j]``; ``match_len`` tokens before it were the same.
    """

    token_ids: list[int]
    votes: list[int]
    agreed: list[int]
    match_len: int


NOTHING = Continuation([], [], [], 0)


class History(Protocol):
    """Pieces of text, each of one scope, oldest forgotten first and whole. Not for several threads at once.

    Look-ups consider contexts of at least ``levels[0]`` tokens. On the longest of the levels on which a place is found
    the newest ``MAX_FOUND`` places count, of them those with the longest match vote.
    """

    def begin(self, length: int, scope: int) -> int:
        """Begin a piece of at most ``length`` tokens; the number of pieces forgotten for it."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Go on with the piece begun last."""

    def after(self, context: Sequence[int], scope: int, k: int) -> Continuation:
        """How ``context`` went on in pieces of ``scope``, up to ``k`` tokens."""

    def after_own_end(self, context: Sequence[int], k: int) -> Continuation:
        """The same in a history of one piece of scope 0, whose end ``context`` is.

        A match that runs into the end is read as a period that goes on.
        """


def places_for(length: int) -> int:
    """Places that a piece of ``length`` tokens takes."""
    return -(-(length + 1) // BLOCK) * BLOCK


class PlainHistory:
    """See the module. About 400 bytes a token."""

    def __init__(self, capacity: int, levels: Sequence[int]) -> None:
        self._capacity = capacity
        self._levels = tuple(levels)
        self._pieces: deque[tuple[int, int, list[int]]] = deque()  # number of its header, scope, tokens
        self._end = 0
        self._places: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # newest last
        self._token_at: dict[int, tuple[list[int], int]] = {}

    def begin(self, length: int, scope: int) -> int:
        """See History."""
        needed, forgotten = places_for(length), 0
        self._end = -(-self._end // BLOCK) * BLOCK
        while self._pieces and self._end + needed - self._pieces[0][0] > self._capacity:
            self._forget(*self._pieces.popleft())
            forgotten += 1
        self._pieces.append((self._end, scope, []))
        self._end += 1
        return forgotten

    def append(self, token_ids: Sequence[int]) -> None:
        """See History."""
        _, scope, tokens = self._pieces[-1]
        for token in token_ids:
            tokens.append(token)
            self._token_at[self._end] = (tokens, len(tokens) - 1)
            for level in self._levels:
                if level <= len(tokens):
                    self._places.setdefault((scope, tuple(tokens[-level:])), []).append(self._end)
            self._end += 1

    def after(self, context: Sequence[int], scope: int, k: int) -> Continuation:
        """See History."""
        return self._continuation(context, scope, k, own=False)

    def after_own_end(self, context: Sequence[int], k: int) -> Continuation:
        """See History."""
        return self._continuation(context, 0, k, own=True)

    def _forget(self, start: int, scope: int, tokens: list[int]) -> None:
        for at in range(len(tokens)):
            del self._token_at[start + 1 + at]
            for level in self._levels:
                if level <= at + 1:
                    key = (scope, tuple(tokens[at + 1 - level : at + 1]))
                    places = self._places[key]
                    places.pop(0)
                    if not places:
                        del self._places[key]

    def _continuation(self, context: Sequence[int], scope: int, k: int, *, own: bool) -> Continuation:
        found: list[tuple[list[int], int]] = []
        longest = 0
        for level in reversed(self._levels):
            if level > len(context):
                continue
            places = self._places.get((scope, tuple(context[-level:])), [])
            seen = [n for n in reversed(places) if not (own and n == self._end - 1)][:MAX_FOUND]
            if seen:
                matches = [(_match(*self._token_at[n], context), self._token_at[n]) for n in seen]
                longest = max(length for length, _ in matches)
                found = [at for length, at in matches if length == longest]
                break
        guesses: list[int] = []
        votes: list[int] = []
        agreed: list[int] = []
        while len(guesses) < k:
            nexts = [_next(tokens, at + 1 + len(guesses), guesses, own=own) for tokens, at in found]
            found = [place for place, token in zip(found, nexts, strict=True) if token is not None]
            cast = [token for token in nexts if token is not None]
            if not cast:
                break
            best = max(cast, key=lambda token: (cast.count(token), -cast.index(token)))
            votes.append(len(cast))
            agreed.append(cast.count(best))
            guesses.append(best)
            found = [place for place, token in zip(found, cast, strict=True) if token == best]
        return Continuation(guesses, votes, agreed, longest)


def _match(tokens: list[int], at: int, context: Sequence[int]) -> int:
    """How many tokens up to ``tokens[at]`` equal the last ones of ``context``."""
    same = 0
    while same < len(context) and same <= at and tokens[at - same] == context[-1 - same]:
        same += 1
    return same


def _next(tokens: list[int], at: int, guesses: list[int], *, own: bool) -> int | None:
    if at < len(tokens):
        return tokens[at]
    return guesses[at - len(tokens)] if own else None


class NativeHistory:
    """See the module. Memory is that of ``native_bytes``, taken as it is used."""

    def __init__(self, library: ctypes.CDLL, capacity: int, levels: Sequence[int], log_buckets: int) -> None:
        self._library = library
        self._max_k = 0
        self._out = array("i")
        self._handle: int | None = library.history_make(
            capacity, len(levels), (ctypes.c_int * len(levels))(*levels), log_buckets
        )
        if not self._handle:
            raise MemoryError(f"no memory for a history of {capacity} tokens")
        self._match = ctypes.c_int32()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            self._library.history_free(handle)

    @property
    def handle(self) -> int | None:
        """For other compiled code."""
        return self._handle

    def begin(self, length: int, scope: int) -> int:
        """See History."""
        forgotten: int = self._library.history_begin(self._handle, length, scope)
        return forgotten

    def append(self, token_ids: Sequence[int]) -> None:
        """See History."""
        tokens = array("i", token_ids)
        self._library.history_append(self._handle, tokens.buffer_info()[0], len(tokens))

    def after(self, context: Sequence[int], scope: int, k: int) -> Continuation:
        """See History."""
        return self._continuation(context, scope, k, own=False)

    def after_own_end(self, context: Sequence[int], k: int) -> Continuation:
        """See History."""
        return self._continuation(context, 0, k, own=True)

    def _continuation(self, context: Sequence[int], scope: int, k: int, *, own: bool) -> Continuation:
        if not context:
            return NOTHING
        tokens = array("i", context)
        if k > self._max_k:
            self._max_k = k
            self._out = array("i", bytes(12 * k))
        out, stride = self._out, 4 * self._max_k
        address = out.buffer_info()[0]
        made: int = self._library.history_guess(
            self._handle, tokens.buffer_info()[0], len(tokens), scope, own, MAX_FOUND, MAX_STEPS, k,
            address, address + stride, address + 2 * stride, ctypes.byref(self._match),
        )  # fmt: skip
        most = self._max_k
        return Continuation(
            out[:made].tolist(),
            out[most : most + made].tolist(),
            out[2 * most : 2 * most + made].tolist(),
            self._match.value,
        )


def native_bytes(capacity: int, num_levels: int, log_buckets: int) -> int:
    """Memory of a NativeHistory when it is full."""
    return 4 * capacity + 4 * (capacity // BLOCK) + num_levels * (4 * capacity + (4 << log_buckets))


def sized_history(budget_bytes: int, levels: Sequence[int]) -> tuple[History, int]:
    """The largest history in ``budget_bytes``, and how many places it has."""
    library = native_library()
    if library is None:
        capacity = max(budget_bytes // 400 // BLOCK, 1) * BLOCK
        return PlainHistory(capacity, levels), capacity
    log_buckets = 4  # as many as half the places or a little more: then chains of other contexts are short
    while True:
        spare = budget_bytes - native_bytes(0, len(levels), log_buckets + 1)
        capacity = int(spare / (4.25 + 4 * len(levels))) // BLOCK * BLOCK
        if capacity < 2 << log_buckets or log_buckets >= 28:
            break
        log_buckets += 1
    spare = budget_bytes - native_bytes(0, len(levels), log_buckets)
    capacity = max(int(spare / (4.25 + 4 * len(levels))) // BLOCK, 1) * BLOCK
    return NativeHistory(library, capacity, levels, log_buckets), capacity


def own_history(capacity: int, levels: Sequence[int]) -> History:
    """A history of one text of up to ``capacity`` tokens."""
    library = native_library()
    places = places_for(capacity)
    if library is None:
        return PlainHistory(places, levels)
    return NativeHistory(library, places, levels, max(4, (places - 1).bit_length() - 1))
