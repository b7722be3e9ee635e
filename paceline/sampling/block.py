"""Block verification: the draft's tokens are accepted jointly, which keeps more of them than one by one ever can.

Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami, Suresh (ICLR 2025), Block Verification Accelerates Speculative Decoding,
algorithm 2. With b the target and s the draft distribution, x_1 .. x_K the draft, w_0 = 1:

    w_i = min(1, w_(i-1) * b(x_i) / s(x_i))                         how much of the target's mass the path still carries
    Z_i = sum_x (w_i * b(x | x_1..x_i) - s(x | x_1..x_i))+          what the next position lacks
    h_i = Z_i / (Z_i + 1 - w_i), and h_K = w_K                      stopping after i is acceptable with probability h_i

The accepted length is the *largest* acceptable i, not the first failure. The next token is drawn from
(w_i * b - s)+ at the next position, from the target itself after K. No later position needs another distribution than
the target's: P(length >= i | x_1..x_i) = w_i, so mass accepted and mass replaced add up to the target's at each
position. (The paper's greedy variant, in its appendix, is the one that has to change the target afterwards.)

Whether a length is accepted hangs on the tokens and uniforms *behind* it. So noise of this round that lies behind the
accepted length is spent, unlike under the ratio law: reusing it for the same positions in the next round biases
the output (tests/law has that variant as a negative control). Hence the noise of draft and acceptance is keyed
by the round's base length too.

A block may end early, by a rule that looks only at tokens that are in it (its end of sequence): h there is w.
"""

from collections.abc import Sequence

import numpy as np

from paceline.sampling.acceptance import DraftToken, Ruling, residual
from paceline.sampling.draws import Weights


def block_thresholds(
    target_probs: Sequence[Weights], draft: Sequence[DraftToken]
) -> tuple[list[float], list[float]]:
    """(h_1 .. h_K, w_0 .. w_K)."""
    carried = [1.0]
    for probs, token in zip(target_probs, draft, strict=False):
        carried.append(min(1.0, carried[-1] * float(probs[token.token_id]) / token.prob))
    thresholds = [
        _threshold(carried[index], target_probs[index], draft[index]) for index in range(1, len(draft))
    ]
    return [*thresholds, *carried[len(draft) :]] if draft else [], carried


def _threshold(carried: float, target_probs: Weights, following: DraftToken) -> float:
    """h_i from w_i and both distributions of the next position; the sum needs the draft's few tokens only."""
    shared = np.minimum(carried * target_probs[following.support], following.probs).sum()
    lacking = max(0.0, carried - float(shared))
    # 0 / 0: draft and target agree and all mass is carried, so the next token stays for certain; any value is right.
    return 1.0 if carried == 1.0 else lacking / (lacking + 1.0 - carried)


def block(target_probs: Sequence[Weights], draft: Sequence[DraftToken], uniforms: Sequence[float]) -> Ruling:
    """``target_probs`` K + 1 rows [V] float64, ``uniforms`` K numbers in (0, 1], independent of the draft."""
    thresholds, carried = block_thresholds(target_probs, draft)
    acceptable = [
        index
        for index, (threshold, uniform) in enumerate(zip(thresholds, uniforms, strict=True), start=1)
        if uniform <= threshold
    ]
    length = acceptable[-1] if acceptable else 0
    if length == len(draft):
        return Ruling(length, target_probs[length])
    return Ruling(length, residual(target_probs[length], draft[length], carried[length]))
