"""Suffix drafting: whose text serves whom, what is remembered, how much is guessed."""

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.lookup import SuffixLookup
from paceline.lookup.history import places_for
from paceline.lookup.native import native_library
from paceline.lookup.pool import Pool

VOCAB = 2**31
needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C++ compiler at hand")


def make(**changes):
    return SuffixLookup("suffix", **({"pool_bytes": 1 << 20, "min_probability": 0.0} | changes))


def ask(drafter, handle, token_ids, *, k=4, scope="a", prompt_len=1):
    return drafter.guess(handle, token_ids, prompt_len=prompt_len, scope=scope, k=k).token_ids


def finish(drafter, handle, token_ids, **more):
    """One whole life of a sequence, and the quiet moment after it."""
    drafter.open(handle)
    ask(drafter, handle, token_ids, **more)
    drafter.close(handle)
    while drafter.tidy():
        pass


def once(drafter, handle, token_ids, **more):
    """The guesses for a sequence that is then over."""
    drafter.open(handle)
    guesses = ask(drafter, handle, token_ids, **more)
    drafter.close(handle)
    return guesses


def test_the_request_itself_is_looked_up():
    """A suffix that stood before goes on as it did, a period for as long as is asked."""
    assert once(make(pool_bytes=0), 1, [1, 2, 3, 1, 2]) == [3, 1, 2, 3]


def test_an_earlier_output_serves_the_same_tenant():
    """The text of a finished request is found by a later one; its prompt is not kept."""
    drafter = make()
    finish(drafter, 1, [*range(100, 200), *range(20)], prompt_len=100)
    assert once(drafter, 2, [7, 5, 6]) == [7, 8, 9, 10]
    assert once(drafter, 3, [7, 105, 106]) == []
    assert once(drafter, 4, [198, 199]) == [0, 1, 2, 3], "the end of the prompt is: outputs begin there"


def test_no_text_crosses_from_one_tenant_to_another():
    """Neither while the other's request runs nor afterwards; without a scope nothing is remembered at all."""
    drafter = make()
    finish(drafter, 1, list(range(50)), scope="a")
    finish(drafter, 2, list(range(50)), scope="")
    drafter.open(3)
    ask(drafter, 3, list(range(300, 350)), scope="a")
    for scope in ("b", ""):
        assert once(drafter, 4, [9, 5, 6, 7], scope=scope) == []
        assert once(drafter, 5, [9, 305, 306, 307], scope=scope) == []
    assert once(drafter, 6, [9, 5, 6, 7], scope="a") == [8, 9, 10, 11]


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_a_tenant_gets_only_tokens_of_its_own(seed):
    """Random traffic of three tenants with disjoint vocabularies through a pool that overflows: no foreign token, ever."""
    rng = random.Random(seed)
    drafter = make(pool_bytes=4096)
    handles, texts = {}, {}
    for handle in range(60):
        tenant = rng.randrange(3)
        drafter.open(handle)
        handles[handle] = tenant
        texts[handle] = [10 * tenant + rng.randrange(4) for _ in range(rng.randint(1, 40))]
        for other in rng.sample(sorted(handles), min(3, len(handles))):
            tenant = handles[other]
            texts[other] += [10 * tenant + rng.randrange(4) for _ in range(rng.randint(1, 5))]
            guesses = ask(drafter, other, texts[other], k=rng.randint(1, 64), scope=str(tenant))
            assert all(token // 10 == tenant for token in guesses)
        if rng.random() < 0.7:
            gone = rng.choice(sorted(handles))
            drafter.close(gone)
            del handles[gone], texts[gone]
        while rng.random() < 0.7 and drafter.tidy():
            pass


def test_sharing_must_be_asked_for():
    """With one pool for all, every tenant finds what any tenant got."""
    drafter = make(shared=True)
    finish(drafter, 1, list(range(50)), scope="a")
    assert once(drafter, 2, [9, 5, 6, 7], scope="b") == [8, 9, 10, 11]


def test_the_oldest_text_goes_first_and_whole():
    """At the budget's end a new text pushes out the oldest ones, and the numbers of their tenants with them."""
    pool = Pool(4096)
    length = 30
    fit = pool.capacity // places_for(length)
    assert fit >= 2
    texts = [[1000 * i + j for j in range(length)] for i in range(3 * fit)]
    for i, text in enumerate(texts):
        pool.add(f"tenant {i}", text)
        while pool.settle():
            pass
    found = [i for i, text in enumerate(texts) if pool.after(f"tenant {i}", text[:5], 3).token_ids]
    assert found == list(range(2 * fit, 3 * fit))
    assert len(pool._ids) == fit


def test_a_text_longer_than_the_pool_leaves_its_end():
    """Nothing breaks, and what fits is there."""
    pool = Pool(4096)
    pool.add("a", list(range(100_000)))
    while pool.settle():
        pass
    assert pool.after("a", [99_990, 99_991], 3).token_ids == [99_992, 99_993, 99_994]
    assert not pool.after("a", [10, 11], 3).token_ids


def test_texts_go_in_slice_by_slice():
    """A long text does not hold up questions: it takes many quiet moments, and is found as far as it is in."""
    pool = Pool(1 << 20)
    pool.add("a", list(range(1000)))
    assert pool.settle()
    assert pool.after("a", [50, 51], 1).token_ids == [52]
    assert not pool.after("a", [900, 901], 1).token_ids
    assert pool.num_waiting > 0
    while pool.settle():
        pass
    assert pool.after("a", [900, 901], 1).token_ids == [902]
    assert pool.num_waiting == 0


def test_without_quiet_moments_what_waits_stays_bounded(monkeypatch):
    """When nobody ever tidies up, closes put in what is too much."""
    monkeypatch.setattr("paceline.lookup.pool._MOST_WAITING", 500)
    pool = Pool(1 << 20)
    for i in range(50):
        pool.add("a", [1000 * i + j for j in range(100)])
        assert pool.num_waiting <= 500
    assert pool.after("a", [3, 4], 1).token_ids == [5]


def test_the_majority_of_places_decides():
    """Two of three earlier texts went on with 8, so 8 is guessed."""
    drafter = make()
    for handle, after in enumerate([8, 9, 8]):
        finish(drafter, handle, [0, 5, 6, 7, after, 50 + handle])
    assert once(drafter, 10, [4, 5, 6, 7], k=1) == [8]


def test_a_guess_ends_where_it_gets_unlikely():
    """The path's probability falls with every token; a bar cuts it, and 1 lets nothing through."""
    text = [*range(40), *range(3)]
    lengths = [len(once(make(min_probability=bar), 1, text, k=32)) for bar in (0.0, 0.1, 0.5, 1.0)]
    assert lengths[0] == 32
    assert lengths == sorted(lengths, reverse=True)
    assert 0 < lengths[1] < 32
    assert lengths[3] == 0


def test_trust_is_learned_from_what_was_committed():
    """Where guesses were right they get longer; where they were wrong they stop."""
    right, wrong = (make(pool_bytes=0, min_probability=0.3) for _ in range(2))
    for drafter, follows in ((right, True), (wrong, False)):
        for handle in range(40):
            text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
            drafter.open(handle)
            for step in range(5):
                ask(drafter, handle, text, k=8)
                text = text + ([4 + step] if follows else [100 + step])
            drafter.close(handle)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert len(once(right, 99, text, k=8)) > len(once(make(pool_bytes=0, min_probability=0.3), 99, text, k=8))
    assert once(wrong, 99, text, k=8) == []


@pytest.mark.parametrize("k", range(1, 65))
def test_never_more_guesses_than_asked_for(k):
    """Any k, with a long period and a long pooled text to draw from."""
    drafter = make()
    finish(drafter, 1, list(range(200)))
    assert len(once(drafter, 2, [9, 50, 51], k=k)) == k
    assert len(once(drafter, 3, [1, 2, 1, 2], k=k)) == k


def test_odd_ids_and_odd_lengths():
    """The largest ids, a single token, one token repeated thousands of times."""
    drafter = make()
    top = VOCAB - 1
    assert once(drafter, 1, [top]) == []
    assert once(drafter, 2, [top, 0, top]) == [0, top, 0, top]
    assert once(drafter, 3, [7] * 5000, k=64) == [7] * 64


@pytest.mark.parametrize("token", [2**31, 2**32 - 1, 2**40])
def test_a_text_that_cannot_be_read_harms_nobody_else(token):
    """Ids beyond 31 bits: what cannot be looked up stays out of the pool, which goes on serving all others."""
    drafter = make()
    finish(drafter, 1, list(range(50)))
    drafter.open(2)
    for _ in range(2):
        with contextlib.suppress(OverflowError):
            ask(drafter, 2, [5, token, 6, 7])
    drafter.close(2)
    finish(drafter, 3, list(range(200, 250)))
    assert drafter._pool.num_waiting == 0
    assert once(drafter, 4, [9, 5, 6]) == [7, 8, 9, 10]
    assert once(drafter, 5, [9, 205, 206]) == [207, 208, 209, 210]


def test_closes_in_any_order_and_twice():
    """Closing what was never asked, what is unknown, and in reverse: nothing breaks, nothing stays."""
    drafter = make()
    for handle in range(5):
        drafter.open(handle)
    ask(drafter, 3, list(range(30)))
    for handle in (4, 3, 3, 99, 0, 2, 1):
        drafter.close(handle)
    assert not drafter._texts
    while drafter.tidy():
        pass
    assert once(drafter, 7, [9, 5, 6]) == [7, 8, 9, 10]


def test_the_same_history_gives_the_same_guesses():
    """Nothing but the questions and closes decides."""

    def run():
        rng = random.Random(5)
        drafter, said = make(min_probability=0.2), []
        for handle in range(40):
            drafter.open(handle)
            text = [rng.randrange(6) for _ in range(20)]
            for _ in range(5):
                said.append(ask(drafter, handle, text, k=8))
                text = [*text, rng.randrange(6)]
            drafter.close(handle)
            drafter.tidy()
        return said

    assert run() == run()


def test_a_restart_forgets():
    """The pool lives in memory only: a new drafter starts empty."""
    finish(make(), 1, list(range(50)))
    assert once(make(), 2, [9, 5, 6, 7]) == []


@needs_compiler
@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), bar=st.sampled_from([0.0, 0.05, 0.3]), words=st.sampled_from([2, 6, 40]))
def test_compiled_and_python_guess_the_same_to_the_last_bit(seed, bar, words):
    """Random traffic of two tenants, texts long and short, known text and new: tokens and probabilities are equal."""
    rng = random.Random(seed)
    drafters = [
        SuffixLookup("suffix", pool_bytes=16_384, min_probability=bar, native=native)
        for native in (True, False)
    ]
    texts = {}
    for handle in range(30):
        texts[handle] = [rng.randrange(words) for _ in range(rng.choice([1, 5, 60, 700]))]
        for drafter in drafters:
            drafter.open(handle)
        for other in rng.sample(sorted(texts), min(3, len(texts))):
            for _ in range(rng.randint(1, 6)):
                asked = {
                    "prompt_len": 3,
                    "scope": ("a", "b", "")[other % 3],
                    "k": rng.choice([0, 1, 4, 8, 64]),
                }
                one, two = (drafter.guess(other, texts[other], **asked) for drafter in drafters)
                assert one == two
                texts[other] += one.token_ids[: rng.randint(0, 3)] or [rng.randrange(words)]
        if rng.random() < 0.7:
            gone = rng.choice(sorted(texts))
            del texts[gone]
            for drafter in drafters:
                drafter.close(gone)
        while drafters[0].tidy() | drafters[1].tidy():
            pass
