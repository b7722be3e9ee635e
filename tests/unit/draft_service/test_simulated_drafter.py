import math

import pytest
import torch

from draft_service.drafters.base import DraftRequest
from draft_service.drafters.simulated import SimulatedDrafter
from paceline.config import SimulationConfig
from paceline.engine.simulated import Source
from paceline.model_store import resolve_model_dir
from paceline.sampling import TokenRow, choose
from paceline.simulation import VOCAB_SIZE
from paceline.tokenizer import Tokenizer
from paceline.types import SamplingParams

ROUNDS = 600


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model_dir("simulated"))


def agreed(
    tokenizer: Tokenizer, k: int, *, temperature: float = 0.9, prompt: str = "The riders", **settings
) -> list[int]:
    """Accepted lengths of rounds along the target's own text."""
    drafter = SimulatedDrafter("s", SimulationConfig(time_scale=0.0, **settings), tokenizer)
    source = Source(tokenizer)
    params = SamplingParams(temperature=temperature, seed=11)
    ids = tokenizer.encode(prompt)
    prompt_len = len(ids)
    drafter.open(1)
    lengths = []
    for _ in range(ROUNDS):
        guesses = drafter.propose([DraftRequest(1, ids, prompt_len, params, k, VOCAB_SIZE)])[0]
        assert guesses is not None
        assert len(guesses) == k
        length = 0
        while True:
            logits = torch.from_numpy(source.logits(ids[-3:], len(ids)))[None]
            target = choose(logits, [TokenRow(params, len(ids), (), ())])[0]
            ids.append(target)
            if length == k or guesses[length] != target:
                break
            length += 1
        lengths.append(length)
    return lengths


def within(value: float, expected: float, deviation: float, count: int) -> bool:
    """Five standard errors: one false alarm in a million."""
    return abs(value - expected) < 5 * deviation / math.sqrt(count)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_a_round_are_those_of_the_closed_form(tokenizer: Tokenizer, temperature: float):
    """(1 - a^(k+1)) / (1 - a), bonus included, at any temperature."""
    lengths = agreed(tokenizer, 4, temperature=temperature, agreement=0.8)
    mean = sum(lengths) / ROUNDS + 1
    deviation = math.sqrt(sum((length + 1 - mean) ** 2 for length in lengths) / ROUNDS)
    assert within(mean, (1 - 0.8**5) / 0.2, deviation, ROUNDS)


def test_agreement_by_position_holds_for_each_position(tokenizer: Tokenizer):
    """The chance at position j, among the rounds that reached it."""
    rates = (0.9, 0.5, 0.7)
    lengths = agreed(tokenizer, 3, agreement_by_position=rates)
    for offset, rate in enumerate(rates):
        reached = [length for length in lengths if length >= offset]
        share = sum(length > offset for length in reached) / len(reached)
        assert within(share, rate, math.sqrt(rate * (1 - rate)), len(reached))


def test_agreement_by_word_of_the_prompt_and_drift(tokenizer: Tokenizer):
    """Tasks differ, and a drafter can fade."""
    assert sum(agreed(tokenizer, 1, prompt="code: x", agreement_by_word={"code": 1.0})) == ROUNDS
    assert sum(agreed(tokenizer, 1, prompt="poem: x", agreement_by_word={"poem": 0.0})) == 0
    fading = agreed(tokenizer, 1, agreement=1.0, drift=-0.5)
    assert sum(fading[:150]) > 1.3 * sum(fading[-150:])


def test_the_same_question_gets_the_same_answer(tokenizer: Tokenizer):
    """Keyed, not drawn: neither order nor batch matters."""
    drafter = SimulatedDrafter("s", SimulationConfig(time_scale=0.0), tokenizer)
    params = SamplingParams(temperature=1.0, seed=3)
    one = DraftRequest(1, [300, 301], 2, params, 4, VOCAB_SIZE)
    two = DraftRequest(2, [310, 311, 312], 3, params, 4, VOCAB_SIZE)
    drafter.open(1)
    drafter.open(2)
    alone = drafter.propose([one])[0]
    assert drafter.propose([two, one])[1] == alone
