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

from math import ceil

from paceline.ranges import MAX_K
from paceline.types import DepthReason
from verify_service.allocation import FEWEST_WORTH, ON, allocate, idle, look_cost
from verify_service.belief import OFF_DWELL, Track, total
from verify_service.facts import PLAIN_ROUND, Decision, RowFact, State, StepFacts
from verify_service.learning import learn
from verify_service.prices import Model, Prices
from verify_service.trimming import trim

__all__ = ["decide", "trim"]

_CROWD, _REST = (
    8,
    4,
)  # among more sequences than that, one that drafts nothing is thought about every so many rounds
_FOUND_KEEP = 0.05
_JUDGED_OVER = 32  # rounds
_LOSS = 0.02  # of plain decoding's time: less than that is noise
_MOST_RARELY = 16  # rounds between two look-ups
_STRONG = 0.6  # chance of a first guess that ends a rest
_LOOK_UP_S, _LOOK_UP_STEP_S = 6e-5, 1.5e-4  # what a look-up takes, and what a step with one takes besides
_RESTING = Decision(0, False, DepthReason.COST, 1.0, 0.0, 0.0)
_LOOKED_UP_LOOK = 16  # rounds between two looks at a drafter while look-ups do better, at least


def decide(model: Model, state: State, facts: StepFacts) -> tuple[State, dict[int, Decision]]:
    """The state after the step, and the depth of the next round of each sequence that goes on."""
    state = learn(model, state, facts)
    tracks = state.tracks
    asking: list[tuple[RowFact, Track, int]] = []
    decisions: dict[int, Decision] = {}
    suspended: list[tuple[RowFact, Track]] = []
    resting: list[tuple[RowFact, Track]] = []
    looked_up: list[RowFact] = []
    rarely: list[tuple[RowFact, Track]] = []
    crowded = len(facts.rows) > _CROWD
    sequences = max(facts.running, 1)
    fixed_rows = fixed_tokens = 0.0
    asks = _Asks(model, state, sequences)
    for row in facts.rows:
        if row.finished:
            continue
        id_ = row.id
        if not row.drafter:
            decisions[id_] = PLAIN_ROUND
            continue
        track = tracks[id_]
        fixed, found = row.fixed, row.found
        bound = min(row.room, row.k_max)
        if row.looked and not fixed and not row.asked:
            _judge(track, row, asks.prices, sequences)
        if track.every > 1:
            rarely.append((row, track))
        if found is not None:
            if row.alone or (found and not asks.better(row, track, bound)):
                looked_up.append(row)
                track.rows, track.tokens = float(len(found)), 1.0 + total(found)
                fixed_rows += track.rows
                fixed_tokens += track.tokens - 1.0
                continue
        elif not fixed and (row.alone or _is_quiet(track, row)):
            track.rows, track.tokens = 0.0, 1.0
            track.since += 1
            decisions[id_] = _RESTING
            continue
        if fixed or bound <= 0:
            bound = max(bound, 0)
            track.on, track.rows, track.tokens = bound > 0, float(bound), 1.0
            fixed_rows += bound
            reason = DepthReason.FIXED if bound == row.k_max else DepthReason.ROOM
            decisions[id_] = Decision(bound, bound > 0, reason, 0.0, 0.0, 0.0)
        elif track.suspended:
            suspended.append((row, track))
        elif (
            crowded
            and not track.on
            and not (row.look and row.look.agreed)
            and track.since > OFF_DWELL
            and (track.since + id_) % _REST
        ):
            resting.append((row, track))
        else:
            asking.append((row, track, bound))
    # The rows of those that are not in this step: taken as they are.
    mine = {row.id for row in facts.rows}
    for id_, track in tracks.items():
        if track.rows and id_ not in mine:
            fixed_rows += track.rows
            fixed_tokens += track.tokens - 1.0
    rate, found_gain = 0.0, state.found_gain
    if looked_up and not asking:
        prices = model.prices(state, sequences, sequences + ceil(fixed_rows) + 1)
        plain_rate = sequences / (prices.step_s(0) + state.quiet_gap_s)
        taken_s = prices.step_s(int(fixed_rows + 0.5)) + state.quiet_gap_s
        found_gain += _FOUND_KEEP * ((sequences + fixed_tokens) / taken_s / plain_rate - found_gain)
        rate = found_gain * plain_rate
    if asking:
        guarded = bool(facts.running_plain or suspended)
        rate = allocate(
            model, state, asking, decisions, sequences, (fixed_rows, fixed_tokens), guarded=guarded
        )
    if suspended or resting or looked_up:
        plain_s = model.prices(state, sequences, sequences).step_s(0)
        company = sum(track.on for _, track, _ in asking)
        for row, track in suspended:
            view = state.view(row.drafter)
            decisions[row.id] = idle(view, track, row, plain_s, DepthReason.SUSPENDED, sequences, company)
        for row, track in resting:
            view = state.view(row.drafter)
            decisions[row.id] = idle(view, track, row, plain_s, track.reason, sequences, company)
        for row in looked_up:
            decisions[row.id] = _looked_up(row, tracks[row.id], state, plain_s, sequences)
    for row, track in rarely:
        if _rests(track, row):
            decisions[row.id] = decisions[row.id]._replace(rest=True)
    return state.with_rate(rate, found_gain), decisions


def _judge(track: Track, row: RowFact, prices: Prices, sequences: int) -> None:
    """What looking up gained in this round, in seconds; where it keeps losing, it is done more rarely.

    At high temperatures hardly anything can be foreseen, and even microseconds, a row that costs little and what they push out
    of the caches add up to some per cent of plain decoding.
    """
    plain_s = prices.step_s(0)
    cost_s = prices.step_s(row.drafted) - plain_s + _LOOK_UP_S + _LOOK_UP_STEP_S / sequences
    gain_s = row.agreed * plain_s / sequences - cost_s
    track.judged += 1
    track.worth_s += (gain_s - track.worth_s) / min(track.judged, _JUDGED_OVER)
    if track.judged < _JUDGED_OVER:
        return
    if track.worth_s < -_LOSS * plain_s / sequences:
        track.every = min(track.every * (4 if track.every == 1 else 2), _MOST_RARELY)
        track.judged, track.worth_s = 0, 0.0
    else:
        track.every = 1


def _is_quiet(track: Track, row: RowFact) -> bool:
    """Whether neither look-ups nor the draft tier have been of use lately: thought about as rarely as it is looked up."""
    return track.every > 1 and not track.on and track.since > OFF_DWELL and not row.asked and row.look is None


def _rests(track: Track, row: RowFact) -> bool:
    """Whether the round after the next is one of those that are not looked up; a strong guess ends that."""
    if row.found and row.found[0] >= _STRONG:
        track.every, track.judged, track.worth_s = 1, 0, 0.0
        return False
    track.turn = (track.turn + 1) % track.every
    return track.turn != 0


class _Asks:
    """Whether asking the draft tier promises more than what was looked up, for one sequence at a time."""

    def __init__(self, model: Model, state: State, sequences: int) -> None:
        self._model, self._state, self._sequences = model, state, sequences
        self._prices: Prices | None = None

    @property
    def prices(self) -> Prices:
        """Of steps in which one sequence has further rows."""
        if self._prices is None:
            self._prices = self._model.prices(self._state, self._sequences, self._sequences + MAX_K + 1)
        return self._prices

    def better(self, row: RowFact, track: Track, bound: int) -> bool:
        """By more than the margin at which speculation is switched on, tokens less what their time is worth."""
        if track.suspended or not row.found:
            return False
        state, prices = self._state, self.prices
        view = state.view(row.drafter)
        plain_s = prices.step_s(0)
        rate = state.found_gain * self._sequences / (plain_s + state.quiet_gap_s)
        here = there = gain = 0.0
        for position, chance in enumerate(row.found, 1):
            gain += chance
            here = max(here, gain - rate * (prices.step_s(position) - plain_s))
        gain, slope_s = 0.0, view.slope_s()
        fill = view.fill(track)
        for position, chance in enumerate(view.survival(track, row.prior, bound, FEWEST_WORTH), 1):
            gain += chance
            exposed_s = max(view.drafter.exposed_s + slope_s * (position - view.drafter.k), 0.0)
            net = fill * (gain - rate * (prices.step_s(position) - plain_s)) - rate * exposed_s
            there = max(there, net)
        return there > here + (ON - 1.0)


def _looked_up(row: RowFact, track: Track, state: State, plain_s: float, sequences: int) -> Decision:
    """Nobody is waited for; where there is a draft tier that could be asked, it is looked at now and then."""
    reason = DepthReason.LOOKED_UP if row.found else DepthReason.NOT_FOUND
    k = 0
    track.on = False
    if not row.alone and not row.fixed and min(row.k_max, row.room) > 0:
        track.since += 1
        k, least = look_cost(state.view(row.drafter), row, plain_s, sequences, 0)
        if track.since % max(least, _LOOKED_UP_LOOK):
            k = 0
    return Decision(k, False, reason, track.tokens, 0.0, 0.0)
