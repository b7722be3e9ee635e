"""The sampled laws, ratio and block: what they commit is distributed as the target, and biased variants are found out.

Two kinds of proof. *Enumeration*: every block and every way to accept it, summed exactly (to 1e-12, no false alarms): the
rules are right. *Decoding*: 700 continuations of three tokens drawn with the keyed noise that serves, against the
exact law of all 125 (``tiny_law.check``: false-alarm odds 2e-4 a case, had the seeds been drawn anew): the noise is
right. Power: each biased variant is found with p < 1e-6 among 600 to 3,000 decodings.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampled_laws import (
    committed_law,
    expected_accepted,
    random_probs,
    sampled,
    sampled_wrongly,
    target_law,
    truncated_probs,
)
from tiny_law import VOCAB, Check, check, coupled, exact, model, near

from paceline.sampling.noise import Domain
from paceline.types import Law, SamplingParams

LAWS = [Law.RATIO, Law.BLOCK]
NUM = 700

TARGET, UNRELATED = model(1), model(2)


def masked(of, banned):
    """A model that never says the ``banned`` tokens."""
    bias = torch.zeros(VOCAB)
    bias[list(banned)] = -math.inf
    return lambda prefix: of(prefix) + bias


def fixed(probs):
    """A model that forgets its prefix, over the first tokens of the vocabulary."""
    logits = torch.full((VOCAB,), -60.0)
    logits[: len(probs)] = torch.tensor(probs).log()
    return lambda prefix: logits


def dense(probs, banned=()):
    probs = probs.copy()
    probs[list(banned)] = 0.0
    return probs / probs.sum()


# name -> (target, draft) as probabilities after a prefix, over four tokens
_P, _Q = random_probs(1, 4), random_probs(2, 4)
PAIRS = {
    "unrelated": (_P, _Q),
    "equal": (_P, _P),
    "near": (_P, lambda prefix: 0.8 * _P(prefix) + 0.2 * _Q(prefix)),
    "draft cut to 2 tokens": (_P, lambda prefix: truncated_probs(_Q(prefix), 2)),
    "draft certain": (_P, lambda prefix: truncated_probs(_Q(prefix), 1)),
    "target certain": (lambda prefix: truncated_probs(_P(prefix), 1), _Q),
    "disjoint": (lambda prefix: dense(_P(prefix), (0, 1)), lambda prefix: dense(_Q(prefix), (2, 3))),
    "overlapping": (lambda prefix: dense(_P(prefix), (0,)), lambda prefix: dense(_Q(prefix), (3,))),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_the_rule_is_exact_by_enumeration(law, pair, k):
    """The joint law of the k + 1 tokens after a round's start is the target's, whatever the draft's distribution."""
    target, draft = pair
    got, want = committed_law(law, target, draft, k, k + 1), target_law(target, k + 1)
    assert max(abs(got[tokens] - want[tokens]) for tokens in {*got, *want}) < 1e-12


@pytest.mark.parametrize("law", LAWS)
def test_a_block_that_ends_at_a_token_of_its_own_is_exact_too(law):
    """A drafter stops behind an end-of-sequence token that it has drawn: that token is verified with the block."""
    got = committed_law(law, _P, _Q, 3, 4, ends=frozenset({1}))
    want = target_law(_P, 4)
    assert max(abs(got[tokens] - want[tokens]) for tokens in {*got, *want}) < 1e-12


def test_block_verification_accepts_at_least_as_much_as_the_ratio_law():
    """Exactly, for 60 pairs and k = 1 to 4: never less, equal at k = 1, and more in most pairs at k = 4."""
    more = 0
    for name in range(60):
        target, draft = random_probs(2 * name, 3), random_probs(2 * name + 1, 3)
        for k in (1, 2, 3, 4):
            one, joint = (expected_accepted(law, target, draft, k) for law in LAWS)
            assert joint >= one - 1e-12
            if k == 1:
                assert joint == pytest.approx(one, abs=1e-12)
        more += joint > one + 1e-3
    assert more > 50


def test_block_verification_gives_the_paper_s_example():
    """Two tokens, target (1/3, 2/3), draft (2/3, 1/3), k = 2: 10/9 accepted one by one, 11/9 jointly (Sun et al.)."""
    target, draft = lambda prefix: np.array([1 / 3, 2 / 3]), lambda prefix: np.array([2 / 3, 1 / 3])
    assert expected_accepted(Law.RATIO, target, draft, 2) == pytest.approx(10 / 9)
    assert expected_accepted(Law.BLOCK, target, draft, 2) == pytest.approx(11 / 9)


# --- decoding with keyed noise -----------------------------------------------------------------------------------

DECODED = {
    "near": (near(TARGET, UNRELATED, 0.7), SamplingParams(), VOCAB),
    "unrelated, cut to 2 tokens": (UNRELATED, SamplingParams(temperature=0.8, top_p=0.9), 2),
    "disjoint": (masked(TARGET, (0, 1, 2)), SamplingParams(logit_bias={3: -100.0, 4: -100.0}), VOCAB),
    "penalties, top_k, min_p": (
        UNRELATED,
        SamplingParams(temperature=1.5, top_k=4, min_p=0.05, repetition_penalty=1.4, frequency_penalty=-0.8),
        3,
    ),
}


def wavering(seed: int):
    """1, 2, 4 or no draft tokens, the seed and the prefix deciding."""
    return lambda prefix: (1, 2, 4, 0)[(seed * 7 + sum(prefix) * 3 + len(prefix)) % 4]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("case", DECODED.values(), ids=DECODED.keys())
def test_decoding_has_the_target_s_law(law, case):
    """Served code and served noise, block lengths that change from round to round."""
    drafter, params, top_m = case
    draft_params = replace(params, logit_bias={}) if params.logit_bias else params
    samples = [
        sampled(
            law,
            TARGET,
            drafter,
            replace(params, seed=seed),
            k=wavering(seed),
            top_m=top_m,
            draft_params=replace(draft_params, seed=seed),
        )[0]
        for seed in range(NUM)
    ]
    result = check(samples, exact(TARGET, params))
    assert result.exact, result


def test_the_pair_that_catches_reused_noise_is_decoded_rightly():
    """Where noise of the round before would show most (see the negative control), 1,200 decodings with k = 2."""
    target, drafter = fixed([0.5, 0.5]), fixed([0.9, 0.1])
    samples = [
        sampled(Law.BLOCK, target, drafter, SamplingParams(seed=seed), k=lambda prefix: 2)[0]
        for seed in range(1_200)
    ]
    result = check(samples, exact(target, SamplingParams()))
    assert result.exact, result


def test_block_accepts_more_than_ratio_when_decoding():
    """The same 700 seeds, k = 4: the mean accepted length of the first round, block above ratio by over 2 sigma."""
    drafter = near(TARGET, UNRELATED, 0.6)
    first = {
        law: np.array(
            [
                sampled(law, TARGET, drafter, SamplingParams(seed=seed), k=lambda prefix: 4)[1][0]
                for seed in range(NUM)
            ]
        )
        for law in LAWS
    }
    gain = first[Law.BLOCK].mean() - first[Law.RATIO].mean()
    sigma = math.sqrt(sum(lengths.var() / NUM for lengths in first.values()))
    assert gain > 2 * sigma, (gain, sigma)


@pytest.mark.parametrize("law", LAWS)
def test_the_same_seed_gives_the_same_tokens(law):
    """No generator: a second decoding of each seed repeats the first, and seeds differ."""
    run = lambda seed: sampled(law, TARGET, UNRELATED, SamplingParams(seed=seed), k=lambda prefix: 2)  # noqa: E731
    first = [run(seed) for seed in range(60)]
    assert first == [run(seed) for seed in range(60)]
    assert len({tokens for tokens, _ in first}) > 10


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(top_k=1)], ids=["T=0", "top_k=1"]
)
def test_without_chance_the_sampled_laws_are_greedy(law, params):
    """At temperature 0, and with one token left, every law commits the likeliest tokens."""
    greedy = coupled(TARGET, UNRELATED, SamplingParams(temperature=0.0), k=lambda prefix: 0)
    for drafter, seed in itertools.product((TARGET, UNRELATED), range(5)):
        tokens, _ = sampled(law, TARGET, drafter, replace(params, seed=seed), k=lambda prefix: 3)
        assert tokens == greedy


# --- negative controls --------------------------------------------------------------------------------------------


def wrong_check(law: Law, num: int = 600, pair=(TARGET, UNRELATED), k: int = 2, **wrong) -> Check:
    target, drafter = pair
    samples = [sampled_wrongly(law, target, drafter, seed, k=k, **wrong) for seed in range(num)]
    return check(samples, exact(target, SamplingParams()))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"verify_above": 0.35},
        {"draft_domain": Domain.COUPLED, "accept_domain": Domain.COUPLED},
    ],
    ids=["own value decides", "acceptance shares the noise"],
)
def test_the_check_catches_biased_laws(law, wrong):
    """A drawn token dropped for its own value; the ratio test on the noise that drew the token."""
    result = wrong_check(law, **wrong)
    assert not result.exact, result
    assert result.pvalue < 1e-6, result


def test_the_check_catches_a_replacement_that_shares_the_noise():
    """Draft and replacement drawn with one noise, as the coupled law has it: the subtlest, 3,000 decodings.

    With k = 1 the two sampled laws are one.
    """
    result = wrong_check(
        Law.RATIO,
        3_000,
        k=1,
        draft_domain=Domain.COUPLED,
        replace_domain=Domain.COUPLED,
        keyed_by_position_only=True,
    )
    assert not result.exact, result
    assert result.pvalue < 1e-6, result


def test_the_check_catches_block_verification_with_noise_keyed_by_position_alone():
    """A round of block verification spends noise behind its accepted length; a later round must not see it again.

    1,200 decodings. The ratio law looks at nothing behind its first rejection, so it may key by position.
    """
    pair = (fixed([0.5, 0.5]), fixed([0.9, 0.1]))
    result = wrong_check(Law.BLOCK, 1_200, pair, keyed_by_position_only=True)
    assert not result.exact, result
    assert result.pvalue < 1e-6, result
    assert wrong_check(Law.RATIO, 1_200, pair, keyed_by_position_only=True).exact
