import pytest
import torch

from paceline.sampling import TokenRow, choose, likeliest
from paceline.types import SamplingParams


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.7, top_p=0.6, seed=6),
        SamplingParams(temperature=0.0, presence_penalty=3.0),
    ],
)
def test_the_first_is_what_would_be_chosen_and_the_next_what_would_be_chosen_without_it(params):
    """The ranking is that of the draw itself: excluding the winner gives the second."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 3
    rows = [TokenRow(params, 10 + i, (1, 2), (3, 4)) for i in range(6)]
    ranked = likeliest(logits, rows, 3)
    for rank in range(2):
        chosen = choose(logits, rows)
        assert [one[rank] for one in ranked] == chosen
        if params.top_p < 1:
            return  # without the winner another set of tokens is kept
        for row, token in enumerate(chosen):
            logits[row, token] = -torch.inf


def test_truncation_leaves_fewer():
    """top_k = 2: there is no third."""
    ranked = likeliest(torch.arange(9.0)[None], [TokenRow(SamplingParams(top_k=2, seed=1), 3)], 5)
    assert sorted(ranked[0]) == [7, 8]
