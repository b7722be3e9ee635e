"""Which tokens the coupled law is likely to draw, as far as one model can tell: the drafter's view of the target's draw.

The target takes argmax(log p + g). Who has log q and the same noise g ranks the target's candidates by log q + g, which is
much sharper than a ranking by q alone: the noise has already decided most of it.
"""

from collections.abc import Sequence

import torch

from paceline.sampling.noise import Domain, gumbel
from paceline.sampling.processors import TokenRow, penalise, processed_logprobs


def likeliest(logits: torch.Tensor, rows: Sequence[TokenRow], count: int) -> list[list[int]]:
    """For each row the ``count`` tokens with the largest score, the first being what ``choose`` would take.

    ``logits`` [R, V] float32. Fewer where truncation leaves fewer. At temperature 0 the score is the processed logit.
    """
    ranked = []
    for index, row in enumerate(rows):
        if row.params.greedy:
            scores = penalise(logits[index], row)
        else:
            scores = processed_logprobs(logits[index : index + 1], [row])[0].double()
            scores = scores + gumbel(
                row.params.seed, row.position, Domain.COUPLED, logits.shape[1], logits.device
            )
        values, ids = torch.topk(scores, min(count, len(scores)))
        ranked.append(
            [token for token, value in zip(ids.tolist(), values.tolist(), strict=True) if value > -1e30]
        )
    return ranked
