"""Both ends of the link joined by a wire that loses, doubles, reorders and delays, at every level: the real rules, no sockets.

Verify side ``Drafts``, draft side ``LinkMirrors`` and ``DraftWorker`` (its thread's work done by hand), the simulated drafter.
"""

import functools
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.base import DraftRequest
from draft_service.drafters.simulated import SimulatedDrafter
from draft_service.mirror import Ask, LinkMirrors, Opening
from draft_service.news import Drafted
from draft_service.refusal import Refusal as DraftRefusal
from draft_service.refusal import RefusalReason
from draft_service.worker import DraftWorker
from paceline.config import SimulationConfig
from paceline.engine.simulated import Source
from paceline.link import Lookahead, Stamp
from paceline.model_store import resolve_model_dir
from paceline.sampling import TokenRow, choose
from paceline.simulation import VOCAB_SIZE
from paceline.tokenizer import Tokenizer
from paceline.types import Plan, SamplingParams
from verify_service.drafts import Drafts
from verify_service.link_port import Offer, Proposal, Refusal
from verify_service.sequence import DecodeSpec, Sequence

K = 3
CONFIG = SimulationConfig(time_scale=0, agreement=0.7)
SAMPLING = SamplingParams(temperature=0.8, seed=3)
TOKENIZER = Tokenizer.load(resolve_model_dir("simulated"))
SOURCE = Source(TOKENIZER)
_REASONS = {RefusalReason.OUT_OF_SYNC: Refusal.RESYNC, RefusalReason.CAPACITY: Refusal.LATER}
LEVELS = {0: Lookahead(), 1: Lookahead(1), 2: Lookahead(2, 2)}


def guesses(tokens: list[int], prompt_len: int, k: int) -> list[int]:
    """What the drafter says after ``tokens``: it has no state that could matter."""
    drafter = SimulatedDrafter("simulated", CONFIG, TOKENIZER)
    drafter.open(1)
    (found,) = drafter.propose([DraftRequest(1, tokens, prompt_len, SAMPLING, k, VOCAB_SIZE)])
    assert found is not None
    return found


def own_token(tokens: list[int]) -> int:
    """What the target commits after ``tokens``."""
    return _own_token(tuple(tokens[-3:]), len(tokens))


@functools.cache
def _own_token(last_ids: tuple[int, ...], position: int) -> int:
    logits = torch.from_numpy(SOURCE.logits(last_ids, position)).unsqueeze(0)
    return choose(logits, [TokenRow(SAMPLING, position)])[0]


class DraftEnd:
    """A draft replica: mirrors and the work of its thread."""

    def __init__(self) -> None:
        self.worker = DraftWorker("w", {"simulated": SimulatedDrafter("simulated", CONFIG, TOKENIZER)})
        self.answers: list[Drafted] = []
        self.mirrors = LinkMirrors(
            vocab_size=VOCAB_SIZE,
            workers={"simulated": self.worker},
            handles=itertools.count(1),
            deliver=lambda answers: self.answers.extend(one for one in answers if isinstance(one, Drafted)),
            fates=Counter(),
        )

    def work(self) -> None:
        """One turn of the thread."""
        worker = self.worker
        if not (worker._inbox or worker._asking or worker._looking):
            return
        news = worker._take()
        assert news is not None
        worker._apply(news)
        worker._draft("simulated")
        if not worker._asking:
            worker._draft_ahead()


@dataclass
class World:
    """The wire holds single messages both ways; ``now`` is the clock of both ends."""

    level: int
    now: float = 100.0
    down: deque = field(default_factory=deque)  # toward the draft side
    up: deque = field(default_factory=deque)
    endpoint: str = "a"

    def __post_init__(self) -> None:
        self.drafts = Drafts(
            vocab_size=VOCAB_SIZE,
            wait_s=0.2,
            clock=lambda: self.now,
            fixed_lookahead=LEVELS[self.level],
        )
        spec = DecodeSpec(
            request_id="r",
            prompt_ids=(5, 6, 7),
            committed_ids=(),
            sampling=SAMPLING,
            max_tokens=4000,
            stop_ids=frozenset(),
            plan=Plan.speculative("simulated", K, "test", k_fixed=True),
        )
        self.sequence = Sequence(1, spec, lambda event: None, arrived=0.0)
        self.sequence.tokens.append(own_token(self.sequence.tokens))
        self.used = self.hits = 0
        self.restart()
        self.drafts.advance(self.sequence, 1, K)

    # --- LinkPort -----------------------------------------------------------------------------------------------

    def open(self, sequence: Sequence, epoch: int, k: int, lookahead: Lookahead) -> None:
        opening = Opening("simulated", list(sequence.tokens), 3, SAMPLING, None)
        ask = Ask(k, 0, lookahead)
        self.down.append(lambda end: end.mirrors.open(sequence.id, epoch, opening, ask, self.now))

    def commit(
        self, stamp: Stamp, token_ids: list[int], k: int, round_index: int, lookahead: Lookahead
    ) -> None:
        tokens, ask = list(token_ids), Ask(k, round_index, lookahead)
        self.down.append(lambda end: end.mirrors.commit(stamp, tokens, ask, self.now))

    def close(self, sequence_id: int, epoch: int) -> None:
        self.down.append(lambda end: end.mirrors.close(sequence_id, epoch))

    def flush(self) -> None:
        pass

    # --- what happens -------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """The draft replica dies and comes back: what was on the wire is gone with the connection."""
        self.end = DraftEnd()
        self.down.clear()
        self.up.clear()
        self.drafts.link_down(self.endpoint)
        self.drafts.link_up(self, {"simulated": Offer("1", max_level=2, shared=False)})

    def deliver_down(self) -> None:
        if self.down:
            refusal = self.down.popleft()(self.end)
            self.end.mirrors.flush()
            if isinstance(refusal, DraftRefusal):
                self.up.append(refusal)

    def work(self) -> None:
        self.end.work()
        for answer in self.end.answers:
            mirror = self.end.mirrors.by_handle(answer.handle)
            if mirror is not None:
                stamp = Stamp(mirror.sequence_id, mirror.epoch, answer.base_len)
                self.up.append(
                    Proposal(stamp, list(answer.token_ids), 0.001, (), 0.001, tuple(answer.assumed_ids))
                )
        self.end.answers.clear()

    def work_on(self) -> None:
        """Until what is drafted ahead is complete."""
        for _ in range(K + 2):
            self.work()

    def deliver_up(self) -> None:
        if not self.up:
            return
        message = self.up.popleft()
        if isinstance(message, Proposal):
            self.drafts.proposed(self.endpoint, [message], self.now)
        else:
            reason = _REASONS.get(message.reason, Refusal.FINAL)
            self.drafts.refused(self.endpoint, message.sequence_id, message.epoch, reason)

    def round(self) -> None:
        """The verify side runs a round, once it need not wait any more."""
        if self.drafts.awaiting(self.sequence, self.now) is not None:
            return
        block = self.drafts.take(self.sequence, self.now)
        tokens = self.sequence.tokens
        if block.token_ids:
            assert len(block.token_ids) <= K
            assert block.token_ids == guesses(list(tokens), 3, len(block.token_ids)), (
                "drafted for just this text"
            )
            self.used += 1
            self.hits += block.ahead_hit
        committed = 0
        for guess in [*block.token_ids, None]:
            token = own_token(tokens)
            tokens.append(token)
            committed += 1
            if token != guess:
                break
        self.drafts.advance(self.sequence, committed, K)

    def quiet(self, rounds: int) -> None:
        """Nothing goes wrong: everything that is sent arrives, in order, in time."""
        for _ in range(rounds):
            while self.down or self.up or self.end.worker._asking or self.end.worker._inbox:
                self.deliver_down()
                self.work()
                self.deliver_up()
            self.work_on()
            while self.up:
                self.deliver_up()
            self.round()
            self.now += 0.03


EVENTS = (
    *("deliver_down", "deliver_down", "work", "work_on", "deliver_up", "deliver_up", "round", "round"),
    *(
        "lose_down",
        "lose_up",
        "double_down",
        "double_up",
        "swap_down",
        "swap_up",
        "time",
        "long time",
        "restart",
    ),
)


def happen(world: World, event: str) -> None:
    verb, _, where = event.partition("_")
    wire = world.down if where == "down" else world.up
    match verb:
        case "lose" if wire:
            wire.popleft()
        case "double" if wire:
            wire.append(wire[0])
        case "swap" if len(wire) > 1:
            wire.rotate(1)
        case "time":
            world.now += 0.03
        case "long time":
            world.now += 0.5
        case "restart":
            world.restart()
        case "deliver" | "work" | "round":
            getattr(world, event)()


@pytest.mark.parametrize("level", LEVELS)
@given(events=st.lists(st.sampled_from(EVENTS), min_size=30, max_size=150))
@settings(max_examples=120, deadline=None)
def test_whatever_happens_a_block_is_used_only_where_it_belongs_and_drafting_goes_on_afterwards(
    level: int, events: list[str]
) -> None:
    """Used blocks are the drafter's guesses after exactly the committed text; once the wire is well, blocks come again within 5 s."""
    world = World(level)
    for event in events:
        happen(world, event)
    used, well_since = world.used, world.now
    while world.used == used:
        world.quiet(1)
        assert world.now < well_since + 5


@pytest.mark.parametrize("level", [1, 2])
def test_on_a_sound_wire_blocks_are_drafted_ahead_and_hit(level: int) -> None:
    """As often as the level foresees outcomes: that is what the other test disturbs."""
    world = World(level)
    world.quiet(60)
    assert world.used == 60
    assert 0 < world.hits < 60
