"""Prompt lookup against its definition."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.lookup.ngram import NgramIndex, NgramLookup


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


def ask(lookup: NgramLookup, handle: int, token_ids: list[int], k: int = 4) -> list[int]:
    return lookup.guess(handle, token_ids, prompt_len=1, scope="", k=k).token_ids


def test_texts_do_not_see_each_other():
    """Each handle has an index of its own, filled from what is new."""
    lookup = NgramLookup("ngram", min_match=2, max_match=8)
    lookup.open(1)
    lookup.open(2)
    assert ask(lookup, 1, [1, 2, 3, 1, 2]) == [3, 1, 2, 3]
    assert ask(lookup, 2, [1, 2]) == []
    assert ask(lookup, 2, [1, 2, 9, 1, 2], k=1) == [9]
    lookup.close(1)
    lookup.close(2)
    lookup.open(1)
    assert ask(lookup, 1, [1, 2]) == []


def test_probabilities_fall_along_a_guess_and_with_each_failure():
    """A path gets less likely with every token; where guesses keep failing in a text, its next ones are trusted less."""
    lookup = NgramLookup("ngram", min_match=1, max_match=4)
    lookup.open(1)
    text, first = [1, 2, 3, 1], []
    for other in range(10, 40):
        weighed = lookup.guess(1, text, prompt_len=1, scope="", k=3)
        assert weighed.probabilities == sorted(weighed.probabilities, reverse=True)
        assert len(weighed.probabilities) == len(weighed.token_ids)
        first.append(weighed.probabilities[0])
        text = [*text, other, 1]
    assert first[-1] < 0.2 * first[0]


def test_a_hash_collision_costs_a_guess_and_nothing_else(monkeypatch):
    """Where two n-grams share a key, the tokens decide: no guess rather than a wrong one."""
    monkeypatch.setattr("paceline.lookup.ngram._MASK", 0)
    index = NgramIndex(2, 2)
    index.extend([1, 2, 3, 4, 5])
    assert index.continuation(4) == []
