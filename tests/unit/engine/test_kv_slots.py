import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.engine import SlotKV
from paceline.engine.kv import BUCKET, KVShape, available_memory
from paceline.errors import ConfigError, EngineError

SHAPE = KVShape(layers=2, kv_heads=2, key_size=4, value_size=4)
CPU = torch.device("cpu")


def make_kv(num_slots=3, capacity=70):
    return SlotKV(SHAPE, num_slots=num_slots, capacity=capacity, dtype=torch.float32, device=CPU)


def test_slots_run_out_and_come_back():
    """Acquiring gives each slot once, then None; a released slot is empty when it is given again."""
    kv = make_kv()
    slots = [kv.acquire() for _ in range(4)]
    assert sorted(slots[:3]) == [0, 1, 2]
    assert slots[3] is None
    kv.extend(1, 5)
    kv.release(1)
    assert (kv.num_free, kv.acquire(), kv.length(1)) == (1, 1, 0)


def test_truncate_only_sets_the_length():
    """Rolling back touches no stored number, so it costs the same for any length."""
    kv = make_kv()
    slot = kv.acquire()
    kv.extend(slot, 60)
    before = kv.keys.data_ptr(), kv.keys._version, kv.values._version
    kv.truncate(slot, 3)
    assert kv.length(slot) == 3
    assert (kv.keys.data_ptr(), kv.keys._version, kv.values._version) == before


@pytest.mark.parametrize(
    "illegal",
    [
        lambda kv: kv.release(1),
        lambda kv: kv.length(1),
        lambda kv: kv.length(-1),
        lambda kv: kv.length(3),
        lambda kv: kv.truncate(0, 11),
        lambda kv: kv.truncate(0, -1),
        lambda kv: kv.truncate(2, 0),
        lambda kv: kv.extend(0, 61),
        lambda kv: kv.extend(0, -1),
    ],
)
def test_illegal_moves_raise_and_change_nothing(illegal):
    """A slot that nobody has, a cut to more than there is, more tokens than fit: refused, state as before."""
    kv = make_kv()
    assert kv.acquire() == 0
    kv.extend(0, 10)
    with pytest.raises(EngineError):
        illegal(kv)
    assert (kv.length(0), kv.num_free, kv.is_idle()) == (10, 2, False)


def test_releasing_twice_is_refused():
    """A slot cannot enter the free list twice, so two sequences can never share one."""
    kv = make_kv()
    slot = kv.acquire()
    kv.release(slot)
    with pytest.raises(EngineError):
        kv.release(slot)
    assert kv.num_free == 3


def test_a_tail_is_cleared_once_for_each_new_owner():
    """What an earlier sequence left, NaN included, is zero up to the bucket's edge; own rows stay as they are."""
    kv = make_kv(num_slots=1)
    slot = kv.acquire()
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    kv.clear_tail(slot, 10)
    assert kv.keys[:, 10:BUCKET].eq(0).all()
    assert kv.values[:, 10:BUCKET].eq(0).all()
    assert kv.keys[:, :10].isnan().all()
    kv.keys[:, 10:20] = 5.0
    kv.clear_tail(slot, 12)
    assert kv.keys[:, 10:20].eq(5).all()
    kv.clear_tail(slot, 65)
    assert kv.keys[:, 65:].eq(0).all()


def test_more_memory_than_there_is_is_refused_before_allocating():
    """The operator learns what is needed, what is free and what to change."""
    free = available_memory(CPU)
    assert free is not None
    with pytest.raises(ConfigError, match=r"kv_slots = .* MiB are free: lower kv_slots to \d+"):
        make_kv(num_slots=free // 1000, capacity=1000)


class Slots(RuleBasedStateMachine):
    """Random lives of sequences against a model that is a dictionary of lengths."""

    def __init__(self):
        super().__init__()
        self.kv = make_kv(num_slots=4, capacity=70)
        self.model = {}

    @rule()
    def acquire(self):
        slot = self.kv.acquire()
        if len(self.model) == 4:
            assert slot is None
        else:
            assert slot not in self.model
            self.model[slot] = 0

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(0, 80))
    def extend(self, data, count):
        slot = data.draw(st.sampled_from(sorted(self.model)))
        if self.model[slot] + count > 70:
            with pytest.raises(EngineError):
                self.kv.extend(slot, count)
        else:
            self.kv.extend(slot, count)
            self.model[slot] += count

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data):
        slot = data.draw(st.sampled_from(sorted(self.model)))
        length = data.draw(st.integers(0, self.model[slot]))
        self.kv.truncate(slot, length)
        self.model[slot] = length

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.kv.release(slot)
        del self.model[slot]

    @invariant()
    def balances(self):
        assert self.kv.num_free == 4 - len(self.model)
        assert self.kv.is_idle() == (not self.model)
        assert {slot: self.kv.length(slot) for slot in self.model} == self.model


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(data=st.data())
def test_no_two_slots_share_a_row(data):
    """Rows of different (slot, position) are different, within storage, and a slot's bucket never leaves it."""
    capacity = data.draw(st.integers(1, 200))
    kv = make_kv(num_slots=3, capacity=capacity)
    rows = [kv.row(slot, position) for slot in range(3) for position in range(kv.stride)]
    assert sorted(rows) == list(range(kv.keys.shape[1]))
    assert kv.stride >= capacity
    assert kv.stride % BUCKET == 0
