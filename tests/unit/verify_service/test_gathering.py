"""When ready rows wait for rows whose proposals are on their way: rules of DESIGN section 5, item by item."""

import math

import pytest

from paceline.engine.kv import KVShape, SlotKV
from verify_service.drafts import Drafts
from verify_service.scheduler import Scheduler

STEP_S, NOW = 0.040, 100.001


@pytest.fixture
def scheduler() -> Scheduler:
    import torch

    kv = SlotKV(
        KVShape(1, 1, 1, 1), num_slots=2, capacity=64, dtype=torch.float32, device=torch.device("cpu")
    )
    one = Scheduler(kv, Drafts(vocab_size=9, wait_s=0.5, clock=lambda: NOW), prefill_chunk=8)
    one.stepped([], 100.0, STEP_S)
    return one


def test_never_longer_than_a_quarter_of_a_step_nor_than_is_usual(scheduler: Scheduler):
    """Two rows expected in 2 and in 4 ms: until the later one; one beyond the quarter is not waited for."""
    assert scheduler._gather(NOW, 1, [100.003, 100.005]) == pytest.approx(100.005)
    assert scheduler._gather(NOW, 1, [100.003, 100.5]) == pytest.approx(100.003)
    assert scheduler._gather(NOW, 1, [100.5]) == NOW


def test_while_nothing_is_known_a_quarter_of_a_step(scheduler: Scheduler):
    """The first rounds of a link."""
    assert scheduler._gather(NOW, 1, [math.inf]) == pytest.approx(100.0 + STEP_S / 4)


def test_many_ready_rows_do_not_wait_for_one(scheduler: Scheduler):
    """9 ms out of 40: one row wins 31, eight lose 72."""
    assert scheduler._gather(NOW, 8, [100.0099]) == NOW
    assert scheduler._gather(NOW, 3, [100.0099]) == pytest.approx(100.0099)


def test_after_the_quarter_nobody_waits(scheduler: Scheduler):
    """The step begins."""
    assert scheduler._gather(100.02, 1, [100.021]) <= 100.02
