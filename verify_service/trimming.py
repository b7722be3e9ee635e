"""How much of each block is verified, now that all blocks are here and the time of asking is spent."""

from collections.abc import Sequence

from paceline.types import DepthReason
from verify_service.allocation import FEWEST_WORTH, TAIL
from verify_service.facts import Ready, State
from verify_service.prices import Model


def trim(
    model: Model, state: State, ready: Sequence[Ready], num_sequences: int, prompt_rows: int, num_plain: int
) -> dict[int, tuple[int, DepthReason | None]]:
    """How much of each block is verified, now that all that come are here, and why less than all of it.

    ``num_sequences`` rounds share the step with ``prompt_rows``; ``num_plain`` of them have no block by plan or by
    suspension. The time of asking is spent. Neither plain rows nor somebody's first token may wait long for further rows.
    """
    kept: dict[int, tuple[int, DepthReason | None]] = {}
    entries: list[tuple[float, int, int, float]] = []
    fixed_rows = 0
    for index, block in enumerate(ready):
        track = state.tracks.get(block.id)
        if block.fixed or track is None:
            fixed_rows += block.length
            kept[block.id] = (block.length, None)
            continue
        survival: Sequence[float] | None = block.survival
        if survival is None:
            survival = state.view(track.drafter).survival(track, track.prior, block.length, FEWEST_WORTH)
        entries += [
            (-survival[position] if position < len(survival) else 0.0, index, position, 1.0)
            for position in range(block.length)
        ]
    if not entries:
        return kept
    entries.sort()
    base_rows = prompt_rows + fixed_rows
    prices = model.prices(state, num_sequences, num_sequences + base_rows + len(entries) + 1)
    base_s = prices.step_s(base_rows)
    guard_s = TAIL * base_s if num_plain or prompt_rows else 0.0
    # Time is worth what it yields on average, over rounds with a block and without: a round that has one is no reason to
    # value time more. So not the best rate of this step, but the most tokens beyond what its time is worth.
    rate = state.rate or num_sequences / base_s
    best = gain = 0.0
    count, tail = 0, False
    for taken, (negative, _, _, _) in enumerate(entries, 1):
        step_s = prices.step_s(base_rows + taken)
        if guard_s and step_s > guard_s:
            tail = True
            break
        gain -= negative
        if gain - rate * (step_s - base_s) > best:
            best, count = gain - rate * (step_s - base_s), taken
    depths = {entry[1]: entry[2] + 1 for entry in entries[:count]}
    for index, block in enumerate(ready):
        if block.id in kept:
            continue
        k = depths.get(index, 0)
        reason = None if k == block.length else DepthReason.TAIL if tail else DepthReason.COST
        kept[block.id] = (k, reason)
    return kept
