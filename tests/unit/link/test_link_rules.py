"""The link's rules under random interleavings: lost, doubled and reordered messages harm nothing."""

import copy
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.link import Fate, MirrorState, ProposalGate, Stamp
from paceline.link.rules import _AHEAD, _COMMIT, _PROPOSAL, Age, Base

SEQUENCE = 7
VOCAB = 100


@dataclass(frozen=True)
class Open:
    epoch: int
    length: int

    def send(self, state: MirrorState) -> Fate:
        return state.open(self.epoch, self.length)


@dataclass(frozen=True)
class Commit:
    epoch: int
    base_len: int
    num_tokens: int

    def send(self, state: MirrorState) -> Fate:
        return state.commit(Stamp(SEQUENCE, self.epoch, self.base_len), self.num_tokens)


@dataclass(frozen=True)
class Close:
    epoch: int

    def send(self, state: MirrorState) -> Fate:
        return state.close(self.epoch)


Message = Open | Commit | Close


def snapshot(state: MirrorState | ProposalGate) -> tuple[object, ...]:
    return tuple(copy.copy(getattr(state, name)) for name in type(state).__slots__)


small = st.integers(0, 6)
messages = st.one_of(
    # Epoch 0 is never issued: it is what a message says that does not say.
    st.builds(Open, st.integers(0, 4), st.integers(1, 6)),
    st.builds(Commit, st.integers(0, 4), st.integers(0, 8), st.integers(1, 3)),
    st.builds(Close, st.integers(0, 4)),
)


# --- draft side: any messages at all ------------------------------------------------------------------------------


@given(st.lists(messages, max_size=40))
def test_a_refused_message_leaves_the_mirror_unchanged(stream):
    """Any messages in any order: what is not applied changes nothing, and nothing raises."""
    state = MirrorState()
    for message in stream:
        before = snapshot(state)
        fate = message.send(state)
        assert fate is not Fate.MISMATCH
        if fate is not Fate.APPLY:
            assert snapshot(state) == before


@given(st.lists(messages, max_size=40))
def test_epochs_never_fall(stream):
    """Whatever arrives, the mirror's epoch does not go back."""
    state = MirrorState()
    epochs = []
    for message in stream:
        message.send(state)
        epochs.append(state.epoch)
    assert epochs == sorted(epochs)


@given(st.lists(messages, max_size=20), st.integers(1, 4), st.lists(messages, max_size=20))
def test_a_close_wins_over_everything_of_its_epoch_and_before(early, epoch, late):
    """Once an epoch is closed, no open, commit or close up to that epoch is applied, however late it comes."""
    state = MirrorState()
    for message in early:
        message.send(state)
    if state.close(epoch) not in {Fate.APPLY, Fate.DUPLICATE}:
        return
    for message in late:
        closed, before = state.closed, state.epoch
        if message.epoch <= epoch and closed and before == epoch:
            assert message.send(state) in {Fate.STALE, Fate.DUPLICATE}
            assert state.closed
        elif message.epoch <= epoch:
            assert message.send(state) is not Fate.APPLY  # a newer epoch was opened meanwhile
        else:
            message.send(state)


@given(st.lists(messages, max_size=30), messages)
def test_a_message_is_applied_at_most_once(stream, message):
    """A doubled message is never applied twice in a row."""
    state = MirrorState()
    for earlier in stream:
        earlier.send(state)
    if message.send(state) is Fate.APPLY:
        before = snapshot(state)
        assert message.send(state) in {Fate.DUPLICATE, Fate.STALE}
        assert snapshot(state) == before


# --- both sides over a bad wire -----------------------------------------------------------------------------------


def history(draw) -> list[tuple[Message, int]]:
    """What a verify tier sends for one sequence, each with the true length after it (-1: closed)."""
    length, epoch, sent = draw(st.integers(1, 5)), 1, []
    sent.append((Open(epoch, length), length))
    for _ in range(draw(st.integers(0, 12))):
        tokens = draw(st.integers(1, 4))
        if draw(st.integers(0, 5)) == 0:
            epoch, length = epoch + 1, length + tokens
            sent.append((Open(epoch, length), length))
        else:
            sent.append((Commit(epoch, length, tokens), length + tokens))
            length += tokens
    if draw(st.booleans()):
        sent.append((Close(epoch), -1))
    return sent


@st.composite
def bad_wires(draw):
    """A history, and what arrives of it: some lost, some doubled, in any order."""
    sent = history(draw)
    copies = [message for message, _ in sent for _ in range(draw(st.integers(0, 2)))]
    return sent, draw(st.permutations(copies))


@settings(max_examples=400)
@given(bad_wires())
def test_an_open_mirror_is_always_a_moment_of_the_true_history(wire):
    """Lost, doubled, reordered: the mirror stands at a length the sequence really had in that epoch, or is closed."""
    sent, arrived = wire
    moments, epoch = set(), 0
    for message, length in sent:
        epoch = message.epoch
        moments.add((epoch, length))
    state = MirrorState()
    for message in arrived:
        message.send(state)
        if state.epoch and not state.closed:
            assert (state.epoch, state.length) in moments


@given(bad_wires())
def test_a_reopening_heals_whatever_went_wrong(wire):
    """After any disorder an open under the next epoch is applied, and commits in order follow it."""
    sent, arrived = wire
    state = MirrorState()
    for message in arrived:
        message.send(state)
    next_epoch = max(message.epoch for message, _ in sent) + 1
    assert state.open(next_epoch, 50) is Fate.APPLY
    assert state.commit(Stamp(SEQUENCE, next_epoch, 50), 3) is Fate.APPLY
    assert (state.epoch, state.length, state.closed) == (next_epoch, 53, False)


def test_in_order_everything_is_applied():
    """The undisturbed case: open, commits, close."""
    state = MirrorState()
    assert state.open(1, 10) is Fate.APPLY
    assert state.commit(Stamp(SEQUENCE, 1, 10), 4) is Fate.APPLY
    assert state.commit(Stamp(SEQUENCE, 1, 14), 1) is Fate.APPLY
    assert state.close(1) is Fate.APPLY
    assert (state.epoch, state.length, state.closed) == (1, 15, True)


@pytest.mark.parametrize(
    ("stamp", "fate"),
    [
        (Stamp(SEQUENCE, 2, 10), Fate.APPLY),
        (Stamp(SEQUENCE, 2, 9), Fate.DUPLICATE),
        (Stamp(SEQUENCE, 2, 11), Fate.GAP),
        (Stamp(SEQUENCE, 1, 10), Fate.STALE),
        (Stamp(SEQUENCE, 1, 11), Fate.STALE),
        (Stamp(SEQUENCE, 3, 10), Fate.GAP),
        (Stamp(SEQUENCE, 3, 9), Fate.GAP),
    ],
)
def test_fates_of_a_commit(stamp, fate):
    """Stale, duplicate and gap are three different things."""
    state = MirrorState()
    state.open(2, 10)
    assert state.commit(stamp, 1) is fate


@pytest.mark.parametrize("stamp", [Stamp(SEQUENCE, 1, 4), Stamp(SEQUENCE, 1, 0), Stamp(SEQUENCE, 0, 0)])
def test_a_commit_before_any_open_is_a_gap(stamp):
    """It asks for an open; so does one under epoch 0, which is never issued."""
    state = MirrorState()
    assert state.commit(stamp, 1) is Fate.GAP
    assert state.length == 0


@pytest.mark.parametrize("stamp", [Stamp(SEQUENCE, 1, 4), Stamp(SEQUENCE, 0, 0)])
def test_a_proposal_before_any_open_is_a_mismatch(stamp):
    """Nothing was asked, so nothing can be an answer."""
    assert ProposalGate().judge(stamp, [], VOCAB) is Fate.MISMATCH


def test_a_close_before_the_open_is_remembered():
    """Reordered so far that the close comes first: the open of that epoch is then stale, the next one is not."""
    state = MirrorState()
    assert state.close(1) is Fate.APPLY
    assert state.open(1, 5) is Fate.STALE
    assert state.commit(Stamp(SEQUENCE, 1, 5), 1) is Fate.STALE
    assert state.open(2, 5) is Fate.APPLY


def test_the_table_of_blocks_drafted_ahead_is_complete():
    """Every combination of epoch and base length has a fate."""
    assert set(_AHEAD) == set(product(Age, Base))


@pytest.mark.parametrize("table", [_COMMIT, _PROPOSAL])
def test_the_tables_are_complete(table):
    """Every combination of epoch and base length has a fate."""
    assert set(table) == set(product(Age, Age))


# --- verify side --------------------------------------------------------------------------------------------------


class GateMachine(RuleBasedStateMachine):
    """A verify tier that opens and commits, and a wire that brings any proposal, ahead or not, at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = ProposalGate()
        self.text = [1, 2, 3]
        self.asked = 0
        self.last_asked = 0
        self.credit = 0
        self.answered = False
        self.kept: set[tuple[int, ...]] = set()
        self.last_round: tuple[int, ...] = ()
        self.used: set[tuple[int, int]] = set()

    @rule(k=st.integers(0, 4), credit=st.integers(0, 3))
    def open(self, k, credit):
        """The sequence is opened, or opened again: what was drafted ahead under the old epoch is gone."""
        before = self.gate.epoch
        assert self.gate.opened(len(self.text), k, credit) == before + 1
        self.last_asked, self.asked, self.answered, self.credit = self.asked, k, False, credit
        self.kept, self.last_round = set(), ()

    @precondition(lambda self: self.gate.epoch > 0)
    @rule(data=st.data(), k=st.integers(0, 4), credit=st.integers(0, 3))
    def commit(self, data, k, credit):
        """A round committed tokens, perhaps those that a kept block assumed: then that block is the answer."""
        tokens = st.lists(st.integers(0, 1), min_size=1, max_size=2).map(tuple)
        committed = data.draw(st.one_of(tokens, st.sampled_from(sorted(self.kept))) if self.kept else tokens)
        self.text += committed
        hit = self.gate.moved(len(self.text), k, committed, credit)
        assert hit == (k > 0 and committed in self.kept)
        self.last_asked, self.asked, self.answered, self.credit = self.asked, k, hit, credit
        self.kept, self.last_round = set(), committed
        if hit:
            self._use()

    @rule(
        epoch=st.integers(-2, 2),
        offset=st.integers(-3, 3),
        token_ids=st.lists(st.integers(-1, VOCAB), max_size=5),
    )
    def propose(self, epoch, offset, token_ids):
        """A proposal with any stamp and any content: used iff it answers the question that is open now."""
        stamp = Stamp(SEQUENCE, self.gate.epoch + epoch, len(self.text) + offset)
        before = snapshot(self.gate)
        fate = self.gate.judge(stamp, token_ids, VOCAB)
        usable = (
            epoch == 0
            and offset == 0
            and self.gate.epoch > 0
            and not self.answered
            and len(token_ids) <= self.asked
            and all(0 <= token < VOCAB for token in token_ids)
        )
        if usable:
            assert fate is Fate.APPLY
            self._use()
        else:
            assert fate is not Fate.APPLY
            assert snapshot(self.gate) == before

    @rule(
        epoch=st.integers(-1, 1),
        back=st.sampled_from(["live", "last", "elsewhere"]),
        offset=st.integers(-6, 2),
        token_ids=st.lists(st.integers(-1, VOCAB), max_size=5),
        assumed=st.lists(st.integers(0, 1), min_size=1, max_size=2).map(tuple),
        right=st.booleans(),
    )
    def propose_ahead(self, epoch, back, offset, token_ids, assumed, right):
        """Drafted ahead: kept while its outcome is open, used late iff it assumed the actual one, else gone."""
        length = len(self.text)
        if right and self.last_round:
            assumed = self.last_round
        base_len = {"live": length, "last": length - len(self.last_round), "elsewhere": length + offset}[back]
        stamp = Stamp(SEQUENCE, self.gate.epoch + epoch, base_len)
        before = snapshot(self.gate)
        fate = self.gate.judge(stamp, token_ids, VOCAB, assumed)
        sound = (
            epoch == 0
            and self.gate.epoch > 0
            and len(token_ids) <= max(self.asked, self.last_asked)
            and all(0 <= token < VOCAB for token in token_ids)
        )
        keeps = base_len == length and assumed not in self.kept and len(self.kept) < self.credit
        fits = (
            base_len == length - len(self.last_round) < length
            and assumed == self.last_round
            and self.asked > 0
            and not self.answered
        )
        if sound and keeps:
            assert fate is Fate.AHEAD
            self.kept.add(assumed)
        elif sound and fits:
            assert fate is Fate.APPLY
            self._use()
        else:
            assert fate not in {Fate.APPLY, Fate.AHEAD}
            assert snapshot(self.gate) == before

    def _use(self):
        """A question is answered once."""
        self.answered = True
        if self.asked:
            question = (self.gate.epoch, len(self.text))
            assert question not in self.used
            self.used.add(question)

    @invariant()
    def awaits_what_was_asked(self):
        """A round waits only for an answer that was asked for and has not come."""
        assert self.gate.awaiting == (self.gate.epoch > 0 and self.asked > 0 and not self.answered)


TestProposalGate = GateMachine.TestCase
TestProposalGate.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("stamp", "token_ids", "fate"),
    [
        (Stamp(SEQUENCE, 2, 10), [1, 2], Fate.APPLY),
        (Stamp(SEQUENCE, 2, 10), [], Fate.APPLY),
        (Stamp(SEQUENCE, 2, 10), [1, 2, 3, 4, 5], Fate.MISMATCH),
        (Stamp(SEQUENCE, 2, 10), [VOCAB], Fate.MISMATCH),
        (Stamp(SEQUENCE, 2, 10), [-1], Fate.MISMATCH),
        (Stamp(SEQUENCE, 2, 9), [1], Fate.STALE),
        (Stamp(SEQUENCE, 2, 11), [1], Fate.GAP),
        (Stamp(SEQUENCE, 1, 10), [1], Fate.STALE),
        (Stamp(SEQUENCE, 3, 10), [1], Fate.MISMATCH),
    ],
)
def test_fates_of_a_proposal(stamp, token_ids, fate):
    """Stale, gap and mismatch are different counters; an empty proposal is an answer."""
    gate = ProposalGate()
    gate.opened(4, 4)
    assert gate.opened(10, 4) == 2
    assert gate.judge(stamp, token_ids, VOCAB) is fate
    assert gate.awaiting == (fate is not Fate.APPLY)


@pytest.mark.parametrize(
    ("stamp", "assumed", "fate"),
    [
        (Stamp(SEQUENCE, 1, 12), (5, 6), Fate.AHEAD),
        (Stamp(SEQUENCE, 1, 10), (7, 8), Fate.APPLY),
        (Stamp(SEQUENCE, 1, 10), (7, 9), Fate.MISSED),
        (Stamp(SEQUENCE, 1, 10), (7,), Fate.MISSED),
        (Stamp(SEQUENCE, 1, 9), (1, 7, 8), Fate.STALE),
        (Stamp(SEQUENCE, 1, 13), (7,), Fate.GAP),
        (Stamp(SEQUENCE, 2, 12), (7,), Fate.MISMATCH),
        (Stamp(SEQUENCE, 1, 12), (VOCAB,), Fate.MISMATCH),
    ],
)
def test_fates_of_a_block_drafted_ahead(stamp, assumed, fate):
    """Open at 10, 7 and 8 committed: what assumed just that fits, however late it comes."""
    gate = ProposalGate()
    gate.opened(10, 4, credit=1)
    gate.moved(12, 4, (7, 8), credit=1)
    assert gate.judge(stamp, [1, 2], VOCAB, assumed) is fate
    assert gate.awaiting == (fate is not Fate.APPLY)


def test_no_more_blocks_are_kept_than_were_asked_for():
    """A credit for each outcome; the same outcome twice is a duplicate, one too many is refused."""
    gate = ProposalGate()
    gate.opened(10, 4, credit=2)
    stamp = Stamp(SEQUENCE, 1, 10)
    fates = [gate.judge(stamp, [1], VOCAB, assumed) for assumed in ((1,), (1,), (2,), (3,))]
    assert fates == [Fate.AHEAD, Fate.DUPLICATE, Fate.AHEAD, Fate.MISMATCH]
    assert not gate.moved(11, 4, (3,), credit=2)
    assert gate.judge(Stamp(SEQUENCE, 1, 11), [1], VOCAB, (4, 4)) is Fate.AHEAD
    assert gate.moved(13, 4, (4, 4), credit=2)
    assert not gate.awaiting


def test_the_second_answer_is_a_duplicate():
    """Also if it says something else, or nothing."""
    gate = ProposalGate()
    gate.opened(10, 4)
    stamp = Stamp(SEQUENCE, 1, 10)
    assert gate.judge(stamp, [1], VOCAB) is Fate.APPLY
    assert gate.judge(stamp, [2], VOCAB) is Fate.DUPLICATE
    assert gate.judge(stamp, [], VOCAB) is Fate.DUPLICATE


def test_a_malformed_answer_does_not_count_as_the_answer():
    """After a mismatch the right answer may still come."""
    gate = ProposalGate()
    gate.opened(10, 2)
    assert gate.judge(Stamp(SEQUENCE, 1, 10), [VOCAB + 5], VOCAB) is Fate.MISMATCH
    assert gate.awaiting
    assert gate.judge(Stamp(SEQUENCE, 1, 10), [5], VOCAB) is Fate.APPLY
