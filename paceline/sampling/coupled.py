"""The coupled law: the token at a position is argmax_v(log p(v) + g(seed, position, v)), for target and drafter alike.

The draw is exact (Gumbel-max), and it is a pure function of logits, parameters, seed and position: nothing is carried
from step to step, and a row's token does not depend on the rows beside it. Agreement of target and drafter per
position is sum_j 1 / sum_i max(p_i / p_j, q_i / q_j) (Daliri, Musco, Suresh 2024). How it is computed: ``one_row``.
"""

from collections.abc import Callable, Sequence

import torch

from paceline.sampling import largest, scan
from paceline.sampling.contenders import Rank
from paceline.sampling.noise import Domain
from paceline.sampling.one_row import draw_row
from paceline.sampling.processors import TokenRow, changes_logits, check_largest, largest_logits, penalise
from paceline.sampling.together import draw_together


def choose(logits: torch.Tensor, rows: Sequence[TokenRow], domain: Domain = Domain.COUPLED) -> list[int]:
    """The coupled law's token for each row; at temperature 0 the largest processed logit, the lowest id among equals.

    ``logits`` [R, V] float32, one row for each of ``rows``. Raises BadLogitsError (an EngineError) naming the rows
    whose logits hold NaN or +inf, or nothing above -inf. ``domain``: whose noise the draw takes.
    """
    return list(map(_draws(logits, rows, domain), range(len(rows))))


def follow(
    logits: torch.Tensor, rows: Sequence[TokenRow], drafts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For each draft the target's tokens, up to and with the first one that differs from it.

    As ``choose``; a draft of K tokens has K + 1 of the rows, one draft after the other. A draw reads the whole vocabulary, so rows
    behind the first difference are not drawn; that their logits are sound is looked at all the same.
    """
    draw = _draws(logits, rows, Domain.COUPLED)
    followed: list[list[int]] = []
    first = 0
    for draft in drafts:
        tokens = [draw(first)]
        for index, guess in enumerate(draft, first + 1):
            if tokens[-1] != guess:
                break
            tokens.append(draw(index))
        followed.append(tokens)
        first += len(draft) + 1
    return followed


def top2_gap(logits: torch.Tensor) -> torch.Tensor:
    """Largest logit less the second largest: [R] float32; how near a greedy choice was to another one."""
    two = torch.topk(logits, 2, dim=-1).values
    return two[:, 0] - two[:, 1]


def _draws(logits: torch.Tensor, rows: Sequence[TokenRow], domain: Domain) -> Callable[[int], int]:
    """The token of a row, by the row's index. Raises BadLogitsError for any of them."""
    known = largest.told(logits)
    if known is not None and not any(changes_logits(row.params) for row in rows):
        best, top = known
        check_largest(top)

        def draw_known(index: int) -> int:
            row = rows[index]
            if row.params.greedy:
                return best[index]
            return draw_row(logits[index], Rank(top[index], best[index]), row, domain)

        return draw_known
    processed = [penalise(logits[index], row) for index, row in enumerate(rows)]
    found, highest = largest_logits(processed) if rows else ([], [])
    firsts = list(map(Rank, highest, found))
    together: dict[int, int] = {} if scan.on_host(logits) else draw_together(processed, firsts, rows, domain)

    def draw(index: int) -> int:
        row = rows[index]
        if row.params.greedy:
            return found[index]
        token = together.get(index)
        return draw_row(processed[index], firsts[index], row, domain) if token is None else token

    return draw
