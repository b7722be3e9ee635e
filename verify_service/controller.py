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
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple, TypeVar

from paceline.types import AcceptancePrior, DepthReason
from verify_service.costs import CostTable, table_of

ON, OFF = 1.05, 1.00
"""Speculation is switched on from such a ratio to plain decoding, off below such a one."""
ON_DWELL, OFF_DWELL = 4, 2
"""Rounds before it is switched again; a guess that came true while it was off ends the second one."""
TAIL = 1.10
"""A step that plain rows share takes at most so many times a plain step."""
ZERO_ROUNDS = 8
"""Rounds in a row without an accepted token after which a sequence's drafter is suspended."""
PROBE_SHARE = 0.02
"""Of the time, for looking at drafters that are not in use."""
FIRST_PROBE, LAST_PROBE = 2, 64
"""Rounds between two looks: from, doubling while nothing is found, to; less far where looking costs next to nothing."""
_MESSAGE_S = 1e-4  # work that a question makes beside the drafter's own

_KEEP, _KEEP_FILL, _KEEP_DRAFTER, _KEEP_SHARED = 0.95, 0.93, 0.998, 0.99
_MOODS = 3  # how a sequence's last block fared: nothing was right or there was none, a part was, all of it
_MOOD_STRENGTH = 4.0
_DEPTHS = 16  # positions whose own acceptance is told apart; deeper ones are like the last
_PRIOR = AcceptancePrior(0.6, 2.0)
_FILL_PRIOR, _FILL_STRENGTH = 0.6, 2.0
_STRENGTH, _MOST_STRENGTH = 3.0, 16.0
_FEWEST_WORTH = 0.02  # a row that is accepted more rarely never pays
_ENTRIES = 512  # positions looked at in a step, over all sequences
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


class Ready(NamedTuple):
    """A round that is about to run with a block."""

    id: int
    length: int
    fixed: bool
    survival: tuple[float, ...] | None = None  # the drafter's own word on each position, where it gives one


# --- state ----------------------------------------------------------------------------------------------------------


_T = TypeVar("_T")
_Odds = tuple[float, float, float]
_NO_ODDS = (0.0, 0.0, 0.0)


class Track(NamedTuple):
    """What is known of a sequence. Counts are discounted round by round; the prior is not in them."""

    drafter: str
    accepted: float = 0.0
    rejected: float = 0.0
    filled: float = 0.0
    empty: float = 0.0
    mood: int = 2
    moods: tuple[tuple[float, float, float, float], ...] = (
        (0.0, 0.0, 0.0, 0.0),
    ) * _MOODS  # the same, in each mood
    zero_rounds: int = 0
    suspended: bool = False
    on: bool = False
    since: int = OFF_DWELL  # rounds since it was switched
    next_probe: int = 0  # rounds until its drafter is looked at
    probe_gap: int = FIRST_PROBE
    k: int = 0
    rows: float = 0.0  # expected in its next round, beside the plain one
    tokens: float = 0.0


class DrafterTrack(NamedTuple):
    """What is known of a drafter, over all its sequences."""

    accepted: float = 0.0
    rejected: float = 0.0
    filled: float = 0.0
    empty: float = 0.0
    seen: tuple[float, ...] = (0.0,) * _DEPTHS  # by position: trials,
    true: tuple[float, ...] = (0.0,) * _DEPTHS  # accepted ones,
    told: tuple[float, ...] = (0.0,) * _DEPTHS  # and as many as the sequences' own rates told
    moods: tuple[_Odds, ...] = (
        _NO_ODDS,
    ) * _MOODS  # acceptance by mood: trials, true ones, and as many as were told
    fills: tuple[_Odds, ...] = (_NO_ODDS,) * _MOODS  # the same of whether there is a guess
    long: tuple[float, ...] = (0.0,) * _DEPTHS  # by position: blocks that reached it
    wanted: tuple[float, ...] = (0.0,) * _DEPTHS  # of those asked for so long
    exposed_s: float = 0.0  # time that asking adds between two steps
    draft_s: float = 0.0
    k: float = 0.0  # depth at which these were seen
    weight: float = 0.0
    k_square: float = 0.0
    k_time: float = 0.0


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

    def times(self, state: State, sequences: int, rows: int) -> list[float]:
        """What a step of ``sequences`` takes now, by further rows: forward and accept."""
        curve = self.curve(sequences, rows)
        regions = self._region_lists[sequences]
        table, pace, factors, row_s = self.table, state.pace, state.regions, state.accept_row_s
        beyond = state.context - table.context
        first_s = beyond * sequences * (table.row_key_s + table.sequence_key_s)
        each_s = beyond * table.row_key_s
        return [
            (curve[extra] + first_s + extra * each_s) * pace * factors[regions[extra]]
            + (sequences + extra) * row_s
            for extra in range(rows - sequences + 2)
        ]


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
    step_s: float
    tail: bool


def decide(model: Model, state: State, facts: StepFacts) -> tuple[State, dict[int, Decision]]:
    """The state after the step, and the depth of the next round of each sequence that goes on."""
    state = _learn(model, state, facts)
    tracks = dict(state.tracks)
    asking: list[tuple[RowFact, Track, int]] = []
    decisions: dict[int, Decision] = {}
    num_plain = facts.running_plain
    for row in facts.rows:
        if row.finished:
            tracks.pop(row.id, None)
            continue
        if not row.drafter:
            decisions[row.id] = Decision(0, False, DepthReason.PLAIN, 1.0, 0.0, 0.0)
            continue
        track = tracks[row.id]
        bound = min(row.k_max, row.room)
        if row.fixed or bound <= 0:
            reason = DepthReason.FIXED if bound == row.k_max else DepthReason.ROOM
            tracks[row.id] = track._replace(k=bound, rows=float(bound), tokens=1.0, on=bound > 0)
            decisions[row.id] = Decision(bound, bound > 0, reason, 0.0, 0.0, 0.0)
        elif track.suspended:
            num_plain += 1
        else:
            asking.append((row, track, bound))
    mine = {row.id for row in facts.rows}
    sequences = max(facts.running, 1)
    # The rows of those that are not in this step, or whose depth is fixed: taken as they are.
    rest_rows = rest_tokens = 0.0
    for id_, track in tracks.items():
        if id_ not in mine or id_ in decisions:
            rest_rows += track.rows
            rest_tokens += track.tokens - 1.0 if track.rows else 0.0
    if asking:
        _allocate(
            model, state, facts, asking, tracks, decisions, sequences, rest_rows, rest_tokens, num_plain > 0
        )
    for row in facts.rows:
        if row.id not in decisions and row.id in tracks:
            decisions[row.id] = _idle(model, state, tracks, row, sequences, DepthReason.SUSPENDED, 0.0, 0.0)
    return (
        State(
            tracks,
            state.drafters,
            state.pace,
            state.regions,
            state.accept_row_s,
            state.quiet_gap_s,
            state.context,
        ),
        decisions,
    )


def _allocate(
    model: Model,
    state: State,
    facts: StepFacts,
    asking: list[tuple[RowFact, Track, int]],
    tracks: dict[int, Track],
    decisions: dict[int, Decision],
    sequences: int,
    rest_rows: float,
    rest_tokens: float,
    guarded: bool,
) -> None:
    """Fill in ``decisions`` and ``tracks`` for those in ``asking``."""
    deepest = max(8, _ENTRIES // len(asking))
    entries: list[tuple[float, int, int, float]] = []  # -worth, index, position, expected rows
    survivals: list[list[float]] = []
    any_on = settled = False
    for index, (row, track, bound) in enumerate(asking):
        drafter = state.drafters[row.drafter]
        fill = fill_rate(drafter, track)
        survival = survival_of(drafter, track, row.prior, min(bound, deepest))
        survivals.append(survival)
        any_on |= track.on
        settled |= track.on and track.since >= ON_DWELL
        if not track.on and track.since < OFF_DWELL:
            continue
        share = 1.0 if track.on else 1.0 / ON
        for position, worth in enumerate(survival):
            if worth < _FEWEST_WORTH:
                break
            reach = fill * _reach(drafter, position)
            entries.append((-worth * share, index, position, reach))
    entries.sort()
    most_rows = sequences + ceil(rest_rows + sum(entry[3] for entry in entries)) + 1
    times = model.times(state, sequences, most_rows)
    plain_s = times[int(rest_rows + 0.5)] + state.quiet_gap_s
    base = sequences + rest_tokens
    plain_rate = base / plain_s
    guard_s = TAIL * times[0] if guarded else 0.0
    best: _Choice | None = None
    for exposed_s, depth, names in _exposures(state, asking):
        choice = _best(
            [entry for entry in entries if entry[2] < depth and asking[entry[1]][0].drafter in names],
            times,
            rest_rows,
            base,
            exposed_s + state.quiet_gap_s,
            guard_s,
        )
        if best is None or choice.rate > best.rate:
            best = choice
    assert best is not None, "somebody asks"
    needed = ON if not any_on else OFF if settled else OFF - (ON - OFF)
    pays = best.depths and best.rate >= needed * plain_rate
    rate = best.rate if pays else plain_rate
    at = int((best.rows if pays else rest_rows) + 0.5)
    cost_s = times[min(at + 1, len(times) - 1)] - times[at]
    for index, (row, track, bound) in enumerate(asking):
        k = best.depths.get(index, 0) if pays else 0
        survival = survivals[index]
        drafter = state.drafters[row.drafter]
        fill = fill_rate(drafter, track)
        worth_s = survival[k] / rate if k < len(survival) else 0.0
        if not k:
            reason = DepthReason.COST
            if best.depths.get(index) or (not best.depths and fill * sum(survival) / rate > cost_s):
                reason = DepthReason.ASKING
            if not track.on and track.since < OFF_DWELL:
                reason = DepthReason.DWELL
            elif best.tail:
                reason = DepthReason.TAIL
            decisions[row.id] = _idle(model, state, tracks, row, sequences, reason, worth_s, cost_s)
            continue
        if k == bound:
            reason = DepthReason.ALL if bound == row.k_max else DepthReason.ROOM
        else:
            reason = DepthReason.TAIL if best.tail else DepthReason.COST
        rows = tokens = 0.0
        for position in range(k):
            reach = fill * _reach(drafter, position)
            rows += reach
            tokens += reach * survival[position]
        tracks[row.id] = track._replace(
            on=True,
            since=track.since + 1 if track.on else 0,
            k=k,
            rows=rows,
            tokens=1.0 + tokens,
            next_probe=0,
            probe_gap=FIRST_PROBE,
        )
        decisions[row.id] = Decision(k, True, reason, 1.0 + tokens, worth_s, cost_s)


def _idle(
    model: Model,
    state: State,
    tracks: dict[int, Track],
    row: RowFact,
    sequences: int,
    reason: DepthReason,
    worth_s: float,
    cost_s: float,
) -> Decision:
    """The sequence's next round is plain; now and then its drafter is looked at without being waited for."""
    track = tracks[row.id]
    since = 0 if track.on else track.since + 1
    gap, left = track.probe_gap, track.next_probe
    if track.on:
        gap, left = FIRST_PROBE, FIRST_PROBE
    k = 0
    if left > 0:
        left -= 1
    else:
        k = min(row.k_max, row.room)
        step_s = model.times(state, sequences, sequences)[0]
        # A drafter that computes for long takes that from somebody: it is looked at more rarely.
        least = ceil((state.drafters[row.drafter].draft_s + _MESSAGE_S) / (PROBE_SHARE * step_s))
        left = min(max(gap, least), LAST_PROBE)
        gap = min(2 * gap, max(2 * least, 8))
    tracks[row.id] = track._replace(
        on=False, since=since, k=0, rows=0.0, tokens=1.0, next_probe=left, probe_gap=gap
    )
    return Decision(k, False, reason, 1.0, worth_s, cost_s)


def _best(
    entries: Sequence[tuple[float, int, int, float]],
    times: Sequence[float],
    rows: float,
    tokens: float,
    exposed_s: float,
    guard_s: float,
) -> _Choice:
    """The prefix of ``entries`` with most tokens per second; no depths where none is allowed."""
    best_rate, best_count, best_rows = 0.0, 0, rows
    tail = False
    count = 0
    for negative, _, _, reach in entries:
        rows += reach
        tokens -= negative * reach
        step_s = times[int(rows + 0.5)]
        if guard_s and step_s > guard_s:
            tail = True
            break
        count += 1
        rate = tokens / (step_s + exposed_s)
        if rate > best_rate:
            best_rate, best_count, best_rows = rate, count, rows
    depths: dict[int, int] = {}
    for entry in entries[:best_count]:
        depths[entry[1]] = entry[2] + 1
    return _Choice(depths, best_rate, best_rows, times[int(best_rows + 0.5)], tail and best_count == count)


def _exposures(
    state: State, asking: Sequence[tuple[RowFact, Track, int]]
) -> list[tuple[float, int, frozenset[str]]]:
    """(time exposed, greatest depth, drafters) to be tried: a slow drafter, or a deep block, makes all wait."""
    deepest: dict[str, int] = {}
    for row, _, bound in asking:
        deepest[row.drafter] = max(bound, deepest.get(row.drafter, 0))
    found = []
    names = sorted(deepest, key=lambda name: (state.drafters[name].exposed_s, name))
    for last in range(len(names)):
        among = names[: last + 1]
        most = max(deepest[name] for name in among)
        slopes = [slope_s(state.drafters[name]) for name in among]
        flat = max(slopes) * most < 1e-4
        depths = (most,) if flat else (*(d for d in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if d < most), most)
        for depth in depths:
            exposed_s = 0.0
            for name, slope in zip(among, slopes, strict=True):
                drafter = state.drafters[name]
                at = min(depth, deepest[name])
                exposed_s = max(exposed_s, drafter.exposed_s + slope * (at - drafter.k))
            found.append((max(exposed_s, 0.0), depth, frozenset(among)))
    return found


def trim(
    model: Model, state: State, ready: Sequence[Ready], num_sequences: int, prompt_rows: int, num_plain: int
) -> dict[int, tuple[int, DepthReason | None]]:
    """How much of each block is verified, now that all that come are here, and why less than all of it.

    ``num_sequences`` rounds share the step with ``prompt_rows``; ``num_plain`` of them have no block by plan or by
    suspension. The time of asking is spent either way.
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
            drafter = state.drafters[track.drafter]
            survival = survival_of(drafter, track, None, block.length)
        entries += [
            (-survival[position] if position < len(survival) else 0.0, index, position, 1.0)
            for position in range(block.length)
        ]
    if not entries:
        return kept
    entries.sort()
    base_rows = prompt_rows + fixed_rows
    times = model.times(state, num_sequences, num_sequences + base_rows + len(entries))
    exposed_s = max((state.drafters[t.drafter].exposed_s for t in state.tracks.values() if t.on), default=0.0)
    exposed_s += state.quiet_gap_s
    guard_s = TAIL * times[base_rows] if num_plain else 0.0
    plain_rate = num_sequences / (times[base_rows] + exposed_s)
    choice = _best(entries, times, float(base_rows), float(num_sequences), exposed_s, guard_s)
    taken = choice.depths if choice.rate > plain_rate else {}
    for index, block in enumerate(ready):
        if block.id in kept:
            continue
        k = taken.get(index, 0)
        reason = None if k == block.length else DepthReason.TAIL if choice.tail else DepthReason.COST
        kept[block.id] = (k, reason)
    return kept


# --- what is believed -----------------------------------------------------------------------------------------------


def prior_of(drafter: DrafterTrack, given: AcceptancePrior | None) -> tuple[float, float]:
    """Mean and strength of the prior: the plan's, else what the drafter did in other sequences."""
    if given is not None:
        mean = sum(given.by_position) / len(given.by_position) if given.by_position else given.mean
        return min(max(mean, 0.01), 0.99), min(max(given.strength, 0.5), _MOST_STRENGTH)
    mean = (drafter.accepted + _PRIOR.strength * _PRIOR.mean) / (
        drafter.accepted + drafter.rejected + _PRIOR.strength
    )
    return min(max(mean, 0.01), 0.99), _STRENGTH


def overall_rate(drafter: DrafterTrack, track: Track, given: AcceptancePrior | None) -> float:
    """Acceptance of the sequence, whatever its mood."""
    mean, strength = prior_of(drafter, given)
    rate = (track.accepted + mean * strength) / (track.accepted + track.rejected + strength)
    return min(max(rate, 0.01), 0.99)


def acceptance_of(drafter: DrafterTrack, track: Track, given: AcceptancePrior | None) -> float:
    """Chance that a draft token is accepted where those before it are, after a block that fared like the last one.

    Text that is copied comes in stretches: in the middle of one the next block is right, and after a block that was
    wrong the next one is wrong too. Where that is not so the moods turn out alike.
    """
    mean = _shifted(overall_rate(drafter, track, given), drafter.moods[track.mood])
    accepted, rejected, _, _ = track.moods[track.mood]
    rate = (accepted + mean * _MOOD_STRENGTH) / (accepted + rejected + _MOOD_STRENGTH)
    return min(max(rate, 0.01), 0.99)


def _shifted(rate: float, odds: _Odds) -> float:
    """``rate`` with its odds changed as much as the true ones differed from those that were told."""
    there = rate / (1.0 - rate) * _ratio(*odds)
    return there / (1.0 + there)


def _ratio(seen: float, true: float, told: float) -> float:
    """True odds over told odds, cautious while little was seen."""
    if seen < 1.0:
        return 1.0
    told = min(max(told / seen, 0.01), 0.99)
    true = min(max((true + 8.0 * told) / (seen + 8.0), 0.01), 0.99)
    return min(max(true * (1.0 - told) / ((1.0 - true) * told), 0.1), 10.0)


def survival_of(
    drafter: DrafterTrack, track: Track, given: AcceptancePrior | None, depth: int
) -> list[float]:
    """Chance that position j and all before it are accepted, for the first ``depth`` positions."""
    rate = acceptance_of(drafter, track, given)
    odds = rate / (1.0 - rate)
    listed = given.by_position if given is not None else ()
    if listed:
        mean = sum(listed) / len(listed)
        mean = min(max(mean, 0.01), 0.99)
        odds *= (1.0 - mean) / mean
    survival = []
    alive = 1.0
    for position in range(depth):
        if listed:
            own = min(max(listed[min(position, len(listed) - 1)], 0.01), 0.99)
            there = odds * own / (1.0 - own)
        else:
            there = odds * _profile(drafter, min(position, _DEPTHS - 1))
        alive *= there / (1.0 + there)
        survival.append(alive)
    return survival


def _profile(drafter: DrafterTrack, position: int) -> float:
    """How the odds at a position differ from those of the whole block."""
    return _ratio(drafter.seen[position], drafter.true[position], drafter.told[position])


def _reach(drafter: DrafterTrack, position: int) -> float:
    """Chance that a block that was asked for so long reaches the position."""
    at = min(position, _DEPTHS - 1)
    return (drafter.long[at] + 1.0) / (drafter.wanted[at] + 1.0)


def overall_fill(drafter: DrafterTrack, track: Track) -> float:
    """Share of questions that a drafter has a guess for, in this sequence, whatever its mood."""
    mean = (drafter.filled + _FILL_STRENGTH * _FILL_PRIOR) / (drafter.filled + drafter.empty + _FILL_STRENGTH)
    rate = (track.filled + mean * _FILL_STRENGTH) / (track.filled + track.empty + _FILL_STRENGTH)
    return min(max(rate, 0.01), 0.99)


def fill_rate(drafter: DrafterTrack, track: Track) -> float:
    """Chance that there is a guess at all, after a block that fared like the last one."""
    if not drafter.empty:
        return 1.0  # one that always has a guess
    mean = _shifted(overall_fill(drafter, track), drafter.fills[track.mood])
    _, _, filled, empty = track.moods[track.mood]
    return (filled + mean * _MOOD_STRENGTH) / (filled + empty + _MOOD_STRENGTH)


def slope_s(drafter: DrafterTrack) -> float:
    """How much longer a draft takes for each further token: fitted where depths differed, else in proportion."""
    if drafter.weight < 1.0 or drafter.k <= 0:
        return 0.0
    variance = drafter.k_square - drafter.k * drafter.k
    in_proportion = drafter.draft_s / drafter.k
    if variance <= 0.25:
        return in_proportion
    fitted = (drafter.k_time - drafter.k * drafter.draft_s) / variance
    return min(max(fitted, 0.0), in_proportion)


# --- learning -------------------------------------------------------------------------------------------------------


def _learn(model: Model, state: State, facts: StepFacts) -> State:
    """The state with the step's news in it."""
    tracks = dict(state.tracks)
    drafters = dict(state.drafters)
    asked: dict[str, tuple[int, int]] = {}  # drafter -> deepest, count
    for row in facts.rows:
        if not row.drafter:
            continue
        drafter = drafters.get(row.drafter) or DrafterTrack()
        track = tracks.get(row.id) or Track(row.drafter)
        if row.asked > 0:
            deepest, count = asked.get(row.drafter, (0, 0))
            asked[row.drafter] = max(deepest, row.asked), count + 1
            track, drafter = _seen(track, drafter, row)
        if row.look is not None:
            track, drafter = _looked(track, drafter, row.look, row.prior, min(row.k_max, _DEPTHS))
        drafters[row.drafter] = drafter
        tracks[row.id] = track
    for name, (deepest, _) in asked.items() if facts.gap_s >= 0.0 else ():
        drafters[name] = _timed(drafters[name], facts, deepest, state.quiet_gap_s)
    pace, regions = _paced(model, state, facts)
    accept_row_s = state.accept_row_s
    logits = facts.num_rows - facts.prompt_rows
    if logits > 0:
        row_s = facts.accept_s / logits
        limit = 3.0 * accept_row_s + 2e-5
        accept_row_s += 0.1 * (min(row_s, limit) - accept_row_s)
    quiet_gap_s = state.quiet_gap_s
    if not asked and facts.gap_s >= 0.0:
        quiet_gap_s += 0.1 * (min(facts.gap_s, 3.0 * quiet_gap_s + 1e-4) - quiet_gap_s)
    context = state.context + 0.2 * (facts.context - state.context)
    return State(tracks, drafters, pace, regions, accept_row_s, quiet_gap_s, context)


def _seen(track: Track, drafter: DrafterTrack, row: RowFact) -> tuple[Track, DrafterTrack]:
    """A round that was waited for."""
    track, drafter = _filled(track, drafter, row.asked, row.proposed)
    if row.proposed <= 0:
        return track._replace(mood=0), drafter
    if not row.drafted:
        return track, drafter
    track, drafter = _trials(track, drafter, row.drafted, row.agreed, row.prior)
    zero = 0 if row.agreed else track.zero_rounds + 1
    suspended = zero >= ZERO_ROUNDS
    if suspended and not track.suspended:
        track = track._replace(on=False, since=0, next_probe=ZERO_ROUNDS, probe_gap=ZERO_ROUNDS)
    return track._replace(zero_rounds=zero, suspended=suspended), drafter


def _looked(
    track: Track,
    drafter: DrafterTrack,
    look: tuple[int, int, int],
    prior: AcceptancePrior | None,
    wanted: int,
) -> tuple[Track, DrafterTrack]:
    """A guess that was not waited for, compared with what was committed meanwhile."""
    length, checked, agreed = look
    track, drafter = _filled(track, drafter, wanted, length)
    if not length:
        return track._replace(mood=0), drafter
    if not agreed:
        return _trials(track, drafter, checked, 0, prior)
    if track.suspended:  # half open: what was known is old
        track = track._replace(
            suspended=False, zero_rounds=0, accepted=0.25 * track.accepted, rejected=0.25 * track.rejected
        )
    track, drafter = _trials(track, drafter, checked, agreed, prior)
    return track._replace(
        since=max(track.since, OFF_DWELL), next_probe=min(track.next_probe, 1), probe_gap=FIRST_PROBE
    ), drafter


def _trials(
    track: Track, drafter: DrafterTrack, length: int, agreed: int, prior: AcceptancePrior | None
) -> tuple[Track, DrafterTrack]:
    """The first ``agreed`` positions were right, the next one wrong; of those behind nothing is known (censored)."""
    overall = overall_rate(drafter, track, prior)
    told = acceptance_of(drafter, track, prior)
    wrong = agreed < length
    mood = track.mood
    accepted, rejected, filled, empty = track.moods[mood]
    there = (_KEEP * accepted + agreed, _KEEP * rejected + wrong, filled, empty)
    track = track._replace(
        accepted=_KEEP * track.accepted + agreed,
        rejected=_KEEP * track.rejected + wrong,
        mood=0 if not agreed else 1 if wrong else 2,
        moods=_with(track.moods, mood, there),
    )
    seen, true, expected = list(drafter.seen), list(drafter.true), list(drafter.told)
    for position in range(min(agreed + wrong, _DEPTHS)):
        seen[position] = _KEEP_SHARED * seen[position] + 1.0
        true[position] = _KEEP_SHARED * true[position] + (position < agreed)
        expected[position] = _KEEP_SHARED * expected[position] + told
    drafter = drafter._replace(
        accepted=_KEEP_DRAFTER * drafter.accepted + agreed,
        rejected=_KEEP_DRAFTER * drafter.rejected + wrong,
        seen=tuple(seen),
        true=tuple(true),
        told=tuple(expected),
        moods=_with(drafter.moods, mood, _more(drafter.moods[mood], agreed + wrong, agreed, overall)),
    )
    return track, drafter


def _more(odds: _Odds, trials: int, true: int, told: float) -> _Odds:
    return (
        _KEEP_SHARED * odds[0] + trials,
        _KEEP_SHARED * odds[1] + true,
        _KEEP_SHARED * odds[2] + trials * told,
    )


def _with(values: tuple[_T, ...], at: int, value: _T) -> tuple[_T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _filled(track: Track, drafter: DrafterTrack, asked: int, proposed: int) -> tuple[Track, DrafterTrack]:
    """Whether there was a guess, and how long it was."""
    filled = proposed > 0
    mood = track.mood
    odds = _more(drafter.fills[mood], 1, filled, overall_fill(drafter, track))
    drafter = _blocks(drafter, asked, proposed)._replace(fills=_with(drafter.fills, mood, odds))
    accepted, rejected, full, empty = track.moods[mood]
    there = (accepted, rejected, _KEEP_FILL * full + filled, _KEEP_FILL * empty + (not filled))
    return track._replace(
        filled=_KEEP_FILL * track.filled + filled,
        empty=_KEEP_FILL * track.empty + (not filled),
        moods=_with(track.moods, mood, there),
    ), drafter


def _blocks(drafter: DrafterTrack, asked: int, proposed: int) -> DrafterTrack:
    """Whether there was a guess, and how long it was."""
    filled = proposed > 0
    long, wanted = drafter.long, drafter.wanted
    if filled:
        reached, told = list(long), list(wanted)
        for position in range(min(asked, _DEPTHS)):
            told[position] = 0.98 * told[position] + 1.0
            reached[position] = 0.98 * reached[position] + (position < proposed)
        long, wanted = tuple(reached), tuple(told)
    return drafter._replace(
        filled=_KEEP_DRAFTER * drafter.filled + filled,
        empty=_KEEP_DRAFTER * drafter.empty + (not filled),
        long=long,
        wanted=wanted,
    )


def _timed(drafter: DrafterTrack, facts: StepFacts, k: int, quiet_gap_s: float) -> DrafterTrack:
    """What asking cost in this step."""
    exposed_s = max(facts.gap_s - quiet_gap_s, 0.0)
    if drafter.weight < 1.0:
        return drafter._replace(
            exposed_s=exposed_s,
            draft_s=facts.draft_s,
            k=float(k),
            k_square=float(k * k),
            k_time=k * facts.draft_s,
            weight=1.0,
        )
    exposed_s = min(exposed_s, 3.0 * drafter.exposed_s + 5e-4)
    draft_s = min(facts.draft_s, 3.0 * drafter.draft_s + 5e-4)
    return drafter._replace(
        exposed_s=drafter.exposed_s + 0.1 * (exposed_s - drafter.exposed_s),
        draft_s=drafter.draft_s + 0.1 * (draft_s - drafter.draft_s),
        k=drafter.k + 0.1 * (k - drafter.k),
        k_square=drafter.k_square + 0.1 * (k * k - drafter.k_square),
        k_time=drafter.k_time + 0.1 * (k * draft_s - drafter.k_time),
    )


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
