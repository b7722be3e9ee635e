"""A vocabulary small enough to enumerate: exact distributions, speculative decoders, and the check that judges them.

The decoder under test is made of the code that serves: ``paceline.sampling.choose`` for target and drafter, and
``verify_service.verdict.judge``. Those of the sampled laws stand in ``sampled_laws``.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from scipy import stats

from paceline.sampling import TokenRow, choose, follow, processed_logprobs
from paceline.types import SamplingParams
from verify_service.verdict import judge

VOCAB = 5
LENGTH = 3
PROMPT = (2, 0)

Tokens = tuple[int, ...]
# A model: the prefix after the prompt -> its logits [V].
Model = Callable[[Tokens], torch.Tensor]


def model(name: int, scale: float = 1.5) -> Model:
    """Random logits for every prefix, fixed by ``name``."""

    @cache
    def logits(prefix: Tokens) -> torch.Tensor:
        code = name
        for token in prefix:
            code = code * (VOCAB + 1) + token + 1
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(code)) * scale

    return logits


def near(target: Model, other: Model, share: float) -> Model:
    """A drafter that is ``share`` target and the rest ``other``, in logits."""
    return cache(lambda prefix: share * target(prefix) + (1 - share) * other(prefix))


def row(params: SamplingParams, prefix: Sequence[int]) -> TokenRow:
    return TokenRow(params, len(PROMPT) + len(prefix), PROMPT, tuple(prefix))


def probs(of: Model, params: SamplingParams, prefix: Tokens) -> list[float]:
    """The processed distribution after ``prefix``."""
    return processed_logprobs(of(prefix)[None], [row(params, prefix)])[0].exp().tolist()


def distribution(of: Model, params: SamplingParams) -> Callable[[Tokens], list[float]]:
    """``probs`` as a function of the prefix, each computed once."""
    return cache(lambda prefix: probs(of, params, prefix))


def exact(target: Model, params: SamplingParams) -> dict[Tokens, float]:
    """The target's probability of every continuation of LENGTH tokens."""
    law: dict[Tokens, float] = {(): 1.0}
    for _ in range(LENGTH):
        law = {
            (*prefix, token): mass * probability
            for prefix, mass in law.items()
            for token, probability in enumerate(probs(target, params, prefix))
            if probability > 0
        }
    assert math.isclose(math.fsum(law.values()), 1.0, rel_tol=1e-9)
    return law


@dataclass(frozen=True)
class Check:
    """What the samples say about a law.

    ``pvalue``: chi-square over all continuations, those expected fewer than 5 times pooled. ``tv``: total variation
    between the empirical and the exact distribution. ``tv_limit``: its expectation under the law is at most
    sum sqrt(p / N) / 2, and it exceeds that by sqrt(log(1 / odds) / 2N) with probability below ``odds`` (McDiarmid).
    """

    num: int
    impossible: int
    pvalue: float
    tv: float
    tv_limit: float

    # False-alarm odds of each of the two criteria, if the seeds were drawn anew. They are fixed: no flakes.
    ODDS = 1e-4

    @property
    def exact(self) -> bool:
        return not self.impossible and self.pvalue > self.ODDS and self.tv < self.tv_limit


def check(samples: Sequence[Tokens], law: dict[Tokens, float]) -> Check:
    num = len(samples)
    counts = Counter(samples)
    impossible = sum(count for tokens, count in counts.items() if tokens not in law)
    observed, expected, pooled_observed, pooled_expected = [], [], 0, 0.0
    for tokens, probability in law.items():
        if probability * num >= 5:
            observed.append(counts[tokens])
            expected.append(probability * num)
        else:
            pooled_observed += counts[tokens]
            pooled_expected += probability * num
    if pooled_expected > 0:
        observed.append(pooled_observed)
        expected.append(pooled_expected)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    tv = 0.5 * (sum(abs(counts[tokens] / num - p) for tokens, p in law.items()) + impossible / num)
    expected_tv = 0.5 * sum(math.sqrt(p / num) for p in law.values())
    return Check(
        num=num,
        impossible=impossible,
        pvalue=float(stats.chi2.sf(statistic, len(observed) - 1)),
        tv=tv,
        tv_limit=expected_tv + math.sqrt(math.log(1 / Check.ODDS) / (2 * num)),
    )


# --- the law that serves ----------------------------------------------------------------------------------------


def coupled(
    target: Model,
    drafter: Model,
    params: SamplingParams,
    *,
    k: Callable[[Tokens], int],
    draft_params: SamplingParams | None = None,
    cut: Callable[[Tokens, list[int]], list[int]] = lambda prefix, draft: draft,
) -> Tokens:
    """One continuation, decoded speculatively with the code of the tiers. ``cut`` may shorten a block at will."""
    draft_params = draft_params or params
    output: list[int] = []
    while len(output) < LENGTH:
        draft: list[int] = []
        for _ in range(k(tuple(output))):
            prefix = (*output, *draft)
            draft += choose(drafter(prefix)[None], [row(draft_params, prefix)])
        draft = cut(tuple(output), draft)
        prefixes = [(*output, *draft[:j]) for j in range(len(draft) + 1)]
        logits = torch.stack([target(p) for p in prefixes])
        target_tokens = follow(logits, [row(params, p) for p in prefixes], [draft])[0]
        verdict = judge(draft, target_tokens, stop_ids=frozenset(), room=LENGTH - len(output))
        output.extend(verdict.committed)
    return tuple(output)
