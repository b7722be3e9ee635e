import time

import pytest
import torch

from paceline.config import SimulationConfig
from paceline.engine import Segment
from paceline.engine.simulated import SimulatedRunner


@pytest.fixture
def runner() -> SimulatedRunner:
    return SimulatedRunner(SimulationConfig(time_scale=0.0), kv_slots=3, max_context=256)


def test_rows_do_not_depend_on_the_chunks_or_the_neighbours(runner: SimulatedRunner):
    """Whole, in chunks, and beside another sequence: the same logits."""
    ids = [300, 301, 302, 303, 304, 305, 306]
    whole, parts = runner.kv.acquire(), runner.kv.acquire()
    expected = runner.forward([Segment(whole, 0, ids, len(ids))])
    runner.kv.truncate(whole, 2)
    first = runner.forward([Segment(parts, 0, ids[:3], 3), Segment(whole, 2, ids[2:4], 1)])
    rest = runner.forward([Segment(parts, 3, ids[3:], 4)])
    assert torch.equal(torch.cat([first[:3], rest]), expected)
    assert torch.equal(first[3], expected[3])
    assert runner.kv.length(parts) == len(ids)


def test_what_was_rolled_back_leaves_no_trace(runner: SimulatedRunner):
    """Rejected tokens are overwritten."""
    slot, clean = runner.kv.acquire(), runner.kv.acquire()
    runner.forward([Segment(slot, 0, [300, 301, 900, 901], 1)])
    runner.kv.truncate(slot, 2)
    again = runner.forward([Segment(slot, 2, [302], 1)])
    assert torch.equal(again, runner.forward([Segment(clean, 0, [300, 301, 302], 1)]))


def test_greedy_text_is_made_of_the_words_of_the_source_and_does_not_loop(runner: SimulatedRunner):
    """Readable, for people who look."""
    from paceline.model_store import resolve_model_dir
    from paceline.tokenizer import Tokenizer

    slot = runner.kv.acquire()
    tokenizer = Tokenizer.load(resolve_model_dir("simulated"))
    ids = tokenizer.encode("The riders")
    logits = runner.forward([Segment(slot, 0, ids, 1)])
    for _ in range(150):
        ids.append(int(logits[-1].argmax()))
        logits = runner.forward([Segment(slot, len(ids) - 1, ids[-1:], 1)])
    text = tokenizer.decode(ids)
    assert "riders" in text
    windows = {tuple(ids[i : i + 12]) for i in range(len(ids) - 12)}
    assert len(windows) > 120


def test_a_forward_takes_as_long_as_the_table_says():
    """28 ms scaled to 14."""
    runner = SimulatedRunner(SimulationConfig(time_scale=0.5), kv_slots=1, max_context=64)
    slot = runner.kv.acquire()
    started = time.monotonic()
    runner.forward([Segment(slot, 0, [300, 301], 1)])
    assert time.monotonic() - started >= 0.014
