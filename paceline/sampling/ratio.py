"""The ratio law: a token drawn from the draft's own distribution stays with probability min(1, target / draft).

Leviathan, Kalman, Matias 2023 (Fast Inference from Transformers via Speculative Decoding, algorithm 1); Chen et al.
2023. The first token that does not stay is replaced from (target - draft)+; if all stay, the target draws one more.
"""

from collections.abc import Sequence

from paceline.sampling.acceptance import DraftToken, Ruling, residual
from paceline.sampling.draws import Weights


def ratio_thresholds(target_probs: Sequence[Weights], draft: Sequence[DraftToken]) -> list[float]:
    """With what probability each of the K draft tokens stays, once those before it did."""
    return [
        min(1.0, float(probs[token.token_id]) / token.prob)
        for probs, token in zip(target_probs, draft, strict=False)
    ]


def ratio(target_probs: Sequence[Weights], draft: Sequence[DraftToken], uniforms: Sequence[float]) -> Ruling:
    """``target_probs`` K + 1 rows [V] float64, ``uniforms`` K numbers in (0, 1], independent of the draft."""
    thresholds = ratio_thresholds(target_probs, draft)
    for index, (threshold, uniform) in enumerate(zip(thresholds, uniforms, strict=True)):
        if uniform > threshold:
            return Ruling(index, residual(target_probs[index], draft[index]))
    return Ruling(len(draft), target_probs[len(draft)])
