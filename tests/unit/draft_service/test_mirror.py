"""Which entries of a link count, what a refusal leaves behind, and that one sequence's fault stays its own."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service import mirror as mirror_module
from draft_service.mirror import MAX_K, Ask, LinkMirrors, Opening
from draft_service.news import Close, Extend, Open
from draft_service.refusal import RefusalReason
from paceline.link import Fate, Stamp
from paceline.types import SamplingParams

VOCAB = 100


class Inbox:
    """Stands where a worker's thread is: keeps what it was told."""

    def __init__(self):
        self.events = []

    def post(self, events):
        self.events += events

    def tokens(self):
        """Live sequences as the worker would know them."""
        live = {}
        for event in self.events:
            match event:
                case Open():
                    live[event.handle] = list(event.token_ids)
                case Extend():
                    live[event.handle] += event.token_ids
                case Close():
                    del live[event.handle]
        return live


class Link:
    def __init__(self):
        self.inbox, self.fates = Inbox(), Counter()
        self.mirrors = LinkMirrors(
            vocab_size=VOCAB,
            workers={"ngram": self.inbox},
            handles=itertools.count(1),
            deliver=lambda answers: None,
            fates=self.fates,
        )

    def open(self, sequence_id=1, epoch=1, token_ids=(1, 2, 3), *, drafter="ngram", prompt_len=1, k=4):
        opening = Opening(drafter, list(token_ids), prompt_len, SamplingParams(), None)
        refusal = self.mirrors.open(sequence_id, epoch, opening, Ask(k, 0), 0.0)
        self.mirrors.flush()
        return refusal

    def commit(self, sequence_id=1, epoch=1, base_len=3, token_ids=(4,), *, k=4):
        stamp = Stamp(sequence_id, epoch, base_len)
        refusal = self.mirrors.commit(stamp, list(token_ids), Ask(k, 1), 0.0)
        self.mirrors.flush()
        return refusal

    def close(self, sequence_id=1, epoch=1):
        self.mirrors.close(sequence_id, epoch)
        self.mirrors.flush()


@pytest.fixture
def link():
    return Link()


def test_open_commit_close(link):
    """The worker is told tokens and questions; after the close nothing is left."""
    assert link.open() is None
    assert link.commit(token_ids=[4, 5]) is None
    assert link.commit(base_len=5, token_ids=[6], k=0) is None
    opened, first, second = link.inbox.events
    assert opened.question.k == 4
    assert (first.question.k, first.question.round_index) == (4, 1)
    assert second.question is None
    assert link.inbox.tokens() == {1: [1, 2, 3, 4, 5, 6]}
    link.close()
    assert link.inbox.tokens() == {}
    assert len(link.mirrors) == 0
    assert not link.fates


def test_gap_is_refused_once_and_a_higher_epoch_heals_it(link):
    """A missed commit drops the mirror; what was on its way is stale; opening under epoch + 1 works."""
    link.open()
    refusal = link.commit(base_len=7)
    assert (refusal.epoch, refusal.reason) == (1, RefusalReason.OUT_OF_SYNC)
    assert "base_len 7" in refusal.message
    assert "3 tokens" in refusal.message
    assert link.commit(base_len=8) is None, "one fault, one refusal"
    assert link.open() is None, "the same epoch cannot come back"
    assert link.inbox.tokens() == {}
    assert link.open(epoch=2, token_ids=[1, 2, 3, 4]) is None
    assert link.commit(epoch=2, base_len=4, token_ids=[5]) is None
    assert list(link.inbox.tokens().values()) == [[1, 2, 3, 4, 5]]
    assert link.fates == {Fate.GAP: 1, Fate.STALE: 2}


def test_commit_to_a_sequence_never_opened(link):
    """It is out of sync, under the epoch that it named."""
    refusal = link.commit(sequence_id=5, epoch=3)
    assert (refusal.sequence_id, refusal.epoch, refusal.reason) == (5, 3, RefusalReason.OUT_OF_SYNC)
    assert link.open(sequence_id=5, epoch=3) is None
    assert len(link.mirrors) == 0
    link.open(sequence_id=5, epoch=4)
    assert len(link.mirrors) == 1


def test_stale_and_duplicate_entries_change_nothing(link):
    """They are counted, apart, and nothing is answered."""
    link.open(epoch=2)
    link.commit(epoch=2)
    before = list(link.inbox.events)
    assert link.open(epoch=1) is None
    assert link.open(epoch=2) is None
    assert link.commit(epoch=1, base_len=4) is None
    assert link.commit(epoch=2, base_len=3) is None
    link.close(epoch=1)
    assert link.inbox.events == before
    assert link.fates == {Fate.STALE: 3, Fate.DUPLICATE: 2}


def test_a_broken_entry_of_an_old_epoch_is_only_stale(link):
    """Stamps are judged before contents: a broken latecomer cannot harm the live sequence."""
    link.open(epoch=2)
    assert link.open(epoch=1, token_ids=[]) is None
    assert link.commit(epoch=1, token_ids=[VOCAB + 1]) is None
    assert len(link.mirrors) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [1, VOCAB]}, f"{VOCAB}, the vocabulary ends at {VOCAB - 1}"),
        ({"prompt_len": 0}, "prompt_len is 0, expected 1 to 3"),
        ({"prompt_len": 4}, "prompt_len is 4"),
        ({"k": MAX_K + 1}, f"at most {MAX_K}"),
        ({"epoch": 0}, "epochs start at 1"),
        ({"drafter": "oracle"}, "no drafter 'oracle' here; there are: ngram"),
    ],
)
def test_malformed_open_harms_only_its_sequence(link, fault, words):
    """Refused in words, the neighbour goes on, and the sequence may come back under a higher epoch."""
    link.open(sequence_id=2)
    refusal = link.open(sequence_id=1, **fault)
    assert words in refusal.message
    expected = RefusalReason.UNKNOWN_DRAFTER if "drafter" in fault else RefusalReason.MALFORMED
    assert (refusal.sequence_id, refusal.reason) == (1, expected)
    assert link.commit(sequence_id=2) is None
    assert link.inbox.tokens() == {1: [1, 2, 3, 4]}
    assert link.open(sequence_id=1, epoch=2) is None
    assert len(link.mirrors) == 2


@pytest.mark.parametrize("fault", [{"token_ids": []}, {"token_ids": [VOCAB]}, {"k": MAX_K + 1}])
def test_malformed_commit_drops_its_sequence(link, fault):
    """The mirror cannot know what was meant, so it lets go."""
    link.open(sequence_id=1)
    link.open(sequence_id=2)
    refusal = link.commit(sequence_id=1, **fault)
    assert (refusal.sequence_id, refusal.reason) == (1, RefusalReason.MALFORMED)
    assert link.inbox.tokens() == {2: [1, 2, 3]}


def test_epoch_zero_never_touches_a_live_sequence(link):
    """No epoch 0 was ever issued: refused, counted as a mismatch, nothing else."""
    link.open()
    assert link.commit(epoch=0, base_len=0).reason is RefusalReason.MALFORMED
    assert link.open(epoch=0).reason is RefusalReason.MALFORMED
    assert link.commit(sequence_id=9, epoch=0, base_len=0).reason is RefusalReason.MALFORMED
    link.close(epoch=0)
    assert link.inbox.tokens() == {1: [1, 2, 3]}
    assert link.fates[Fate.MISMATCH] == 3


def test_reopening_replaces_the_mirror(link):
    """A higher epoch closes the old copy at the worker before the new one opens."""
    link.open(token_ids=[1])
    link.open(epoch=2, token_ids=[5, 6])
    assert [type(event) for event in link.inbox.events] == [Open, Close, Open]
    assert link.inbox.tokens() == {2: [5, 6]}
    assert link.mirrors.by_handle(1) is None
    assert link.mirrors.by_handle(2).epoch == 2


def test_close_wins_over_a_late_open_or_commit(link):
    """Whatever was sent before the close and arrives after it is stale."""
    link.close(sequence_id=1, epoch=2)
    assert link.open(sequence_id=1, epoch=2) is None
    assert link.commit(sequence_id=1, epoch=2) is None
    assert len(link.mirrors) == 0
    assert link.fates == {Fate.STALE: 2}


def test_refusal_by_the_worker(link):
    """The mirror is gone, commits on their way are stale, a higher epoch starts afresh."""
    link.open()
    refusal = link.mirrors.refused_by_worker(link.mirrors.by_handle(1), RefusalReason.CAPACITY, "full")
    assert (refusal.sequence_id, refusal.epoch, refusal.message) == (1, 1, "full")
    assert link.commit() is None
    assert len(link.mirrors) == 0
    assert link.open(epoch=2) is None
    assert len(link.mirrors) == 1


def test_closed_sequences_are_forgotten_in_the_end(link, monkeypatch):
    """A long-lived link keeps a bounded memory of what is over."""
    monkeypatch.setattr(mirror_module, "MAX_CLOSED", 10)
    for sequence_id in range(1000):
        link.open(sequence_id=sequence_id)
        link.close(sequence_id=sequence_id)
    assert len(link.mirrors._closed) == 10
    assert not link.mirrors._by_handle
    assert link.commit(sequence_id=999).__class__ is type(None), "the late ones are still known"


def test_release_frees_everything(link):
    """The end of a link closes each sequence at the worker."""
    for sequence_id in range(50):
        link.open(sequence_id=sequence_id)
    link.mirrors.release()
    assert link.inbox.tokens() == {}
    assert len(link.mirrors) == 0


entries = st.lists(
    st.tuples(
        st.sampled_from(["open", "commit", "close"]),
        st.integers(0, 2),  # sequence
        st.integers(0, 3),  # epoch
        st.integers(0, 5),  # base_len
        st.lists(st.integers(0, VOCAB + 3), max_size=3),
        st.sampled_from([0, 1, MAX_K, MAX_K + 1]),
    ),
    max_size=40,
)


@given(entries)
def test_any_entries_in_any_order(sequence):
    """Whatever arrives: nothing raises, and the worker holds exactly the open mirrors, at their lengths."""
    link = Link()
    for kind, sequence_id, epoch, base_len, token_ids, k in sequence:
        match kind:
            case "open":
                link.open(sequence_id, epoch, token_ids, k=k)
            case "commit":
                link.commit(sequence_id, epoch, base_len, token_ids, k=k)
            case "close":
                link.close(sequence_id, epoch)
        live = {handle: len(token_ids) for handle, token_ids in link.inbox.tokens().items()}
        assert live == {m.handle: m.state.length for m in link.mirrors._open.values()}
        assert set(live) == set(link.mirrors._by_handle)
        assert not set(link.mirrors._open) & set(link.mirrors._closed)
