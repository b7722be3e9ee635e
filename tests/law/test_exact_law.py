"""The exact law: what speculative decoding commits is distributed as the target, whatever the drafter does.

All 125 continuations of three tokens over a vocabulary of five, enumerated exactly, against 2,000 decodings with
different seeds. False-alarm odds per case, had the seeds been drawn anew: 2e-4 (see ``tiny_law.Check``). That the check
has power is shown by the biased variants in ``test_sampled_laws``.
"""

from dataclasses import replace

import pytest
from tiny_law import Tokens, check, coupled, distribution, exact, model, near

from paceline.types import SamplingParams

NUM = 2_000
TARGET = model(1)
UNRELATED = model(2)
DRAFTERS = {
    "the target itself": TARGET,
    "near": near(TARGET, UNRELATED, 0.7),
    "unrelated": UNRELATED,
    "opposed": lambda prefix: -1.5 * TARGET(prefix),
}
PARAMS = {
    "T=1": SamplingParams(),
    "T=0.8, top_p=0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "T=1.5, top_k=3, min_p=0.1": SamplingParams(temperature=1.5, top_k=3, min_p=0.1),
    "penalties and bias": SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=-0.8, logit_bias={1: 0.7}
    ),
}


def wavering(seed: int):
    """A policy that asks for another number of drafts every round, 0 to 4, the seed and the prefix deciding."""
    return lambda prefix: (seed * 7 + sum(prefix) * 3 + len(prefix)) % 5


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_coupled_speculation_has_the_target_s_law(drafter, params):
    """Any drafter, any parameters, a block length that changes from round to round: the target's distribution."""
    samples = [coupled(TARGET, drafter, replace(params, seed=seed), k=wavering(seed)) for seed in range(NUM)]
    result = check(samples, exact(TARGET, params))
    assert result.exact, result


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())
@pytest.mark.parametrize("k", [1, 2, 4])
def test_coupled_speculation_commits_the_plain_tokens(drafter, k):
    """Stronger than equal in law: seed by seed the tokens of plain decoding (k = 0), for each fixed k."""
    params = PARAMS["penalties and bias"]
    for seed in range(300):
        seeded = replace(params, seed=seed)
        plain = coupled(TARGET, drafter, seeded, k=lambda prefix: 0)
        assert coupled(TARGET, drafter, seeded, k=lambda prefix: k) == plain


def test_a_drafter_may_use_other_parameters():
    """The drafter's temperature and truncation are its own business."""
    sharp = [
        coupled(
            TARGET,
            DRAFTERS["near"],
            SamplingParams(seed=seed),
            k=lambda prefix: 3,
            draft_params=SamplingParams(temperature=0.3, top_k=2, seed=seed),
        )
        for seed in range(NUM)
    ]
    assert check(sharp, exact(TARGET, SamplingParams())).exact


def test_under_the_coupled_law_a_block_may_be_cut_by_its_own_values():
    """Dropping a drafted token because of what it is harms nothing here: the target's own draw stands in for it."""

    near_probs = distribution(DRAFTERS["near"], SamplingParams())

    def confident(prefix: Tokens, draft: list[int]) -> list[int]:
        kept: list[int] = []
        for token in draft:
            if near_probs((*prefix, *kept))[token] <= 0.35:
                break
            kept.append(token)
        return kept

    samples = [
        coupled(TARGET, DRAFTERS["near"], SamplingParams(seed=seed), k=lambda prefix: 3, cut=confident)
        for seed in range(NUM)
    ]
    assert check(samples, exact(TARGET, SamplingParams())).exact
