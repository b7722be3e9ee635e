"""The sampled laws on vocabularies small enough to enumerate: exact output distributions, and decoders of served code.

``committed_law`` enumerates everything a round can do, so it has no false alarms at all; ``sampled`` decodes with the keyed
noise that serves, which is what the enumeration cannot see.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from tiny_law import LENGTH, PROMPT, VOCAB, Model, Tokens, distribution, row

from paceline.sampling.acceptance import DraftToken, draft_tokens, residual
from paceline.sampling.block import block, block_thresholds
from paceline.sampling.draws import draw, uniform
from paceline.sampling.noise import Domain, row_key, token_bits
from paceline.sampling.ratio import ratio, ratio_thresholds
from paceline.sampling.sampled import decide, sample_draft, truncated
from paceline.types import Law, SamplingParams
from verify_service.verdict import settle

Probs = Callable[[Tokens], np.ndarray]


# --- enumeration --------------------------------------------------------------------------------------------------


def truncated_probs(draft_probs: np.ndarray, top_m: int) -> np.ndarray:
    """The dense form of what a drafter draws from."""
    [token] = draft_tokens(
        [int(draft_probs.argmax())], [truncated(torch.from_numpy(draft_probs).log(), top_m)]
    )
    dense = np.zeros(len(draft_probs))
    dense[token.support] = token.probs
    return dense


def paths(draft: Probs, k: int, ends: frozenset[int] = frozenset()):
    """Every block of ``k`` tokens that can be drafted, or of fewer where one ends early, with its probability."""
    for tokens in itertools.product(range(len(draft(()))), repeat=k):
        cut = next((i + 1 for i, token in enumerate(tokens) if token in ends), k)
        if any(tokens[cut:]):  # one representative of the blocks that are cut to the same
            continue
        probs = [draft(tokens[:i]) for i in range(cut)]
        mass = math.prod(float(q[token]) for q, token in zip(probs, tokens, strict=False))
        if mass > 0:
            yield tokens[:cut], [_token(token, q) for token, q in zip(tokens, probs, strict=False)], mass


def _token(token: int, probs: np.ndarray) -> DraftToken:
    support = np.flatnonzero(probs)
    return DraftToken(token, support, probs[support], float(probs[token]))


def outcomes(law: Law, target: Probs, tokens: Tokens, drafted: Sequence[DraftToken]):
    """(accepted length, weights of the next token, probability) of each thing the law can do with one block."""
    target_probs = [target(tokens[:i]) for i in range(len(tokens) + 1)]
    if law is Law.RATIO:
        thresholds, carried = ratio_thresholds(target_probs, drafted), [1.0] * (len(tokens) + 1)
    else:
        thresholds, carried = block_thresholds(target_probs, drafted)
    for length in range(len(tokens) + 1):
        if law is Law.RATIO:
            mass = math.prod(thresholds[:length]) * (1 - thresholds[length] if length < len(tokens) else 1)
        else:
            mass = (thresholds[length - 1] if length else 1) * math.prod(1 - h for h in thresholds[length:])
        weights = target_probs[length]
        if length < len(tokens):
            weights = residual(weights, drafted[length], carried[length])
        yield length, weights, mass


def committed_law(
    law: Law, target: Probs, draft: Probs, k: int, num: int, ends: frozenset[int] = frozenset()
):
    """Exact probabilities of the first ``num`` tokens after one round, the rest drawn from the target."""
    result: dict[Tokens, float] = defaultdict(float)
    for tokens, drafted, path_mass in paths(draft, k, ends):
        for length, weights, mass in outcomes(law, target, tokens, drafted):
            for token, weight in enumerate(weights):
                _extend(
                    result, target, (*tokens[:length], token), path_mass * mass * weight / weights.sum(), num
                )
    return result


def _extend(result: dict[Tokens, float], target: Probs, tokens: Tokens, mass: float, num: int) -> None:
    if mass <= 0:
        return
    if len(tokens) >= num:
        result[tokens[:num]] += mass
        return
    for token, probability in enumerate(target(tokens)):
        _extend(result, target, (*tokens, token), mass * probability, num)


def target_law(target: Probs, num: int) -> dict[Tokens, float]:
    result: dict[Tokens, float] = defaultdict(float)
    _extend(result, target, (), 1.0, num)
    return result


def expected_accepted(law: Law, target: Probs, draft: Probs, k: int) -> float:
    return sum(
        path_mass * mass * length
        for tokens, drafted, path_mass in paths(draft, k)
        for length, _, mass in outcomes(law, target, tokens, drafted)
    )


# --- decoding with the noise that serves -----------------------------------------------------------------------


def sampled(
    law: Law,
    target: Model,
    drafter: Model,
    params: SamplingParams,
    *,
    k: Callable[[Tokens], int],
    top_m: int = VOCAB,
    draft_params: SamplingParams | None = None,
    ends: frozenset[int] = frozenset(),
) -> tuple[Tokens, list[int]]:
    """One continuation, decoded with the code of both tiers, and the accepted length of each round with a block."""
    output: list[int] = []
    lengths: list[int] = []
    while len(output) < LENGTH:
        base_len = len(PROMPT) + len(output)
        draft: list[int] = []
        distributions = []
        for _ in range(k(tuple(output))):
            prefix = (*output, *draft)
            rows = [row(draft_params or params, prefix)]
            [(token, distribution)] = sample_draft(drafter(prefix)[None], rows, [base_len], top_m)
            draft.append(token)
            distributions.append(distribution)
            if token in ends:
                break
        prefixes = [(*output, *draft[:j]) for j in range(len(draft) + 1)]
        logits = torch.stack([target(prefix) for prefix in prefixes])
        rows = [row(params, prefix) for prefix in prefixes]
        accepted, token = decide(law, logits, rows, draft_tokens(draft, distributions))
        verdict = settle(
            [*draft[:accepted], token], accepted, stop_ids=frozenset(), room=LENGTH - len(output)
        )
        output.extend(verdict.committed)
        if draft:
            lengths.append(accepted)
    return tuple(output), lengths


def sampled_wrongly(
    law: Law,
    target: Model,
    drafter: Model,
    seed: int,
    *,
    k: int,
    verify_above: float = 0.0,
    draft_domain: Domain = Domain.DRAFT,
    accept_domain: Domain = Domain.ACCEPT,
    replace_domain: Domain = Domain.REPLACE,
    keyed_by_position_only: bool = False,
) -> Tokens:
    """The laws' own rules, with noise that may be made wrong on purpose; right as it is.

    ``verify_above`` drops a drawn token whose own draft probability is not above it. The domains may be made to share
    noise. ``keyed_by_position_only``: the round is left out of the keys of draft and acceptance.
    """
    params = SamplingParams(seed=seed)
    target_probs, drafter_probs = distribution(target, params), distribution(drafter, params)

    def key(base_len: int, position: int, domain: Domain) -> int:
        return row_key(seed if keyed_by_position_only else row_key(seed, base_len, domain), position, domain)

    output: list[int] = []
    while len(output) < LENGTH:
        base_len = len(PROMPT) + len(output)
        draft: list[DraftToken] = []
        for _ in range(k):
            prefix = (*output, *(token.token_id for token in draft))
            probs = np.array(drafter_probs(prefix))
            token = draw(probs, key(base_len, base_len + len(draft), draft_domain))
            if probs[token] <= verify_above:
                break
            draft.append(_token(token, probs))
        ids = tuple(token.token_id for token in draft)
        rows = [np.array(target_probs((*output, *ids[:j]))) for j in range(len(draft) + 1)]
        # Sharing the acceptance's noise means the very bits that drew the token.
        uniforms = [
            uniform(key(base_len, base_len + j, accept_domain))
            if accept_domain is not draft_domain
            else _own_uniform(key(base_len, base_len + j, accept_domain), ids[j])
            for j in range(len(draft))
        ]
        ruling = (ratio if law is Law.RATIO else block)(rows, draft, uniforms)
        position = base_len + ruling.accepted
        domain = replace_domain if ruling.accepted < len(draft) else Domain.BONUS
        output += [*ids[: ruling.accepted], draw(ruling.weights, row_key(seed, position, domain))]
    return tuple(output[:LENGTH])


def _own_uniform(key: int, token: int) -> float:
    return (token_bits(key, token) + 0.5) * 2.0**-63


@cache
def random_probs(name: int, vocab: int, *, sharpness: float = 1.5) -> Probs:
    """A model as probabilities after every prefix, fixed by ``name``."""

    @cache
    def probs(prefix: Tokens) -> np.ndarray:
        weights = np.exp(np.random.default_rng([name, *prefix]).normal(size=vocab) * sharpness)
        return weights / weights.sum()

    return probs
