"""Which of the target's tokens the drafter's head knows: the likeliest in its answers."""

from collections.abc import Sequence

import numpy as np
import torch

from training.answers import Answer

_PROMPT_WEIGHT = 0.1
"""Answers copy from prompts, so tokens of prompts count a little."""


def ranked_vocabulary(
    answers: Sequence[Answer], vocab_size: int, num_kept: int, always: Sequence[int]
) -> torch.Tensor:
    """Ascending ids [min(num_kept, vocab_size)] with the largest expected count in answers; ``always`` are among them.

    The expected count, the sum of the target's probabilities, is smoother than counting what was drawn. Ties, tokens
    never seen among them, go to the lower id: a byte-pair vocabulary is in order of frequency.
    """
    counts = np.zeros(vocab_size)
    for answer in answers:
        np.add.at(counts, answer.top_ids.ravel(), np.exp(answer.top_logprobs).ravel())
        np.add.at(counts, answer.ids[: answer.prompt_len], _PROMPT_WEIGHT)
    counts[list(always)] = np.inf
    order = np.lexsort((np.arange(vocab_size), -counts))
    return torch.from_numpy(np.sort(order[:num_kept]).astype(np.int64))
