"""The verify side of the link, driven by hand: no socket, a manual clock, a port that remembers."""

import pytest

from paceline.link import Fate, Lookahead, Stamp
from paceline.types import Plan, ProposalOutcome, SamplingParams
from verify_service.drafts import Drafts
from verify_service.link_port import Offer, Proposal, Refusal
from verify_service.sequence import DecodeSpec, Sequence

WAIT_S = 0.5


class Port:
    """A link that writes down what it is told."""

    def __init__(self, endpoint: str = "a") -> None:
        self.endpoint = endpoint
        self.sent: list[tuple] = []

    def open(self, sequence: Sequence, epoch: int, k: int, lookahead: Lookahead) -> None:
        self.lookahead = lookahead
        self.sent.append(("open", sequence.id, epoch, list(sequence.tokens), k))

    def commit(
        self, stamp: Stamp, token_ids: list[int], k: int, round_index: int, lookahead: Lookahead
    ) -> None:
        self.lookahead = lookahead
        self.sent.append(("commit", stamp, token_ids, k))

    def close(self, sequence_id: int, epoch: int) -> None:
        self.sent.append(("close", sequence_id, epoch))

    def flush(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def drafts(clock: Clock) -> Drafts:
    return Drafts(vocab_size=50, wait_s=WAIT_S, clock=clock)


def sequence(plan: Plan | None = None, sequence_id: int = 1) -> Sequence:
    spec = DecodeSpec(
        request_id="r",
        prompt_ids=(1, 2, 3),
        committed_ids=(),
        sampling=SamplingParams(),
        max_tokens=20,
        stop_ids=frozenset(),
        plan=plan or Plan.speculative("ngram", 4, "test"),
    )
    seq = Sequence(sequence_id, spec, lambda event: None, arrived=0.0)
    seq.tokens.append(4)  # the prefill's token
    return seq


@pytest.mark.parametrize(
    ("reads", "unread"), [((), 4), ((0,), 4), ((2,), 3), ((2, 0), 4), ((2, 1), 3), ((9,), 4)]
)
def test_what_a_drafter_never_reads_is_not_unread(reads: tuple[int, ...], unread: int) -> None:
    """Of a prompt only its last tokens, where every replica of the drafter says so; and once it has them, what came since."""
    drafts = Drafts(vocab_size=50, wait_s=WAIT_S, clock=Clock())
    for number, prompt_tokens in enumerate(reads):
        drafts.link_up(Port(str(number)), {"ngram": Offer("1", prompt_tokens=prompt_tokens)})
    seq = sequence()
    assert drafts.unread(seq) == unread
    if reads:
        drafts.advance(seq, 1, 2)
        assert drafts.unread(seq) == 0


def up(drafts: Drafts, endpoint: str = "a") -> Port:
    port = Port(endpoint)
    drafts.link_up(port, {"ngram": Offer("1", max_level=2, shared=False)})
    return port


def proposal(epoch: int, base_len: int, *tokens: int, sequence_id: int = 1) -> Proposal:
    return Proposal(Stamp(sequence_id, epoch, base_len), list(tokens), 0.02)


def test_first_ask_opens_with_all_tokens_and_the_next_commits_what_is_new(drafts: Drafts) -> None:
    """One open, then commits stamped with the length before."""
    port, seq = up(drafts), sequence()
    drafts.advance(seq, 1, 4)
    seq.tokens += [5, 6]
    drafts.advance(seq, 2, 3)
    assert port.sent == [("open", 1, 1, [1, 2, 3, 4], 4), ("commit", Stamp(1, 1, 4), [5, 6], 3)]


def test_an_answer_is_used_once_and_ends_the_waiting(drafts: Drafts, clock: Clock) -> None:
    """Awaited until it comes; then the round has its block and its times."""
    up(drafts)
    seq = sequence()
    drafts.advance(seq, 1, 4)
    assert drafts.awaiting(seq, clock.now) == clock.now + WAIT_S
    drafts.proposed("a", [proposal(1, 4, 7, 8)], clock.now + 0.03)
    assert drafts.awaiting(seq, clock.now) is None
    block = drafts.take(seq, clock.now + 0.04)
    assert block.token_ids == [7, 8]
    assert block.outcome is ProposalOutcome.USED
    assert block.answered_at - block.asked_at == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("bad", "fate"),
    [
        (proposal(1, 3, 7), Fate.STALE),
        (proposal(0, 4, 7), Fate.STALE),
        (proposal(1, 4, 7, sequence_id=99), Fate.STALE),
        (proposal(1, 5, 7), Fate.GAP),
        (proposal(2, 4, 7), Fate.MISMATCH),
        (proposal(1, 4, 50), Fate.MISMATCH),
        (proposal(1, 4, 1, 2, 3, 4, 5), Fate.MISMATCH),
    ],
)
def test_wrong_proposals_are_counted_apart_and_leave_the_question_open(
    drafts: Drafts, clock: Clock, bad: Proposal, fate: Fate
) -> None:
    """Stale, gap and mismatch: a counter each, and the right answer is still taken afterwards."""
    up(drafts)
    seq = sequence()
    drafts.advance(seq, 1, 4)
    drafts.proposed("a", [bad, proposal(1, 4, 9)], clock.now)
    assert drafts.fates == {fate: 1, Fate.APPLY: 1}
    assert drafts.take(seq, clock.now).token_ids == [9]


def test_a_second_answer_is_a_duplicate(drafts: Drafts, clock: Clock) -> None:
    """The first valid answer counts."""
    up(drafts)
    seq = sequence()
    drafts.advance(seq, 1, 4)
    drafts.proposed("a", [proposal(1, 4, 7), proposal(1, 4, 8)], clock.now)
    assert drafts.fates[Fate.DUPLICATE] == 1
    assert drafts.take(seq, clock.now).token_ids == [7]


USUAL_S, LIMIT_S = 0.03, 0.06


def usual(drafts: Drafts, clock: Clock, seq: Sequence) -> None:
    """A link that answers after 30 ms, twelve times."""
    answered_after(drafts, clock, seq, USUAL_S, 12)


def late(drafts: Drafts, clock: Clock, seq: Sequence) -> None:
    """One round that waits in vain."""
    drafts.advance(seq, 1, 4)
    limit = drafts.awaiting(seq, clock.now)
    assert limit is not None
    clock.now = limit
    assert drafts.awaiting(seq, clock.now) is None
    assert drafts.take(seq, clock.now).outcome is ProposalOutcome.LATE
    seq.tokens.append(5)


def test_only_the_first_miss_is_waited_for_and_silence_opens_the_breaker(
    drafts: Drafts, clock: Clock
) -> None:
    """A link that owes an answer costs nothing more: as long again without one is one more miss, three close the mirror."""
    port, seq = up(drafts), sequence()
    usual(drafts, clock, seq)
    late(drafts, clock, seq)
    began, sent = clock.now, len(port.sent)
    while port.sent[-1][0] != "close":
        drafts.advance(seq, 1, 4)
        assert drafts.awaiting(seq, clock.now) is None
        assert drafts.take(seq, clock.now).outcome is ProposalOutcome.UNAVAILABLE
        seq.tokens.append(5)
        clock.now += 0.01
        assert clock.now < began + 1
    assert clock.now - began == pytest.approx(2 * LIMIT_S, abs=0.02)
    assert [entry[0] for entry in port.sent[sent:]] == ["commit", "close"]  # asked once, and left alone


def test_an_answer_ends_the_doubt(drafts: Drafts, clock: Clock) -> None:
    """One slow answer costs one wait: what was asked next is answered, and the round after that waits again."""
    up(drafts)
    seq = sequence()
    usual(drafts, clock, seq)
    late(drafts, clock, seq)
    drafts.advance(seq, 1, 4)
    asked = len(seq.tokens)
    clock.now += 0.01
    seq.tokens.append(5)
    drafts.proposed("a", [proposal(1, asked, 7)], clock.now)
    assert drafts.looked(seq) is None, "nothing that the controller asked for"
    drafts.advance(seq, 1, 4)
    assert drafts.awaiting(seq, clock.now) is not None


def test_rows_that_wait_together_miss_together(drafts: Drafts, clock: Clock) -> None:
    """One pause of a drafter with eight sequences is one miss, not eight."""
    port = up(drafts)
    rows = [sequence(sequence_id=i) for i in range(1, 9)]
    usual(drafts, clock, rows[0])
    for row in rows:
        drafts.advance(row, 1, 4)
    clock.now += LIMIT_S
    assert {drafts.take(row, clock.now).outcome for row in rows} == {ProposalOutcome.LATE}
    drafts.advance(rows[0], 1, 4)
    assert not any(entry[0] == "close" for entry in port.sent)


def opened(drafts: Drafts, clock: Clock, seq: Sequence) -> None:
    """The breaker is open."""
    usual(drafts, clock, seq)
    late(drafts, clock, seq)
    for _ in range(2):
        clock.now += LIMIT_S
        drafts.advance(seq, 1, 4)
        seq.tokens.append(5)
    assert drafts.take(seq, clock.now).outcome is ProposalOutcome.UNAVAILABLE


def probe(drafts: Drafts, clock: Clock, seq: Sequence, port: "Port", answer_s: float) -> None:
    """The sequence asks without waiting; the answer comes."""
    drafts.advance(seq, 1, 4)
    assert drafts.awaiting(seq, clock.now) is None
    epoch = next(entry[2] for entry in reversed(port.sent) if entry[0] == "open")
    base_len = len(seq.tokens)
    assert port.sent[-1][0] in {"open", "commit"}
    clock.now += answer_s
    drafts.proposed("a", [proposal(epoch, base_len, 7)], clock.now)
    seq.tokens.append(5)


def test_a_probe_is_not_waited_for_and_answers_twice(drafts: Drafts, clock: Clock) -> None:
    """After the back-off: the first answer, which read everything, may take its time; the second may not."""
    port, seq = up(drafts), sequence()
    opened(drafts, clock, seq)
    sent = len(port.sent)
    drafts.advance(seq, 1, 4)
    assert len(port.sent) == sent, "nobody asks during the back-off"
    clock.now += 5
    probe(drafts, clock, seq, port, 0.4)
    assert port.sent[-1][0] == "open"
    probe(drafts, clock, seq, port, USUAL_S)
    assert port.sent[-1][0] == "commit"
    drafts.advance(seq, 1, 4)
    assert drafts.awaiting(seq, clock.now) is not None


def test_a_drafter_that_stays_slow_stays_on_probation(drafts: Drafts, clock: Clock) -> None:
    """Its answers come, 200 ms late: no row ever waits for them, however often it is tried."""
    port, seq = up(drafts), sequence()
    opened(drafts, clock, seq)
    for _ in range(5):
        clock.now += 5
        probe(drafts, clock, seq, port, 0.2)
        probe(drafts, clock, seq, port, 0.2)
        assert port.sent[-1][0] == "close"
    clock.now += 5
    probe(drafts, clock, seq, port, 0.2)
    probe(drafts, clock, seq, port, USUAL_S)
    drafts.advance(seq, 1, 4)
    assert drafts.awaiting(seq, clock.now) is not None


def test_a_probe_without_an_answer_ends(drafts: Drafts, clock: Clock) -> None:
    """Also where its sequence has nothing to ask any more: then another one may probe."""
    port, seq, other = up(drafts), sequence(), sequence(sequence_id=2)
    opened(drafts, clock, seq)
    clock.now += 5
    drafts.advance(seq, 1, 4)
    seq.tokens.append(5)
    clock.now += 2 * WAIT_S
    drafts.advance(seq, 1, 4)
    assert port.sent[-1][0] == "close"
    clock.now += 5
    drafts.advance(seq, 1, 4)
    clock.now += 0.1
    drafts.proposed("a", [proposal(3, len(seq.tokens), 7)], clock.now)
    drafts.advance(seq, 1, 0)
    assert port.sent[-1][0] == "close"
    drafts.advance(other, 1, 4)
    assert port.sent[-1][:3] == ("open", 2, 1)


def test_a_long_prompt_is_read_while_the_row_goes_on(drafts: Drafts, clock: Clock) -> None:
    """The row stands back as long as for any answer, then decodes plainly; that is no miss. Others are waited for."""
    port, seq, other = up(drafts), sequence(), sequence(sequence_id=2)
    usual(drafts, clock, other)
    late(drafts, clock, seq)
    drafts.advance(seq, 1, 4)
    assert drafts.take(seq, clock.now).outcome is ProposalOutcome.UNAVAILABLE
    drafts.advance(other, 1, 4)
    assert drafts.awaiting(other, clock.now) is not None
    base_len = len(seq.tokens)
    for _ in range(3):
        seq.tokens.append(5)
        drafts.advance(seq, 1, 4)
    clock.now += 0.3
    drafts.proposed("a", [proposal(1, base_len, 7)], clock.now)
    drafts.advance(seq, 1, 4)
    assert drafts.awaiting(seq, clock.now) is not None
    assert not any(entry[0] == "close" for entry in port.sent)


def test_nobody_waits_longer_than_a_block_can_save(drafts: Drafts, clock: Clock) -> None:
    """Four guesses beside steps of 28 ms: 112 ms, though 200 are usual."""
    up(drafts)
    seq = sequence()
    answered_after(drafts, clock, seq, 0.2, 12)
    drafts.stepped(0.028)
    drafts.advance(seq, 1, 4)
    assert drafts.awaiting(seq, clock.now) == pytest.approx(clock.now + 4 * 0.028)


def test_a_lost_link_means_plain_rounds_and_a_new_one_a_higher_epoch(drafts: Drafts, clock: Clock) -> None:
    """I7: no waiting without a drafter; the mirror starts over from all committed tokens."""
    up(drafts)
    seq = sequence()
    drafts.advance(seq, 1, 4)
    drafts.link_down("a")
    assert drafts.awaiting(seq, clock.now) is None
    assert drafts.take(seq, clock.now).outcome is ProposalOutcome.UNAVAILABLE
    seq.tokens.append(5)
    port = up(drafts)
    drafts.advance(seq, 1, 4)
    assert port.sent == [("open", 1, 2, [1, 2, 3, 4, 5], 4)]
    drafts.proposed("a", [proposal(1, 5, 7), proposal(2, 5, 8)], clock.now)
    assert drafts.take(seq, clock.now).token_ids == [8]


def test_out_of_sync_is_opened_again_and_a_final_refusal_is_not(drafts: Drafts, clock: Clock) -> None:
    """A resync costs one plain round; a final refusal makes the request plain on this link."""
    port = up(drafts)
    seq = sequence()
    drafts.advance(seq, 1, 4)
    drafts.refused("a", 1, 1, Refusal.RESYNC)
    assert drafts.take(seq, clock.now).outcome is ProposalOutcome.UNAVAILABLE
    drafts.advance(seq, 1, 4)
    assert port.sent[-1] == ("open", 1, 2, [1, 2, 3, 4], 4)
    drafts.refused("a", 1, 2, Refusal.FINAL)
    sent = len(port.sent)
    drafts.advance(seq, 1, 4)
    assert len(port.sent) == sent


def test_no_room_on_the_draft_side_is_tried_again_later(drafts: Drafts, clock: Clock) -> None:
    """Capacity comes back."""
    port = up(drafts)
    seq = sequence()
    drafts.advance(seq, 1, 4)
    drafts.refused("a", 1, 1, Refusal.LATER)
    drafts.advance(seq, 1, 4)
    assert port.sent[-1][0] == "close"
    clock.now += 2
    drafts.advance(seq, 1, 4)
    assert port.sent[-1][:3] == ("open", 1, 2)


def test_refusals_of_an_older_epoch_or_another_link_change_nothing(drafts: Drafts, clock: Clock) -> None:
    """Late news about what is over is stale."""
    up(drafts)
    seq = sequence()
    drafts.advance(seq, 1, 4)
    drafts.refused("a", 1, 7, Refusal.FINAL)
    drafts.refused("b", 1, 1, Refusal.FINAL)
    drafts.refused("a", 2, 1, Refusal.FINAL)
    assert drafts.fates[Fate.STALE] == 3
    assert drafts.awaiting(seq, clock.now) is not None


def test_plain_sequences_never_touch_the_link(drafts: Drafts, clock: Clock) -> None:
    """k = 0 pays nothing for speculation (I3)."""
    port = up(drafts)
    seq = sequence(Plan.plain("test"))
    drafts.advance(seq, 1, 0)
    assert drafts.take(seq, clock.now).outcome is ProposalOutcome.NONE
    drafts.close(seq)
    assert port.sent == []


def test_sequences_spread_over_replicas_and_move_when_one_goes(drafts: Drafts, clock: Clock) -> None:
    """The replica with the fewest sequences is asked; the survivors take over."""
    a, b = up(drafts, "a"), up(drafts, "b")
    first, second = sequence(sequence_id=1), sequence(sequence_id=2)
    drafts.advance(first, 1, 4)
    drafts.advance(second, 1, 4)
    assert len(a.sent) == len(b.sent) == 1
    drafts.link_down("a")
    drafts.advance(first, 1, 4)
    assert b.sent[-1] == ("open", 1, 2, [1, 2, 3, 4], 4)


def test_closing_tells_the_mirror_once(drafts: Drafts, clock: Clock) -> None:
    """A close for what was open, and late proposals are stale."""
    port = up(drafts)
    seq = sequence()
    drafts.advance(seq, 1, 4)
    drafts.close(seq)
    drafts.close(seq)
    drafts.proposed("a", [proposal(1, 4, 7)], clock.now)
    assert [entry[0] for entry in port.sent] == ["open", "close"]
    assert drafts.fates == {Fate.STALE: 1}


def test_a_look_is_not_waited_for_and_compared_with_what_was_committed(drafts: Drafts, clock: Clock) -> None:
    """The round is plain; the guess that comes later is scored by the tokens committed since, once."""
    port = up(drafts)
    seq = sequence()
    drafts.advance(seq, 1, 4, wait=False)
    assert port.sent == [("open", 1, 1, [1, 2, 3, 4], 4)]
    assert drafts.awaiting(seq, clock.now) is None
    assert drafts.take(seq, clock.now).outcome is ProposalOutcome.NONE
    seq.tokens += [7]
    drafts.proposed("a", [proposal(1, 4, 7, 8, 9)], clock.now)
    assert drafts.looked(seq)[:3] == (3, 1, 1)
    assert drafts.looked(seq) is None
    drafts.advance(seq, 1, 0)
    drafts.proposed("a", [proposal(1, 4, 7, 8, 9)], clock.now)
    assert drafts.fates[Fate.STALE] == 1


def test_a_look_that_is_never_answered_counts_as_missed(drafts: Drafts, clock: Clock) -> None:
    """A drafter that hangs is found out by looks as well: the breaker opens after three."""
    port = up(drafts)
    seq = sequence()
    for _ in range(4):
        drafts.advance(seq, 1, 4, wait=False)
        seq.tokens.append(5)
    assert port.sent[-1] == ("close", 1, 1)


def test_who_asks_nothing_spares_the_messages_until_it_asks(drafts: Drafts, clock: Clock) -> None:
    """Nothing is opened for a sequence that never asks, and a mirror hears of several commits at once."""
    port = up(drafts)
    seq = sequence()
    drafts.advance(seq, 1, 0)
    assert port.sent == []
    drafts.advance(seq, 1, 2)
    for token in (5, 6, 7):
        seq.tokens.append(token)
        drafts.advance(seq, 1, 0)
    assert len(port.sent) == 1
    seq.tokens.append(8)
    drafts.advance(seq, 1, 3)
    assert port.sent[1:] == [("commit", Stamp(1, 1, 4), [5, 6, 7, 8], 3)]
    for token in range(40):
        seq.tokens.append(token)
        drafts.advance(seq, 1, 0)
    assert [len(entry[2]) for entry in port.sent[2:]] == [32]


def ahead(base_len: int, assumed: tuple[int, ...], *tokens: int, epoch: int = 1) -> Proposal:
    return Proposal(Stamp(1, epoch, base_len), list(tokens), 0.02, draft_s=0.02, assumed_ids=assumed)


@pytest.fixture
def level_2(clock: Clock) -> Drafts:
    return Drafts(vocab_size=50, wait_s=WAIT_S, clock=clock, fixed_lookahead=Lookahead(2, 2))


def test_a_block_drafted_ahead_is_ready_when_its_outcome_comes(level_2: Drafts, clock: Clock) -> None:
    """Kept while the round is verified; nothing is awaited afterwards, and no time is exposed."""
    port, seq = up(level_2), sequence()
    level_2.advance(seq, 1, 4)
    assert port.lookahead == Lookahead(2, 2)
    level_2.proposed("a", [proposal(1, 4, 7, 8)], clock.now + 0.03)
    assert level_2.take(seq, clock.now).token_ids == [7, 8]
    level_2.proposed("a", [ahead(4, (7, 9), 20, 21), ahead(4, (7, 8, 9), 30)], clock.now + 0.04)
    clock.now += 0.06
    seq.tokens += [7, 9]
    level_2.advance(seq, 2, 4)
    assert level_2.awaiting(seq, clock.now) is None
    block = level_2.take(seq, clock.now)
    assert (block.token_ids, block.ahead_hit, block.ahead_level) == ([20, 21], True, 2)
    assert block.answered_at == block.asked_at
    assert level_2.fates == {Fate.APPLY: 1, Fate.AHEAD: 2}


def test_a_block_that_comes_late_is_used_if_its_outcome_was_the_actual_one(level_2: Drafts, clock: Clock):
    """After the verdict: the fitting one answers the question, the others have missed."""
    up(level_2)
    seq = sequence()
    level_2.advance(seq, 1, 4)
    level_2.proposed("a", [proposal(1, 4, 7)], clock.now)
    level_2.take(seq, clock.now)
    seq.tokens += [7, 9]
    level_2.advance(seq, 2, 1)
    assert level_2.awaiting(seq, clock.now) is not None
    level_2.proposed("a", [ahead(4, (8,), 20), ahead(4, (7, 9), 30, 31)], clock.now)
    assert level_2.take(seq, clock.now).token_ids == [30]  # cut to what was asked for
    assert level_2.fates[Fate.MISSED] == 1


def test_what_was_drafted_ahead_goes_with_the_link_and_with_the_epoch(level_2: Drafts, clock: Clock) -> None:
    """After a reconnection nothing of before is used."""
    up(level_2)
    seq = sequence()
    level_2.advance(seq, 1, 4)
    level_2.proposed("a", [proposal(1, 4, 7), ahead(4, (7, 9), 30)], clock.now)
    up(level_2)
    seq.tokens += [7, 9]
    level_2.advance(seq, 2, 4)
    level_2.proposed("a", [ahead(4, (7, 9), 30)], clock.now)
    assert level_2.take(seq, clock.now).outcome is ProposalOutcome.LATE


def test_nothing_is_drafted_ahead_on_shared_cores(drafts: Drafts, clock: Clock) -> None:
    """Level 0, whatever the drafter could do."""
    port = Port()
    drafts.link_up(port, {"ngram": Offer("1", max_level=2, shared=True)})
    seq = sequence()
    for _ in range(20):
        drafts.stepped(0.028)
        drafts.advance(seq, 1, 4)
        drafts.proposed("a", [proposal(1, len(seq.tokens), 7, 8, 9, 9)], clock.now + 0.03)
        drafts.take(seq, clock.now)
        seq.tokens.append(9)
        assert port.lookahead.level == 0


def answered_after(drafts: Drafts, clock: Clock, seq: Sequence, seconds: float, rounds: int) -> None:
    for _ in range(rounds):
        drafts.advance(seq, 1, 4)
        clock.now += seconds
        drafts.proposed("a", [proposal(1, len(seq.tokens), 7, sequence_id=seq.id)], clock.now)
        drafts.take(seq, clock.now)
        seq.tokens.append(9)


def test_a_row_stands_back_twice_as_long_as_is_usual_and_not_for_a_drafter_that_hangs(
    drafts: Drafts, clock: Clock
) -> None:
    """30 ms are usual, so 60 ms are waited and not half a second, for the first answer too."""
    up(drafts)
    seq = sequence()
    answered_after(drafts, clock, seq, 0.03, 12)
    drafts.advance(seq, 1, 4)
    assert drafts.awaiting(seq, clock.now) == pytest.approx(clock.now + 0.06)
    assert drafts.expected_by(seq) == pytest.approx(clock.now + 0.03)
    other = sequence(sequence_id=2)
    drafts.advance(other, 1, 4)
    assert drafts.awaiting(other, clock.now) == pytest.approx(clock.now + 0.06)


def test_a_drafter_that_turns_slower_is_waited_for_longer_by_and_by(drafts: Drafts, clock: Clock) -> None:
    """What was waited for in vain counts as longer than it was."""
    up(drafts)
    seq = sequence()
    usual(drafts, clock, seq)
    late(drafts, clock, seq)
    drafts.advance(seq, 1, 4)
    drafts.proposed("a", [proposal(1, len(seq.tokens), 7)], clock.now)
    seq.tokens.append(9)
    drafts.advance(seq, 1, 4)
    assert drafts.awaiting(seq, clock.now) > clock.now + 0.12
