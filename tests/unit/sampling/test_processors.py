"""The processors: against a plain-Python reference, their order, their edges and their ties."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sampling import TokenRow, processed_logprobs
from paceline.types import SamplingParams


def reference(logits: list[float], row: TokenRow) -> list[float]:
    """Probabilities by the documented order, one list at a time."""
    params = row.params
    values = list(logits)
    counts = Counter(row.output)
    for token in range(len(values)):
        if token in counts or token in row.prompt:
            value = values[token]
            values[token] = (
                value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            )
        if token in counts:
            values[token] -= params.presence_penalty + params.frequency_penalty * counts[token]
        values[token] += params.logit_bias.get(token, 0.0)
    values = torch.tensor(values, dtype=torch.float32).tolist()  # stored as float32 by the documentation
    falling = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature == 0.0:
        return [1.0 if token == falling[0] else 0.0 for token in range(len(values))]
    weights = [math.exp((value - values[falling[0]]) / params.temperature) for value in values]
    kept = falling
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1.0:
        total = math.fsum(weights[token] for token in kept)
        mass, count = 0.0, 0
        for token in kept:
            if count and mass >= params.top_p * total:
                break
            mass += weights[token]
            count += 1
        kept = kept[:count]
    kept = [token for token in kept if weights[token] >= params.min_p]
    total = math.fsum(weights[token] for token in kept)
    return [weights[token] / total if token in set(kept) else 0.0 for token in range(len(values))]


def probabilities(logits: list[float], params: SamplingParams, **history) -> list[float]:
    row = TokenRow(params, 0, **history)
    return processed_logprobs(torch.tensor([logits], dtype=torch.float32), [row])[0].exp().tolist()


@settings(max_examples=300, deadline=None)
@given(
    # Quarters are exact in float32 and give ties.
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=2, max_size=24),
    prompt=st.lists(st.integers(0, 30), max_size=6),
    output=st.lists(st.integers(0, 30), max_size=6),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9031, 0.4517, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.0213, 0.3141, 0.99]),
    repetition=st.sampled_from([1.0, 1.25, 0.5]),
    presence=st.sampled_from([0.0, 0.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, -1.0]),
    bias=st.dictionaries(st.integers(0, 30), st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=4),
)
def test_distribution_equals_the_reference(
    logits, prompt, output, temperature, top_k, top_p, min_p, repetition, presence, frequency, bias
):
    """All processors together give what the documented order says, to 1e-9, and the same set of tokens."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    row = TokenRow(params, 0, prompt, output)
    expected = reference(logits, row)
    got = processed_logprobs(torch.tensor([logits]), [row])[0].exp().tolist()
    assert [value > 0 for value in got] == [value > 0 for value in expected]
    assert got == pytest.approx(expected, abs=1e-9)


def test_without_processors_it_is_the_softmax():
    """The default parameters are log_softmax in float64."""
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)) * 5
    rows = [TokenRow(SamplingParams(), position) for position in range(3)]
    torch.testing.assert_close(
        processed_logprobs(logits, rows), torch.log_softmax(logits.double(), -1), rtol=0, atol=1e-12
    )


def test_top_k_keeps_exactly_k_and_ties_go_to_the_lowest_ids():
    """Three tokens tie for the last two places: the lower two stay."""
    got = probabilities([1.0, 5.0, 1.0, 5.0, 1.0, 0.0], SamplingParams(top_k=4))
    assert [value > 0 for value in got] == [True, True, True, True, False, False]


def test_top_p_ties_go_to_the_lowest_ids():
    """Four equal tokens and top_p = 0.5: the first two."""
    assert probabilities([2.0] * 4, SamplingParams(top_p=0.5)) == pytest.approx([0.5, 0.5, 0, 0])


def test_top_p_counts_the_mass_that_top_k_left():
    """Of [.4, .3, .2, .1] top_k = 2 leaves [.571, .429]: top_p = .5 then keeps the first alone."""
    logits = [math.log(value) for value in (0.4, 0.3, 0.2, 0.1)]
    assert probabilities(logits, SamplingParams(top_p=0.5)) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probabilities(logits, SamplingParams(top_k=2, top_p=0.5)) == pytest.approx([1, 0, 0, 0])


def test_the_likeliest_token_always_stays():
    """However small top_p and however large min_p."""
    for params in (SamplingParams(top_p=1e-300), SamplingParams(min_p=0.999999), SamplingParams(top_k=1)):
        assert probabilities([0.0, 3.0, 1.0], params) == [0.0, 1.0, 0.0]


def test_temperature_comes_before_the_truncations():
    """A higher temperature flattens first, so top_p = 0.9 keeps more."""
    logits = [4.0, 2.0, 0.0, -1.0, -2.0]
    kept = [
        sum(value > 0 for value in probabilities(logits, SamplingParams(temperature=t, top_p=0.9)))
        for t in (0.5, 1.0, 3.0)
    ]
    assert kept == [1, 2, 4]


def test_penalties_and_bias_come_before_the_argmax_of_temperature_0():
    """Greedy is the largest processed logit, not the largest logit."""
    logits = [3.0, 2.9, 0.0]
    assert probabilities(logits, SamplingParams(temperature=0.0, presence_penalty=0.5), output=[0])[1] == 1.0
    assert (
        probabilities(logits, SamplingParams(temperature=0.0, repetition_penalty=1.2), prompt=[0])[1] == 1.0
    )
    assert probabilities(logits, SamplingParams(temperature=0.0, logit_bias={2: 4.0}))[2] == 1.0


def test_the_prompt_counts_for_the_repetition_penalty_only():
    """Presence and frequency penalties look at the output."""
    plain = probabilities([1.0, 2.0], SamplingParams())
    penalised = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    assert probabilities([1.0, 2.0], penalised, prompt=[0, 1, 1]) == plain
    assert probabilities([1.0, 2.0], SamplingParams(repetition_penalty=1.5), prompt=[1]) != plain


def test_ids_beyond_the_head_are_ignored():
    """History or bias may name ids that a narrower head does not have."""
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, logit_bias={99: 5.0})
    assert probabilities([1.0, 2.0], params, prompt=[50], output=[77]) == probabilities(
        [1.0, 2.0], SamplingParams()
    )


def test_the_logits_are_not_changed():
    """Processing leaves the caller's tensor as it was."""
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    params = SamplingParams(repetition_penalty=2.0, logit_bias={0: 9.0}, top_k=2)
    processed_logprobs(logits, [TokenRow(params, 0, [2], [1])])
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("scale", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_on_a_large_vocabulary_equals_the_full_sort(top_p, scale):
    """Thresholding before sorting never changes the set, flat or sharp."""
    logits = torch.randn(1, 20_011, generator=torch.Generator().manual_seed(4)) * scale
    row = TokenRow(SamplingParams(top_p=top_p), 0)
    falling, order = torch.softmax(logits[0].double(), -1).sort(descending=True, stable=True)
    count = int((falling.cumsum(-1) - falling < top_p).sum())
    kept = processed_logprobs(logits, [row])[0].isfinite().nonzero().squeeze(-1)
    assert kept.tolist() == sorted(order[:count].tolist())


def test_biases_are_read_once_a_request():
    """A bias for every token costs ten milliseconds to read: not in each row of each step, while others wait."""

    class Counted(dict):
        read = 0

        def values(self):
            Counted.read += 1
            return super().values()

    params = SamplingParams(temperature=0.0, logit_bias=Counted({3: 5.0, 900: 1.0, 1: -100.0}))
    rows = [TokenRow(params, 4 + position) for position in range(5)]
    for _ in range(3):
        chances = processed_logprobs(torch.zeros(5, 8), rows)
        assert chances.argmax(-1).tolist() == [3] * 5
    assert Counted.read == 1
