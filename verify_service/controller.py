"""How many tokens to draft for each sequence, every step: the depths that give most tokens per second (DESIGN section 6).

A pure function of a small state and of what happened: ``decide(model, state, facts)`` gives the next state and one
decision for each round of the step, ``trim`` cuts blocks that are here. No clock, no randomness, no generator: the same
state and facts give the same decisions to the last bit, so a log of facts replays (``verify_service.steering``). Nothing here can change a
token (I1): a wrong decision costs time.

What is known of a sequence is its acceptance (discounted Beta counts on a prior), how often its drafter has a guess at all, and
how long nothing was accepted. What is known of a drafter is how acceptance changes along a block, how long its blocks are and
how much time asking it exposes. A step of B sequences and R rows takes ``T(R, B)``, as measured at start and corrected by
every step since. Position j of sequence i is worth the probability S_ij that it and all before it are accepted; positions
are taken in falling order of S while

    (tokens expected) / (T(rows, B) + time exposed by asking)

rises: S falls along a block, so the order never takes a position before its predecessor, and the best prefix is the best
allocation. Plain decoding is the empty prefix, without the time of asking. A sequence that drafts nothing is looked at
now and then by asking without waiting: the guess is compared with what plain decoding commits meanwhile, which costs a message
(acceptance without verifying, DESIGN section 6, "Censoring").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

from paceline.ranges import MAX_K
from paceline.types import AcceptancePrior, DepthReason
from verify_service.belief import (
    DEPTHS,
    FIRST_PROBE,
    LAST_PROBE,
    OFF_DWELL,
    ON_DWELL,
    DrafterTrack,
    Track,
    View,
    looked_at,
    timed,
    unasked,
    waited_for,
)
from verify_service.costs import CostTable, table_of

ON, OFF = 1.05, 1.00
"""Speculation is switched on from such a ratio to plain decoding, off below such a one."""
TAIL = 1.10
"""A step that plain rows share takes at most so many times a plain step."""
PROBE_SHARE = 0.02
"""Of the time, for looking at drafters that are not in use."""

_MESSAGE_S = 1e-4  # work that a question makes beside the drafter's own
_LOOK = 2  # tokens that a drafter is asked for, to look at it, where each takes it time
_FEWEST_WORTH = 0.02  # a row that is accepted more rarely never pays
_CROWD, _REST = (
    8,
    4,
)  # among more sequences than that, one that drafts nothing is thought about every so many rounds
_FOUND_KEEP = 0.05
_LOOKED_UP_LOOK = 16  # rounds between two looks at a drafter while look-ups do better, at least
_ENTRIES = 512  # positions looked at in a step, over all sequences
_HOPELESS = 0.85  # of the best rate: so far down the order nothing better comes
_COUNT_EDGES = (1, 4, 10, 31)  # sequences
_EXTRA_EDGES = (0.0, 1.0, 2.0, 4.0, 8.0)  # further rows a sequence
_REGIONS = (len(_COUNT_EDGES) + 1) * (len(_EXTRA_EDGES) + 1)
_DEFAULT_TABLE = table_of(
    [(1, 1, 0.010), (1, 2, 0.011), (1, 5, 0.015), (1, 9, 0.022), (8, 8, 0.020), (8, 40, 0.055)],
    origin="a guess: nothing was measured",
)


# --- what goes in and out -------------------------------------------------------------------------------------------


class RowFact(NamedTuple):
    """One sequence's part of the step that has just ended."""

    id: int
    drafter: str  # empty: its plan is plain
    k_max: int  # what the plan allows; 0 after its last round
    room: int  # most draft tokens that its next round can use
    fixed: bool
    asked: int  # of this round; 0: nothing was waited for
    proposed: int  # length of the block that came; -1: none came
    drafted: int  # of these were verified
    agreed: int  # of these were the target's own
    look: tuple[int, int, int] | None  # a guess not waited for: length, tokens compared, tokens right
    prior: AcceptancePrior | None
    finished: bool
    found: tuple[float, ...] | None = None
    """For its next round, looked up beside the target: the probability of each guess that all up to it are right."""
    alone: bool = False  # nobody else is asked


class StepFacts(NamedTuple):
    """The step that has just ended."""

    step: int
    rows: tuple[RowFact, ...]
    num_sequences: int  # in the forward
    num_rows: int
    prompt_rows: int
    context: float  # mean tokens of context of a sequence
    forward_s: float
    accept_s: float
    gap_s: float  # from the end of the step before to the start of this one; negative: not known
    draft_s: float  # longest stay on a draft replica among the blocks
    running: int  # sequences that decode now, those outside this step included
    running_plain: int  # of these by plan


class Decision(NamedTuple):
    """For one sequence's next round."""

    k: int
    wait: bool  # False with k > 0: ask, but do not wait; the answer is compared with what plain decoding commits
    reason: DepthReason
    expected_tokens: float
    next_worth_s: float
    next_cost_s: float


UNDECIDED = Decision(0, False, DepthReason.UNSAID, 1.0, 0.0, 0.0)
_PLAIN = Decision(0, False, DepthReason.PLAIN, 1.0, 0.0, 0.0)


class Ready(NamedTuple):
    """A round that is about to run with a block."""

    id: int
    length: int
    fixed: bool
    survival: tuple[float, ...] | None = None  # the drafter's own word on each position, where it gives one


# --- state ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """All that ``decide`` remembers."""

    tracks: Mapping[int, Track] = field(default_factory=dict)
    drafters: Mapping[str, DrafterTrack] = field(default_factory=dict)
    pace: float = 1.0  # steps take so many times what the table says,
    regions: tuple[float, ...] = (1.0,) * _REGIONS  # and here so many times that
    accept_row_s: float = 0.0
    quiet_gap_s: float = 0.0  # between two steps when nothing was asked
    context: float = 256.0
    rate: float = 0.0  # tokens per second that the last decision expected, over all sequences
    found_gain: float = 1.0  # over plain decoding, where what is looked up beside the target is all there is


class Model:
    """The cost table with what was looked up in it before. Holds no state: the same questions, the same answers."""

    def __init__(self, table: CostTable | None) -> None:
        self.table = table or _DEFAULT_TABLE
        self._curves: dict[int, list[float]] = {}
        self._region_lists: dict[int, list[int]] = {}

    def curve(self, sequences: int, rows: int) -> list[float]:
        """Table times of ``sequences`` with 0, 1, ... further rows, up to ``rows`` in all at least."""
        curve = self._curves.setdefault(sequences, [])
        regions = self._region_lists.setdefault(sequences, [])
        for extra in range(len(curve), rows - sequences + 2):
            curve.append(self.table.step_s(sequences + extra, sequences))
            regions.append(_region(sequences, extra))
        return curve

    def regions(self, sequences: int) -> list[int]:
        """Region of each entry of ``curve``."""
        return self._region_lists[sequences]

    def prices(self, state: State, sequences: int, rows: int) -> "Prices":
        """What steps of ``sequences`` take now, up to ``rows`` rows."""
        return Prices(self, state, sequences, rows)

    def times(self, state: State, sequences: int, rows: int) -> list[float]:
        """The same as a list, by further rows."""
        prices = Prices(self, state, sequences, rows)
        return [prices.step_s(extra) for extra in range(rows - sequences + 1)]


class Prices:
    """What a step of so many sequences takes now, by further rows: forward and accept."""

    __slots__ = ("_curve", "_each_s", "_factors", "_first_s", "_pace", "_regions", "_row_s", "_sequences")

    def __init__(self, model: Model, state: State, sequences: int, rows: int) -> None:
        self._curve = model.curve(sequences, rows)
        self._regions = model.regions(sequences)
        table = model.table
        beyond = state.context - table.context
        self._first_s = beyond * sequences * (table.row_key_s + table.sequence_key_s)
        self._each_s = beyond * table.row_key_s
        self._pace, self._factors, self._row_s = state.pace, state.regions, state.accept_row_s
        self._sequences = sequences

    def step_s(self, extra: int) -> float:
        """With so many rows beyond one a sequence."""
        return (self._curve[extra] + self._first_s + extra * self._each_s) * self._pace * self._factors[
            self._regions[extra]
        ] + (self._sequences + extra) * self._row_s


def _region(sequences: int, extra: float) -> int:
    count = 0
    while count < len(_COUNT_EDGES) and sequences > _COUNT_EDGES[count]:
        count += 1
    depth = 0
    each = extra / sequences
    while depth < len(_EXTRA_EDGES) and each > _EXTRA_EDGES[depth]:
        depth += 1
    return count * (len(_EXTRA_EDGES) + 1) + depth


# --- deciding -------------------------------------------------------------------------------------------------------


class _Choice(NamedTuple):
    depths: dict[int, int]
    rate: float
    rows: float
    tail: bool


_Entry = tuple[float, int, int, float]  # -worth, index of the sequence, position, rows expected


def decide(model: Model, state: State, facts: StepFacts) -> tuple[State, dict[int, Decision]]:
    """The state after the step, and the depth of the next round of each sequence that goes on."""
    state = _learn(model, state, facts)
    tracks = state.tracks
    asking: list[tuple[RowFact, Track, int]] = []
    decisions: dict[int, Decision] = {}
    suspended: list[RowFact] = []
    resting: list[RowFact] = []
    crowded = len(facts.rows) > _CROWD
    sequences = max(facts.running, 1)
    fixed_rows = fixed_tokens = 0.0
    looked_up: list[RowFact] = []
    asks = _Asks(model, state, sequences)
    mine = set()
    for row in facts.rows:
        id_ = row.id
        mine.add(id_)
        if row.finished:
            continue
        if not row.drafter:
            decisions[id_] = _PLAIN
            continue
        track = tracks[id_]
        bound = min(row.k_max, row.room)
        if row.found is not None and (row.alone or (row.found and not asks.better(row, track, bound))):
            looked_up.append(row)
            track.rows, track.tokens = float(len(row.found)), 1.0 + sum(row.found)
            fixed_rows += track.rows
            fixed_tokens += track.tokens - 1.0
        elif row.fixed or bound <= 0:
            bound = max(bound, 0)
            track.on, track.rows, track.tokens = bound > 0, float(bound), 1.0
            fixed_rows += bound
            reason = DepthReason.FIXED if bound == row.k_max else DepthReason.ROOM
            decisions[id_] = Decision(bound, bound > 0, reason, 0.0, 0.0, 0.0)
        elif track.suspended:
            suspended.append(row)
        elif (
            crowded
            and row.look is None
            and not track.on
            and track.since > OFF_DWELL
            and (track.since + row.id) % _REST
        ):
            resting.append(row)
        else:
            asking.append((row, track, bound))
    # The rows of those that are not in this step, or whose depth is fixed: taken as they are.
    for id_, track in tracks.items():
        if id_ not in mine and track.rows:
            fixed_rows += track.rows
            fixed_tokens += track.tokens - 1.0
    views = (
        {name: View(drafter) for name, drafter in state.drafters.items()}
        if asking or suspended or resting or looked_up
        else {}
    )
    rate, found_gain = 0.0, state.found_gain
    if looked_up and not asking:
        prices = model.prices(state, sequences, sequences + ceil(fixed_rows) + 1)
        plain_rate = sequences / (prices.step_s(0) + state.quiet_gap_s)
        taken_s = prices.step_s(int(fixed_rows + 0.5)) + state.quiet_gap_s
        found_gain += _FOUND_KEEP * ((sequences + fixed_tokens) / taken_s / plain_rate - found_gain)
        rate = found_gain * plain_rate
    if asking:
        guarded = bool(facts.running_plain or suspended)
        rate = _allocate(
            model, state, views, asking, decisions, sequences, (fixed_rows, fixed_tokens), guarded=guarded
        )
    if suspended or resting:
        plain_s = model.prices(state, sequences, sequences).step_s(0)
        for row in suspended:
            track, view = tracks[row.id], views[row.drafter]
            decisions[row.id] = _idle(view, track, row, plain_s, DepthReason.SUSPENDED, 0.0, 0.0)
        for row in resting:
            track = tracks[row.id]
            decisions[row.id] = _idle(views[row.drafter], track, row, plain_s, track.reason, 0.0, 0.0)
    for row in looked_up:
        decisions[row.id] = _looked_up(row, tracks[row.id], views, model, state, sequences)
    return replace(state, rate=rate, found_gain=found_gain), decisions


class _Asks:
    """Whether asking the draft tier promises more than what was looked up, for one sequence at a time."""

    def __init__(self, model: Model, state: State, sequences: int) -> None:
        self._model, self._state, self._sequences = model, state, sequences
        self._views: dict[str, View] = {}
        self._prices: Prices | None = None

    def better(self, row: RowFact, track: Track, bound: int) -> bool:
        """By more than the margin at which speculation is switched on, tokens less what their time is worth."""
        if track.suspended or not row.found:
            return False
        state = self._state
        if self._prices is None:
            self._prices = self._model.prices(state, self._sequences, self._sequences + MAX_K + 1)
        prices = self._prices
        view = self._views.get(row.drafter)
        if view is None:
            view = self._views[row.drafter] = View(state.drafters[row.drafter])
        plain_s = prices.step_s(0)
        rate = state.found_gain * self._sequences / (plain_s + state.quiet_gap_s)
        here = there = gain = 0.0
        for position, chance in enumerate(row.found, 1):
            gain += chance
            here = max(here, gain - rate * (prices.step_s(position) - plain_s))
        gain, slope_s = 0.0, view.slope_s()
        fill = view.fill(track)
        for position, chance in enumerate(view.survival(track, row.prior, bound, _FEWEST_WORTH), 1):
            gain += chance
            exposed_s = max(view.drafter.exposed_s + slope_s * (position - view.drafter.k), 0.0)
            net = fill * (gain - rate * (prices.step_s(position) - plain_s)) - rate * exposed_s
            there = max(there, net)
        return there > here + (ON - 1.0)


def _looked_up(
    row: RowFact, track: Track, views: Mapping[str, View], model: Model, state: State, sequences: int
) -> Decision:
    """Nobody is waited for; where there is a draft tier that could be asked, it is looked at now and then."""
    reason = DepthReason.LOOKED_UP if row.found else DepthReason.NOT_FOUND
    k = 0
    track.on = False
    if not row.alone and not row.fixed and min(row.k_max, row.room) > 0:
        track.since += 1
        k, least = _look(views[row.drafter], row, model.prices(state, sequences, sequences).step_s(0))
        if track.since % max(least, _LOOKED_UP_LOOK):
            k = 0
    return Decision(k, False, reason, track.tokens, 0.0, 0.0)


def _allocate(
    model: Model,
    state: State,
    views: Mapping[str, View],
    asking: Sequence[tuple[RowFact, Track, int]],
    decisions: dict[int, Decision],
    sequences: int,
    fixed: tuple[float, float],
    *,
    guarded: bool,
) -> float:
    """Fill in the decisions on those in ``asking``, and what their tracks say of the next round; the rate expected."""
    rest_rows, rest_tokens = fixed
    deepest = max(8, _ENTRIES // len(asking))
    entries: list[_Entry] = []
    survivals: list[list[float]] = []
    fills: list[float] = []
    any_on = settled = False
    all_rows = rest_rows
    for index, (row, track, bound) in enumerate(asking):
        view = views[row.drafter]
        fill = view.fill(track)
        survival = view.survival(track, row.prior, min(bound, deepest), _FEWEST_WORTH)
        survivals.append(survival)
        fills.append(fill)
        share = -1.0
        if track.on:
            any_on = True
            settled |= track.since >= ON_DWELL
        elif track.since < OFF_DWELL:
            continue
        else:
            share = -1.0 / ON
        reach = view.reach
        for position, worth in enumerate(survival):
            if worth < _FEWEST_WORTH:
                break
            rows = fill * reach[position if position < DEPTHS else DEPTHS - 1]
            entries.append((worth * share, index, position, rows))
            all_rows += rows
    entries.sort()
    prices = model.prices(state, sequences, sequences + ceil(all_rows) + 2)
    base_s, rest_s = prices.step_s(0), prices.step_s(int(rest_rows + 0.5))
    base = sequences + rest_tokens
    plain_rate = base / (rest_s + state.quiet_gap_s)
    best: _Choice | None = None
    for exposed_s, depth, names in _exposures(views, asking):
        among = entries
        if names is not None:
            among = [one for one in entries if one[2] < depth and asking[one[1]][0].drafter in names]
        choice = _best(
            among, prices, rest_rows, base, exposed_s + state.quiet_gap_s, TAIL * base_s if guarded else 0.0
        )
        if best is None or choice.rate > best.rate:
            best = choice
    assert best is not None, "somebody asks"
    needed = ON if not any_on else OFF if settled else OFF - (ON - OFF)
    pays = bool(best.depths) and best.rate >= needed * plain_rate
    rate = best.rate if pays else plain_rate
    at = int((best.rows if pays else rest_rows) + 0.5)
    cost_s = prices.step_s(at + 1) - prices.step_s(at)
    for index, (row, track, bound) in enumerate(asking):
        k = best.depths.get(index, 0) if pays else 0
        survival = survivals[index]
        worth_s = survival[k] / rate if k < len(survival) else 0.0
        if not k:
            reason = DepthReason.COST
            if not track.on and track.since < OFF_DWELL:
                reason = DepthReason.DWELL
            elif best.tail:
                reason = DepthReason.TAIL
            elif best.depths or fills[index] * sum(survival) / rate > cost_s:
                reason = DepthReason.ASKING if not pays else DepthReason.COST
            decisions[row.id] = _idle(views[row.drafter], track, row, base_s, reason, worth_s, cost_s)
            continue
        if k == bound:
            reason = DepthReason.ALL if bound == row.k_max else DepthReason.ROOM
        else:
            reason = DepthReason.TAIL if best.tail else DepthReason.COST
        reach = views[row.drafter].reach
        fill = fills[index]
        rows, tokens = 0.0, 1.0
        for position in range(k):
            there = fill * reach[position if position < DEPTHS else DEPTHS - 1]
            rows += there
            tokens += there * survival[position]
        track.since = track.since + 1 if track.on else 0
        track.on, track.rows, track.tokens = True, rows, tokens
        decisions[row.id] = Decision(k, True, reason, tokens, worth_s, cost_s)
    return rate


def _idle(
    view: View,
    track: Track,
    row: RowFact,
    plain_s: float,
    reason: DepthReason,
    worth_s: float,
    cost_s: float,
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
    k, least = _look(view, row, plain_s)
    track.next_probe = min(max(track.probe_gap, least), LAST_PROBE)
    track.probe_gap = min(2 * track.probe_gap, max(2 * least, 8))
    return Decision(k, False, reason, 1.0, worth_s, cost_s)


def _look(view: View, row: RowFact, plain_s: float) -> tuple[int, int]:
    """How many tokens a drafter is asked for to look at it, and the least number of rounds between two looks.

    A drafter that computes for long takes that from somebody: it is looked at more rarely.
    """
    k = min(row.k_max, row.room)
    draft_s = view.drafter.draft_s
    if (slope_s := view.slope_s()) * k > _MESSAGE_S:
        k = min(k, _LOOK)
        draft_s = max(draft_s + slope_s * (k - view.drafter.k), 0.0)
    return k, ceil((draft_s + _MESSAGE_S) / (PROBE_SHARE * plain_s))


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
    depths: dict[int, int] = {}
    for entry in entries[:best_count]:
        depths[entry[1]] = entry[2] + 1
    return _Choice(depths, best_rate, best_rows, tail and best_count == count)


def _exposures(
    views: Mapping[str, View], asking: Sequence[tuple[RowFact, Track, int]]
) -> list[tuple[float, int, frozenset[str] | None]]:
    """(time exposed, greatest depth, drafters) to be tried: a slow drafter, or a deep block, makes all wait.

    None for the drafters: all of them, at all depths.
    """
    deepest: dict[str, int] = {}
    for row, _, bound in asking:
        if bound > deepest.get(row.drafter, 0):
            deepest[row.drafter] = bound
    found: list[tuple[float, int, frozenset[str] | None]] = []
    names = sorted(deepest, key=lambda name: (views[name].drafter.exposed_s, name))
    for last in range(len(names)):
        among = names[: last + 1]
        most = max(deepest[name] for name in among)
        slopes = [views[name].slope_s() for name in among]
        flat = max(slopes) * most < _MESSAGE_S
        depths = (most,) if flat else (*(d for d in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if d < most), most)
        for depth in depths:
            exposed_s = 0.0
            for name, slope in zip(among, slopes, strict=True):
                drafter = views[name].drafter
                more = slope * (min(depth, deepest[name]) - drafter.k)
                exposed_s = max(exposed_s, drafter.exposed_s + more)
            everybody = last == len(names) - 1 and depth == most
            found.append((exposed_s, depth, None if everybody else frozenset(among)))
    return found


def trim(
    model: Model, state: State, ready: Sequence[Ready], num_sequences: int, prompt_rows: int, num_plain: int
) -> dict[int, tuple[int, DepthReason | None]]:
    """How much of each block is verified, now that all that come are here, and why less than all of it.

    ``num_sequences`` rounds share the step with ``prompt_rows``; ``num_plain`` of them have no block by plan or by
    suspension. The time of asking is spent.
    """
    kept: dict[int, tuple[int, DepthReason | None]] = {}
    entries: list[tuple[float, int, int, float]] = []
    fixed_rows = 0
    views: dict[str, View] = {}
    for index, block in enumerate(ready):
        track = state.tracks.get(block.id)
        if block.fixed or track is None:
            fixed_rows += block.length
            kept[block.id] = (block.length, None)
            continue
        survival: Sequence[float] | None = block.survival
        if survival is None:
            if track.drafter not in views:
                views[track.drafter] = View(state.drafters[track.drafter])
            survival = views[track.drafter].survival(track, track.prior, block.length, _FEWEST_WORTH)
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
    guard_s = TAIL * base_s if num_plain else 0.0
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


# --- learning -------------------------------------------------------------------------------------------------------


def _learn(model: Model, state: State, facts: StepFacts) -> State:
    """The state with the step's news in it; its tracks of this step's rows are new ones, which the caller may change."""
    tracks = dict(state.tracks)
    drafters: dict[str, DrafterTrack] = dict(state.drafters)
    views: dict[str, View] = {}
    deepest: dict[str, int] = {}
    anybody = False
    for row in facts.rows:
        name = row.drafter
        if not name:
            continue
        if row.finished:
            track = tracks.pop(row.id, None) or Track(name)
        else:
            known = tracks.get(row.id)
            track = tracks[row.id] = known.copy() if known is not None else Track(name, prior=row.prior)
        if name not in views:
            known_drafter = drafters.get(name)
            before = known_drafter if known_drafter is not None else DrafterTrack()
            views[name] = View(before)
            drafters[name] = before.copy()
        drafter, view = drafters[name], views[name]
        if row.asked > 0:
            anybody = True
            if row.asked > deepest.get(name, 0):
                deepest[name] = row.asked
            waited_for(
                track, drafter, view,
                asked=row.asked, proposed=row.proposed, drafted=row.drafted, agreed=row.agreed, prior=row.prior,
            )  # fmt: skip
        if row.look is not None:
            wanted = min(row.k_max, DEPTHS)
            looked_at(track, drafter, view, look=row.look, wanted=wanted, prior=row.prior)
    quiet_gap_s = state.quiet_gap_s
    if facts.gap_s >= 0.0:
        for name, depth in deepest.items():
            timed(drafters[name], max(facts.gap_s - quiet_gap_s, 0.0), facts.draft_s, depth)
        for name in drafters.keys() & views.keys() - deepest.keys():
            unasked(drafters[name])
        if not anybody:
            quiet_gap_s += 0.1 * (min(facts.gap_s, 3.0 * quiet_gap_s + 1e-4) - quiet_gap_s)
    pace, regions = _paced(model, state, facts)
    accept_row_s = state.accept_row_s
    logits = facts.num_rows - facts.prompt_rows
    if logits > 0:
        limit = 3.0 * accept_row_s + 2e-5
        accept_row_s += 0.1 * (min(facts.accept_s / logits, limit) - accept_row_s)
    context = state.context + 0.2 * (facts.context - state.context)
    found_gain = state.found_gain
    return State(tracks, drafters, pace, regions, accept_row_s, quiet_gap_s, context, found_gain=found_gain)


def _paced(model: Model, state: State, facts: StepFacts) -> tuple[float, tuple[float, ...]]:
    """How much slower than the table steps are now: all of them quickly, those of this size slowly."""
    if facts.forward_s <= 0.0 or not facts.num_sequences or facts.prompt_rows:
        return state.pace, state.regions  # prompt rows have another price: most of them go without the head
    curve = model.curve(facts.num_sequences, facts.num_rows)
    extra = facts.num_rows - facts.num_sequences
    region = model.regions(facts.num_sequences)[extra]
    table = model.table
    beyond = facts.context - table.context
    told_s = curve[extra] + beyond * (
        facts.num_rows * table.row_key_s + facts.num_sequences * table.sequence_key_s
    )
    if told_s <= 0.0:
        return state.pace, state.regions
    off = facts.forward_s / (told_s * state.pace * state.regions[region])
    off = min(max(off, 0.5), 2.0) - 1.0
    pace = min(max(state.pace * (1.0 + 0.1 * off), 0.02), 50.0)
    factors = list(state.regions)
    factors[region] = min(max(factors[region] * (1.0 + 0.03 * off), 0.6), 1.7)
    return pace, tuple(factors)
