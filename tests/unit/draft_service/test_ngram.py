"""Prompt lookup against its definition."""

from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters import DraftRequest
from draft_service.drafters.ngram import NgramDrafter, NgramIndex
from paceline.types import SamplingParams


def naive(text: list[int], min_match: int, max_match: int, k: int) -> list[int]:
    """The definition, by search: longest suffix first, its most recent earlier end, then what followed."""
    for length in range(min(max_match, len(text) - 1), min_match - 1, -1):
        suffix = text[-length:]
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == suffix:
                guesses, grown = [], list(text)
                while len(guesses) < k:  # reads its own guesses where the match is near the end
                    guesses.append(grown[end + 1 + len(guesses)])
                    grown.append(guesses[-1])
                return guesses
    return []


texts = st.integers(1, 6).flatmap(lambda size: st.lists(st.integers(0, size), min_size=1, max_size=60))


@given(
    text=texts, bounds=st.tuples(st.integers(1, 4), st.integers(0, 5)), k=st.integers(1, 9), data=st.data()
)
def test_index_gives_what_the_search_gives(text, bounds, k, data):
    """The incremental index equals the search at every length, however the text arrived."""
    min_match, max_match = bounds[0], bounds[0] + bounds[1]
    index, at = NgramIndex(min_match, max_match), 0
    while at < len(text):
        step = data.draw(st.integers(1, len(text) - at))
        index.extend(text[at : at + step])
        at += step
        assert index.continuation(k) == naive(text[:at], min_match, max_match, k)


def request(handle: int, token_ids: list[int], k: int = 4) -> DraftRequest:
    return DraftRequest(handle, token_ids, 1, SamplingParams(), k, 100)


def test_sequences_do_not_see_each_other():
    """Each handle has an index of its own, filled from what is new in the request."""
    drafter = NgramDrafter("ngram", min_match=2, max_match=8)
    drafter.open(1)
    drafter.open(2)
    assert drafter.propose([request(1, [1, 2, 3, 1, 2]), request(2, [1, 2])]) == [[3, 1, 2, 3], []]
    assert drafter.propose([request(2, [1, 2, 9, 1, 2], k=1)]) == [[9]]
    drafter.close(1)
    drafter.close(2)
    drafter.open(1)
    assert drafter.propose([request(1, [1, 2])]) == [[]]


def test_a_hash_collision_costs_a_guess_and_nothing_else(monkeypatch):
    """Where two n-grams share a key, the tokens decide: no guess rather than a wrong one."""
    monkeypatch.setattr("draft_service.drafters.ngram._MASK", 0)
    index = NgramIndex(2, 2)
    index.extend([1, 2, 3, 4, 5])
    assert index.continuation(4) == []
