"""The draws of many rows of a step on a device at once: one by one each would wait for the device several times.

The passes are those of ``device``; what can win is compared on the host as for one row (``one_row``), so the tokens are the same.
"""

from collections.abc import Sequence

import torch

from paceline.sampling.contenders import LAST, Rank
from paceline.sampling.device import leaders_together, masses_together, near_together
from paceline.sampling.noise import Domain, row_key
from paceline.sampling.one_row import belongs, draw_from, winner_of
from paceline.sampling.processors import TokenRow, narrowed


def draw_together(
    processed: Sequence[torch.Tensor], firsts: Sequence[Rank], rows: Sequence[TokenRow], domain: Domain
) -> dict[int, int]:
    """Tokens by the row's index, without rows that are greedy or have to be looked at by themselves.

    ``processed`` are R rows [V] of penalised logits, ``firsts`` their likeliest tokens.
    """
    drawing = _Drawing(processed, firsts, rows, domain)
    by_k: dict[int, list[int]] = {}
    undecided: dict[int, Rank] = {}
    for index, row in enumerate(rows):
        if row.params.greedy:
            continue
        if 0 < row.params.top_k < len(processed[index]):
            by_k.setdefault(row.params.top_k, []).append(index)
        else:
            undecided[index] = LAST
    for k, indices in by_k.items():
        drawing.among_leaders(indices, k)
    while undecided:
        undecided = drawing.among_all(undecided)
    return drawing.drawn


class _Drawing:
    def __init__(
        self,
        processed: Sequence[torch.Tensor],
        firsts: Sequence[Rank],
        rows: Sequence[TokenRow],
        domain: Domain,
    ) -> None:
        self.drawn: dict[int, int] = {}
        self._processed, self._firsts = processed, firsts
        self._params = [row.params for row in rows]
        self._keys = [row_key(row.params.seed, row.position, domain) for row in rows]

    def among_leaders(self, indices: Sequence[int], k: int) -> None:
        """Rows of which top_k leaves so many tokens."""
        for index, found in zip(indices, leaders_together(self._matrix(indices), k), strict=True):
            if found is not None:
                params, top = self._params[index], self._firsts[index].logit
                self.drawn[index] = draw_from(*narrowed(*found, top, params), top, params, self._keys[index])

    def among_all(self, undecided: dict[int, Rank]) -> dict[int, Rank]:
        """Draw for each row among the tokens that rank before the given one; rows whose winner top_p or min_p excludes, with it."""
        indices = list(undecided)
        matrix = self._matrix(indices)
        tops = [self._firsts[index].logit for index in indices]
        temperatures = [self._params[index].temperature for index in indices]
        keys = [self._keys[index] for index in indices]
        near = near_together(matrix, tops, temperatures, keys, list(undecided.values()))
        winners: dict[int, Rank] = {}  # by place in ``indices``
        for place, (index, found) in enumerate(zip(indices, near, strict=True)):
            params = self._params[index]
            if found is None:
                continue
            token = winner_of(*found, tops[place], params, keys[place])
            if token == self._firsts[index].token_id or (params.top_p == 1.0 and params.min_p == 0.0):
                self.drawn[index] = token
            else:
                winners[place] = Rank(float(found[1][found[0] == token][0]), token)
        if not winners:
            return {}
        places = list(winners)
        found_masses = masses_together(
            matrix[places],
            [tops[place] for place in places],
            [temperatures[place] for place in places],
            list(winners.values()),
        )
        excluded: dict[int, Rank] = {}
        for (place, winner), of_row in zip(winners.items(), found_masses, strict=True):
            index = indices[place]
            stays = belongs(winner, tops[place], *of_row, self._params[index])
            if stays:
                self.drawn[index] = winner.token_id
            elif stays is not None:
                excluded[index] = winner
        return excluded

    def _matrix(self, indices: Sequence[int]) -> torch.Tensor:
        return torch.stack([self._processed[index] for index in indices])
