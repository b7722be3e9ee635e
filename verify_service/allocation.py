"""How many tokens each sequence asks its drafter for: positions in falling order of worth, while the rate rises.

Position j of sequence i is worth the probability S_ij that it and all before it are accepted. S falls along a block, so the
order never takes a position before its predecessor, and the best prefix is the best allocation. Plain decoding is the
empty prefix, without the time of asking.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from paceline.ranges import MAX_K
from paceline.types import DepthReason
from verify_service.belief import (
    FIRST_PROBE,
    LAST_PROBE,
    OFF_DWELL,
    ON_DWELL,
    ZERO_ROUNDS,
    Track,
    View,
    total,
)
from verify_service.facts import Decision, RowFact, State
from verify_service.prices import Model, Prices

ON, OFF = 1.05, 1.00
"""Speculation is switched on from such a ratio to plain decoding, off below such a one."""
TAIL = 1.10
"""A step that plain rows share, or that reads a prompt whose first token waits for it, takes at most so many times what it would
take without guesses."""
PROBE_SHARE = 0.02
"""Of the time, for looking at drafters that are not in use."""
FEWEST_WORTH = 0.02
"""A row that is accepted more rarely never pays."""

_MESSAGE_S = 1e-4  # work that a question makes beside the drafter's own
_THOUGHT_S, _THOUGHT_SHARE = (
    1.5e-5,
    0.005,
)  # a look takes the controller so long; all of them such a part of the time at most
_HARDLY_WORTH = 0.5
_HARDLY_EVER = 1e9  # rounds
_SLOWEST_CHEAP = 6  # rounds between two looks that cost next to nothing
_LOOK = 2  # tokens that a drafter is asked for, to look at it, where each takes it time
_DEPTHS_TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_ON_SHARE = -1.0 / ON
_ENTRIES = 512  # positions looked at in a step, over all sequences
_HOPELESS = 0.85  # of the best rate: so far down the order nothing better comes


class _Choice(NamedTuple):
    depths: dict[int, int]
    rate: float
    rows: float
    tail: bool


_Entry = tuple[float, int, int, float]  # -worth, index of the sequence, position, rows expected


def allocate(
    model: Model,
    state: State,
    asking: Sequence[tuple[RowFact, Track, int]],
    decisions: dict[int, Decision],
    sequences: int,
    fixed: tuple[float, float],
    *,
    guarded: bool,
) -> float:
    """Depths of those who may ask, the others' rows and tokens being ``fixed``; tokens per second expected."""
    rest_rows, rest_tokens = fixed
    prices = model.prices(state, sequences, sequences + ceil(rest_rows) + 2)
    base_s, rest_s = prices.step_s(0), prices.step_s(int(rest_rows + 0.5))
    base = sequences + rest_tokens
    plain_rate = base / (rest_s + state.quiet_gap_s)
    # A row worth far less than the next one costs at the plain rate is in no allocation: it need not be thought about.
    next_s = prices.step_s(int(rest_rows + 0.5) + 1) - rest_s
    least = max(FEWEST_WORTH, _HARDLY_WORTH * plain_rate * next_s)
    deepest = min(max(8, _ENTRIES // len(asking)), MAX_K)
    entries: list[_Entry] = []
    survivals: list[list[float]] = []
    fills: list[float] = []
    reaches: list[float] = []
    any_on = settled = False
    view, named = state.view(asking[0][0].drafter), ""
    for index, (row, track, bound) in enumerate(asking):
        if row.drafter != named:
            view, named = state.view(row.drafter), row.drafter
            reaches = view.reach
        fill = 1.0 if view.always else view.fill(track)
        survival = view.survival(track, row.prior, min(deepest, bound), least)
        survivals.append(survival)
        fills.append(fill)
        share = -1.0
        if track.on:
            any_on = True
            settled |= track.since >= ON_DWELL
        elif track.since < OFF_DWELL:
            continue
        else:
            share = _ON_SHARE
        entries += [
            (worth * share, index, position, fill * reaches[position])
            for position, worth in enumerate(survival)
        ]
        if survival[-1] < least:
            entries.pop()
    entries.sort()
    prices = model.prices(state, sequences, sequences + ceil(rest_rows) + len(entries) + 2)
    best = _best_of(state, asking, entries, prices, rest_rows, base, TAIL * base_s if guarded else 0.0)
    needed = ON if not any_on else OFF if settled else OFF - (ON - OFF)
    pays = bool(best.depths) and best.rate >= needed * plain_rate
    rate = best.rate if pays else plain_rate
    at = int((best.rows if pays else rest_rows) + 0.5)
    cost_s = prices.step_s(at + 1) - prices.step_s(at)
    depths = best.depths
    company = len(depths) if pays else 0
    for index, (row, track, bound) in enumerate(asking):
        k = depths.get(index, 0) if pays else 0
        survival = survivals[index]
        worth_s = survival[k] / rate if k < len(survival) else 0.0
        view = state.view(row.drafter)
        if not k:
            reason = DepthReason.COST
            if not track.on and track.since < OFF_DWELL:
                reason = DepthReason.DWELL
            elif best.tail:
                reason = DepthReason.TAIL
            elif not pays and (depths or fills[index] * total(survival) / rate > cost_s):
                reason = DepthReason.ASKING
            decisions[row.id] = idle(view, track, row, base_s, reason, sequences, company, worth_s, cost_s)
            continue
        if k == bound:
            reason = DepthReason.ALL if bound == row.k_max else DepthReason.ROOM
        else:
            reason = DepthReason.TAIL if best.tail else DepthReason.COST
        fill = fills[index]
        rows, tokens = 0.0, 1.0
        for reach, worth in zip(view.reach, survival[:k], strict=False):
            there = fill * reach
            rows += there
            tokens += there * worth
        track.since = track.since + 1 if track.on else 0
        track.on, track.rows, track.tokens = True, rows, tokens
        decisions[row.id] = Decision(k, True, reason, tokens, worth_s, cost_s)
    return rate


def idle(
    view: View,
    track: Track,
    row: RowFact,
    plain_s: float,
    reason: DepthReason,
    sequences: int,
    company: int,
    worth_s: float = 0.0,
    cost_s: float = 0.0,
) -> Decision:
    """The sequence's next round is plain; now and then its drafter is looked at without being waited for."""
    if track.on:
        track.on, track.since = False, 0
        track.next_probe = track.probe_gap = FIRST_PROBE
    else:
        track.since += 1
    track.rows, track.tokens, track.reason = 0.0, 1.0, reason
    if track.next_probe > 0:
        track.next_probe -= 1
        return Decision(0, False, reason, 1.0, worth_s, cost_s)
    k, least = look_cost(view, row, plain_s, sequences, company)
    if track.suspended and track.since <= 2 * ZERO_ROUNDS:
        least = 1  # what was known before may still hold: eight misses in a row happen to good drafters
    track.next_probe = min(max(track.probe_gap, least), LAST_PROBE)
    track.probe_gap = min(2 * track.probe_gap, max(2 * least, _SLOWEST_CHEAP))
    return Decision(k, False, reason, 1.0, worth_s, cost_s)


def look_cost(view: View, row: RowFact, plain_s: float, sequences: int, company: int) -> tuple[int, int]:
    """How many tokens a drafter is asked for to look at it, and the least number of rounds between two looks.

    A drafter that computes for long, or has a long text to read first, takes that from somebody: it is looked at more rarely. Where
    ``company`` others are asked anyway, it is one more in a batch.
    """
    k = min(row.room, row.k_max)
    draft_s = view.drafter.draft_s
    if (slope_s := view.slope_s()) * k > _MESSAGE_S:
        k = min(k, _LOOK)
        draft_s = max(draft_s + slope_s * (k - view.drafter.k), 0.0)
    draft_s = max(draft_s, view.drafter.look_s)
    reading_s = view.drafter.read_s * row.unread
    asking = (draft_s + _MESSAGE_S) / (PROBE_SHARE * (1 + company)) + reading_s / PROBE_SHARE
    thinking = sequences * _THOUGHT_S / _THOUGHT_SHARE
    return k, ceil(min(max(asking, thinking) / plain_s, _HARDLY_EVER))


def _best_of(
    state: State,
    asking: Sequence[tuple[RowFact, Track, int]],
    entries: Sequence[_Entry],
    prices: Prices,
    rows: float,
    tokens: float,
    guard_s: float,
) -> _Choice:
    """The best prefix among those of all drafters and depths that are worth trying."""
    best: _Choice | None = None
    longest = max([entry[2] for entry in entries], default=0) + 1
    for exposed_s, depth, names in _exposures(state, asking, longest):
        among = entries
        if names is not None:
            among = [one for one in among if asking[one[1]][0].drafter in names]
        if depth < longest:
            among = [one for one in among if one[2] < depth]
        choice = _best(among, prices, rows, tokens, exposed_s + state.quiet_gap_s, guard_s)
        if best is None or choice.rate > best.rate:
            best = choice
    assert best is not None, "somebody asks"
    return best


def _best(
    entries: Sequence[_Entry], prices: Prices, rows: float, tokens: float, exposed_s: float, guard_s: float
) -> _Choice:
    """The prefix of ``entries`` with most tokens per second; no depths where none is allowed."""
    best_rate, best_count, best_rows = 0.0, 0, rows
    tail = False
    count = 0
    price = prices.step_s
    at, step_s = -1, 0.0
    for negative, _, _, reach in entries:
        rows += reach
        tokens -= negative * reach
        if at != (now := int(rows + 0.5)):
            at, step_s = now, price(now)
            if guard_s and step_s > guard_s:
                tail = True
                break
        count += 1
        rate = tokens / (step_s + exposed_s)
        if rate > best_rate:
            best_rate, best_count, best_rows = rate, count, rows
        elif rate < _HOPELESS * best_rate:
            break
    # Along a block positions come in their order: the last one of a sequence is its depth.
    depths = {index: position + 1 for _, index, position, _ in entries[:best_count]}
    return _Choice(depths, best_rate, best_rows, tail and best_count == count)


def _exposures(
    state: State, asking: Sequence[tuple[RowFact, Track, int]], longest: int
) -> list[tuple[float, int, frozenset[str] | None]]:
    """(time exposed, greatest depth, drafters) to be tried: a slow drafter, or a deep block, makes all wait.

    None for the drafters: all of them. Beyond ``longest``, the deepest position that is worth anything, waiting longer
    gains nothing.
    """
    deepest: dict[str, int] = {}
    for row, _, bound in asking:
        if bound > deepest.get(row.drafter, 0):
            deepest[row.drafter] = bound
    found: list[tuple[float, int, frozenset[str] | None]] = []
    names = sorted(deepest, key=lambda name: (state.view(name).drafter.exposed_s, name))
    for last in range(len(names)):
        among = names[: last + 1]
        most = max(deepest[name] for name in among)
        views = [state.view(name) for name in among]
        slopes = [view.slope_s() for view in views]
        flat = max(slopes) * most < _MESSAGE_S
        depths = [most] if flat else [*(d for d in _DEPTHS_TRIED if d < most), most]
        for depth in depths[: 1 + sum(d < longest for d in depths)]:
            exposed_s = 0.0
            for name, view, slope in zip(among, views, slopes, strict=True):
                drafter = view.drafter
                more = slope * (min(depth, deepest[name]) - drafter.k)
                exposed_s = max(exposed_s, drafter.exposed_s + more)
            found.append((exposed_s, depth, None if last == len(names) - 1 else frozenset(among)))
    return found
