"""Prefix reuse: what is kept, what is copied, and that a warm start gives the bits of a cold one."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.engine.kv import KVShape, SlotKV
from paceline.engine.prefix import MIN_REUSE, PrefixSlots
from paceline.testing.tiny_models import tiny_model_dir

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = tiny_model_dir(tmp_path_factory.mktemp("model"))
    return load_runner(ModelConfig(name=str(path), dtype="float32"), kv_slots=4, max_context=256)


@pytest.fixture
def slots(runner: Runner) -> PrefixSlots:
    prefix = PrefixSlots(runner.kv)
    yield prefix
    prefix.clear()
    assert runner.kv.is_idle()


def ids(count: int, salt: int = 0) -> list[int]:
    return [3 + (7 * i + 11 * salt * (i + 1)) % 500 for i in range(count)]


def run(
    runner: Runner, slots: PrefixSlots, tokens: list[int], scope: str = ""
) -> tuple[torch.Tensor, int, int]:
    """Logits of the last 3 tokens, the slot, and how many tokens were reused."""
    lease = slots.acquire(tokens, scope)
    assert lease is not None
    rest = tokens[lease.reused :]
    logits = runner.forward([Segment(lease.slot, lease.reused, rest, 1)])
    return logits, lease.slot, lease.reused


def test_warm_equals_cold_bit_for_bit(runner: Runner, slots: PrefixSlots) -> None:
    """A prefix of a finished sequence, cut at any place, gives the logits of a run from nothing."""
    first = ids(150)
    _, slot, reused = run(runner, slots, first)
    assert reused == 0
    slots.release(slot, first)
    for common in (17, 63, 64, 65, 100, 149):
        tokens = first[:common] + ids(30, salt=common)
        warm, slot, reused = run(runner, slots, tokens)
        assert reused >= common
        slots.discard(slot)
        cold = runner.kv.acquire()
        assert cold is not None
        expected = runner.forward([Segment(cold, 0, tokens, 1)])
        runner.kv.release(cold)
        assert torch.equal(warm, expected), f"common prefix {common}"


def test_a_conversation_takes_its_slot_over(runner: Runner, slots: PrefixSlots) -> None:
    """The next turn starts behind everything that is context already, in the same slot."""
    first = ids(40)
    _, slot, _ = run(runner, slots, first)
    slots.release(slot, [*first, 9])  # a last token that was committed and never run
    lease = slots.acquire([*first, 9, *ids(20, 5)], "")
    assert lease is not None
    assert (lease.slot, lease.reused) == (slot, 40)
    slots.discard(lease.slot)


def test_a_running_sequence_lends_its_prefix(runner: Runner, slots: PrefixSlots) -> None:
    """A shared system prompt is run once, even while its first user is still being decoded."""
    system = ids(80)
    _, a, _ = run(runner, slots, system + ids(10, 1))
    logits, b, reused = run(runner, slots, system + ids(10, 2))
    assert a != b
    assert reused == 80
    assert slots.num_in_use == 2
    for slot in (a, b):
        slots.discard(slot)
    assert logits.isfinite().all()


def test_scopes_do_not_see_each_other(runner: Runner, slots: PrefixSlots) -> None:
    """One tenant's text is never looked at for another."""
    _, slot, _ = run(runner, slots, ids(60), "a")
    slots.release(slot, ids(60))
    _, slot, reused = run(runner, slots, ids(60), "b")
    assert reused == 0
    slots.discard(slot)


def test_short_prefixes_and_the_last_token_are_not_reused(runner: Runner, slots: PrefixSlots) -> None:
    """Fewer than MIN_REUSE tokens are run again; an equal prompt still runs its last token."""
    _, slot, _ = run(runner, slots, ids(60))
    slots.release(slot, ids(60))
    _, slot, reused = run(runner, slots, ids(MIN_REUSE - 1) + ids(9, 3))
    assert reused == 0
    slots.discard(slot)
    _, slot, reused = run(runner, slots, ids(60))
    assert reused == 59
    slots.discard(slot)


def test_the_longest_unused_goes_first_and_running_ones_stay(runner: Runner, slots: PrefixSlots) -> None:
    """When nothing is free the oldest kept slot makes room; when all run there is none."""
    for salt in range(4):
        _, slot, _ = run(runner, slots, ids(40, salt))
        slots.release(slot, ids(40, salt))
    assert (slots.num_available, slots.num_kept) == (4, 4)
    leases = [slots.acquire(ids(30, 20 + i), "") for i in range(4)]
    assert all(lease is not None for lease in leases)
    assert slots.acquire(ids(30, 30), "") is None
    assert slots.num_available == 0
    for lease in leases:
        assert lease is not None
        slots.discard(lease.slot)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["acquire", "release", "discard"]), st.integers(0, 5), st.integers(1, 60)),
        max_size=60,
    )
)
def test_free_kept_and_used_are_all_slots(events: list[tuple[str, int, int]]) -> None:
    """Whatever happens, slots are neither lost nor given twice."""
    kv = SlotKV(
        KVShape(1, 1, 4, 4), num_slots=4, capacity=64, dtype=torch.float32, device=torch.device("cpu")
    )
    slots = PrefixSlots(kv)
    running: dict[int, list[int]] = {}
    for what, salt, count in events:
        if what == "acquire":
            tokens = ids(count, salt % 2)
            lease = slots.acquire(tokens, "ab"[salt % 2])
            assert (lease is None) == (len(running) == 4)
            if lease is not None:
                assert lease.slot not in running
                assert lease.reused < len(tokens)
                kv.extend(lease.slot, len(tokens) - lease.reused)
                running[lease.slot] = tokens
        elif running:
            slot = sorted(running)[salt % len(running)]
            tokens = running.pop(slot)
            if what == "release":
                slots.release(slot, tokens)
            else:
                slots.discard(slot)
        assert slots.num_in_use == len(running)
        assert kv.num_free + slots.num_kept + slots.num_in_use == 4
    for slot in list(running):
        slots.discard(slot)
    assert slots.is_idle()
    slots.clear()
    assert kv.is_idle()
