"""Both histories against the definition of what a look-up gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.lookup import history
from paceline.lookup.history import (
    BLOCK,
    MAX_FOUND,
    NativeHistory,
    PlainHistory,
    native_bytes,
    native_library,
    places_for,
    sized_history,
)

needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C++ compiler at hand")


class Naive:
    """The definition, by search over lists."""

    def __init__(self, capacity, levels):
        self.capacity, self.levels, self.pieces = capacity, levels, []

    def begin(self, length, scope):
        forgotten = 0
        while self.pieces and sum(p[2] for p in self.pieces) + places_for(length) > self.capacity:
            del self.pieces[0]
            forgotten += 1
        self.pieces.append((scope, [], places_for(length)))
        return forgotten

    def append(self, tokens):
        self.pieces[-1][1].extend(tokens)

    def after(self, context, scope, k, *, own=False):
        matches = []  # (length, tokens, end), newest first
        for piece_scope, tokens, _ in reversed(self.pieces):
            for end in reversed(range(len(tokens) - own)):
                most = min(end + 1, len(context))
                length = next((n for n in range(most) if tokens[end - n] != context[-1 - n]), most)
                if piece_scope == scope:
                    matches.append((length, tokens, end))
        best = max([m[0] for m in matches], default=0)
        level = max([level for level in self.levels if level <= best], default=0)
        if not level:
            return [], [], [], 0
        newest = [m for m in matches if m[0] >= level][:MAX_FOUND]
        longest = max(m[0] for m in newest)
        voters = [m for m in newest if m[0] == longest]
        guesses, votes, agreed = [], [], []
        while len(guesses) < k:
            cast = []
            for voter in voters:
                grown = voter[1] + guesses if own else voter[1]
                at = voter[2] + 1 + len(guesses)
                if at < len(grown):
                    cast.append((grown[at], voter))
            if not cast:
                break
            tokens = [token for token, _ in cast]
            most = max(map(tokens.count, tokens))
            guess = next(token for token in tokens if tokens.count(token) == most)
            guesses.append(guess)
            votes.append(len(cast))
            agreed.append(most)
            voters = [voter for token, voter in cast if token == guess]
        return guesses, votes, agreed, longest


def flat(continuation):
    return (continuation.token_ids, continuation.votes, continuation.agreed, continuation.match_len)


def both(capacity, levels):
    library = native_library()
    made = [PlainHistory(capacity, levels)]
    if library is not None:
        made.append(NativeHistory(library, capacity, levels, 4))
    return made


@st.composite
def worlds(draw):
    """Levels, capacity, pieces of few different tokens (some huge), and questions between them."""
    token = st.sampled_from([0, 1, 2, 49_151, 2**31 - 1][: draw(st.integers(1, 5))])
    levels = sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=3)))
    capacity = BLOCK * draw(st.integers(2, 8))
    piece = st.tuples(st.integers(0, 1), st.lists(token, min_size=1, max_size=capacity - 1))
    question = st.tuples(st.lists(token, min_size=1, max_size=12), st.integers(0, 2), st.integers(1, 64))
    return levels, capacity, draw(st.lists(st.tuples(piece, question), min_size=1, max_size=12))


@settings(max_examples=80)
@given(world=worlds(), data=st.data())
def test_a_pool_gives_what_the_search_gives(world, data):
    """Longest match, newest places, majority, scope, whole pieces forgotten: as defined, however a piece arrives."""
    levels, capacity, steps = world
    naive, made = Naive(capacity, levels), both(capacity, levels)
    for (scope, tokens), (context, asked_scope, k) in steps:
        forgotten = naive.begin(len(tokens), scope)
        assert [one.begin(len(tokens), scope) for one in made] == [forgotten] * len(made)
        cut = data.draw(st.integers(0, len(tokens)))
        for part in (tokens[:cut], tokens[cut:]):
            for one in (naive, *made):
                one.append(part)
            wanted = naive.after(context, asked_scope, k)
            for one in made:
                assert flat(one.after(context, asked_scope, k)) == wanted


@settings(max_examples=80)
@given(
    text=st.integers(0, 3).flatmap(lambda top: st.lists(st.integers(0, top), min_size=1, max_size=120)),
    levels=st.sets(st.integers(1, 6), min_size=1, max_size=3).map(sorted),
    k=st.integers(1, 64),
    step=st.integers(1, 7),
)
def test_an_own_text_gives_what_the_search_gives(text, levels, k, step):
    """The end of the text is no match of itself, and a match near the end goes on as a period."""
    naive, made = Naive(128, levels), both(128, levels)
    for one in (naive, *made):
        one.begin(len(text), 0)
    for at in range(0, len(text), step):
        for one in (naive, *made):
            one.append(text[at : at + step])
        context = text[: at + step][-10:]
        wanted = naive.after(context, 0, k, own=True)
        for one in made:
            assert flat(one.after_own_end(context, k)) == wanted


@needs_compiler
@pytest.mark.parametrize("budget", [1, 4096, 1_000_000, 256 << 20])
def test_a_history_keeps_to_its_budget(budget, monkeypatch):
    """The largest capacity whose memory, as counted, is within the budget; a piece always fits."""
    made = []
    monkeypatch.setattr(history, "NativeHistory", lambda *arguments: made.append(arguments))
    _, capacity = sized_history(budget, (2, 6))
    (_, places, levels, log_buckets) = made[0]
    assert places == capacity
    assert capacity >= BLOCK
    used = native_bytes(places, len(levels), log_buckets)
    assert used <= max(budget, 4096)
    assert used > 0.6 * budget
    if budget == 256 << 20:
        assert capacity > 1.4 * 10_000_000, "ten million tokens in pieces of any sensible length"


def test_without_a_compiler_python_serves(monkeypatch):
    """The same answers; the capacity follows from Python's own memory a token."""
    monkeypatch.setattr(history, "native_library", lambda: None)
    made, capacity = sized_history(1 << 20, (2, 6))
    assert isinstance(made, PlainHistory)
    assert isinstance(history.own_history(100, (1, 2)), PlainHistory)
    assert 400 * capacity <= 1 << 20


def test_forgetting_leaves_nothing_behind():
    """In Python, whose dictionaries could grow: after many pieces only those that fit are held."""
    made = PlainHistory(64, (1, 2))
    for i in range(200):
        made.begin(20, i % 3)
        made.append([i, *range(19)])
    assert len(made._token_at) <= 64
    assert sum(map(len, made._places.values())) <= 2 * 64


@needs_compiler
def test_many_wraps_of_the_ring():
    """Long after everything was overwritten many times a look-up still gives what stands there, and nothing else."""
    made = NativeHistory(native_library(), 64, (1, 2), 4)
    for i in range(5000):
        made.begin(20, 0)
        made.append([i % 7, *range(100, 119)])
    assert made.after([100, 101], 0, 3).token_ids == [102, 103, 104]
    assert made.after([4999 % 7], 0, 1).token_ids == [100]
    assert made.after([55], 0, 1).token_ids == []
