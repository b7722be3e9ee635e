import time

import pytest

from paceline.config import SimulationConfig
from paceline.errors import ConfigError
from paceline.model_store import resolve_model_dir
from paceline.simulation import PAIRS, DeviceCost, pair_of, sleep_until
from paceline.tokenizer import Tokenizer


def test_few_rows_cost_what_one_costs_and_many_cost_more():
    """A forward reads the weights anyway; rows beyond the free ones and context add."""
    cost = DeviceCost(0.028, 64, 0.001, 1e-6)
    assert cost.seconds(1) == cost.seconds(64) == 0.028
    assert cost.seconds(66, 1000) == pytest.approx(0.028 + 0.002 + 0.001)


def test_a_one_pass_drafter_takes_one_forward_for_any_block():
    """Block drafters do not pay by the token."""
    assert PAIRS["27b+block"].draft_seconds(8) == PAIRS["27b+block"].draft_seconds(1)
    assert PAIRS["8b+1b"].draft_seconds(4) == pytest.approx(0.024)


def test_an_unknown_pair_is_refused_in_words():
    """The message names what there is."""
    with pytest.raises(ConfigError, match=r"8b\+1b"):
        pair_of(SimulationConfig(pair="9b+9b"))


def test_time_scale_scales_every_time():
    """0: no sleep at all."""
    pair = pair_of(SimulationConfig(time_scale=0.0))
    assert pair.verify.seconds(1000, 1000) == pair.draft.seconds(1000, 1000) == 0


def test_the_simulated_tokenizer_reads_anything_and_has_a_template():
    """Byte-level, so that any prompt can be given; made without a download."""
    tokenizer = Tokenizer.load(resolve_model_dir("simulated"))
    text = "The riders, größer 漢字 {x}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.has_chat_template


def test_sleep_until_is_not_early():
    """It ends at or after the deadline."""
    deadline = time.monotonic() + 0.003
    sleep_until(deadline)
    assert time.monotonic() >= deadline
