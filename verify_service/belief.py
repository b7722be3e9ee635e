"""What is believed of a sequence and of a drafter: will there be a guess, how long, how much of it will be right.

Values of a controller's state: changed only in copies that a step has made for itself.

A sequence's acceptance is a Beta count, discounted round by round, on a prior: the plan's, else what its drafter did in other
sequences. Text that is copied comes in stretches, so counts are also kept by mood, which is how the last block fared. What positions
in a block and moods do to acceptance is learnt per drafter, as odds of what was true against what the sequences' own rates had
told: sequences differ, and without that comparison deep positions would look good because only good sequences reach them.
Behind the first wrong token nothing is known, and nothing is counted (censoring).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.ranges import MAX_K
from paceline.types import AcceptancePrior, DepthReason

ZERO_ROUNDS = 8
"""Rounds in a row without an accepted token after which a sequence's drafter is suspended."""
ON_DWELL, OFF_DWELL = 4, 2
"""Rounds before speculation is switched again; a guess that came true while it was off ends the second one."""
FIRST_PROBE, LAST_PROBE = 2, 64
"""Rounds between two looks at a drafter that is not in use: from, doubling while nothing is found, to; less far where
looking costs next to nothing."""
DEPTHS = 16
"""Positions whose own acceptance is told apart; deeper ones are like the last."""

_KEEP_TOKEN, _KEEP = 0.99, 0.93  # by draft token whose fate is known, but a round at most that
_KEEP_FILL, _KEEP_DRAFTER, _KEEP_SHARED, _KEEP_LENGTH = 0.96, 0.998, 0.99, 0.98
_MOOD_STRENGTH = 8.0
_SHIFT = 5.0  # in odds: so much better or worse is a change;
_ALARM = 120.0  # so much likelier than none, it is believed,
_AFTER_CHANGE = 0.2  # and what was counted before is kept only in part
_KEEP_UNSEEN = 0.97  # of what is known of the position behind a block, by block: else a bad start would never be tried again
_PRIOR_MEAN, _PRIOR_STRENGTH = 0.6, 2.0
_FILL_MEAN, _FILL_STRENGTH = 0.6, 2.0
_STRENGTH, _MOST_STRENGTH = 3.0, 16.0
_CAUTION = 16.0
FIRST_EXPOSED_S = 5e-4
"""What asking a drafter adds to a round, until it has been seen."""
_LEAST_RATE, _FORGET_COST = 0.1, 0.01
_DEAR_TOKEN_S = 0.01  # the first answer counts for no more than that a token

NOTHING, PART, ALL = 0, 1, 2
"""Moods: nothing of the last block was right or there was none, a part was, all of it."""

_ACCEPTED, _REJECTED, _FILLED, _EMPTY = range(4)

_READ_MANY = 64  # tokens: a look that made its drafter read more than that tells what reading costs, others what guessing costs


class Look(NamedTuple):
    """A guess that was not waited for."""

    length: int
    checked: int  # tokens compared with what was committed meanwhile
    agreed: int  # of these were right, up to the first that was not
    read: int = 0  # tokens that the drafter had to read before it could guess
    work_s: float = 0.0  # the drafter's time for both


@dataclass(slots=True)
class Track:
    """What is known of a sequence. The prior is not in the counts."""

    drafter: str
    accepted: float = 0.0
    rejected: float = 0.0
    filled: float = 0.0
    empty: float = 0.0
    mood: int = ALL
    moods: list[float] = field(
        default_factory=lambda: [0.0] * 12
    )  # accepted, rejected, filled, empty in each mood
    zero_rounds: int = 0
    suspended: bool = False
    on: bool = False
    since: int = OFF_DWELL  # rounds since it was switched
    next_probe: int = 0  # rounds until its drafter is looked at
    probe_gap: int = FIRST_PROBE
    rows: float = 0.0  # expected in its next round, beside the plain one
    tokens: float = 0.0
    reason: DepthReason = DepthReason.UNSAID  # why it drafts nothing
    prior: AcceptancePrior | None = None  # of its plan
    judged: int = 0  # rounds looked up since the last judgement,
    worth_s: float = 0.0  # and what one of them gained
    every: int = 1  # of so many rounds one is looked up
    turn: int = 0
    better: float = 1.0  # likelihood ratio of the latest tokens: that acceptance has risen,
    worse: float = 1.0  # that it has fallen

    def copy(self) -> "Track":
        """Another one, equal."""
        return Track(
            self.drafter, self.accepted, self.rejected, self.filled, self.empty, self.mood, self.moods.copy(),
            self.zero_rounds, self.suspended, self.on, self.since, self.next_probe, self.probe_gap, self.rows, self.tokens, self.reason, self.prior,
            self.judged, self.worth_s, self.every, self.turn, self.better, self.worse,
        )  # fmt: skip


def _by_depth() -> list[float]:
    return [0.0] * DEPTHS


def _by_mood() -> list[float]:
    return [0.0] * 9


@dataclass(slots=True)
class DrafterTrack:
    """What is known of a drafter, over all its sequences."""

    accepted: float = 0.0
    rejected: float = 0.0
    filled: float = 0.0
    empty: float = 0.0
    seen: list[float] = field(default_factory=_by_depth)  # by position: trials,
    true: list[float] = field(default_factory=_by_depth)  # accepted ones,
    told: list[float] = field(default_factory=_by_depth)  # and as many as the sequences' own rates told
    moods: list[float] = field(default_factory=_by_mood)  # the same three by mood
    fills: list[float] = field(default_factory=_by_mood)  # the same three of whether there is a guess
    long: list[float] = field(default_factory=_by_depth)  # by position: blocks that reached it
    wanted: list[float] = field(default_factory=_by_depth)  # of those asked for so long
    exposed_s: float = FIRST_EXPOSED_S  # time that asking adds between two steps
    draft_s: float = 0.0
    k: float = 0.0  # depth at which these were seen
    weight: float = 0.0
    k_square: float = 0.0
    k_time: float = 0.0
    look_s: float = 0.0  # its work for a guess that is not waited for,
    read_s: float = 0.0  # and for each token of a text that it has not read

    def copy(self) -> "DrafterTrack":
        """Another one, equal."""
        return DrafterTrack(
            self.accepted, self.rejected, self.filled, self.empty,
            self.seen.copy(), self.true.copy(), self.told.copy(), self.moods.copy(), self.fills.copy(),
            self.long.copy(), self.wanted.copy(),
            self.exposed_s, self.draft_s, self.k, self.weight, self.k_square, self.k_time, self.look_s, self.read_s,
        )  # fmt: skip


class View:
    """What follows from a drafter's counts: worked out once, when it is first asked for. The drafter changes no more."""

    __slots__ = (
        "_fills",
        "_moods",
        "_profile",
        "_reach",
        "_slope_s",
        "always",
        "drafter",
        "fill_mean",
        "mean",
    )

    def __init__(self, drafter: DrafterTrack) -> None:
        self.drafter = drafter
        trials = drafter.accepted + drafter.rejected + _PRIOR_STRENGTH
        self.mean = _inside((drafter.accepted + _PRIOR_STRENGTH * _PRIOR_MEAN) / trials)
        asked = drafter.filled + drafter.empty + _FILL_STRENGTH
        self.fill_mean = (drafter.filled + _FILL_STRENGTH * _FILL_MEAN) / asked
        self.always = not drafter.empty
        self._moods: list[float] | None = None
        self._fills: list[float] | None = None
        self._profile: list[float] | None = None
        self._reach: list[float] | None = None
        self._slope_s = -1.0

    @property
    def profile(self) -> list[float]:
        """By position: true odds over those that the sequences' own rates tell."""
        if self._profile is None:
            drafter = self.drafter
            found = list(map(odds_ratio, drafter.seen, drafter.true, drafter.told))
            self._profile = found + [found[-1]] * (MAX_K - DEPTHS)
        return self._profile

    @property
    def reach(self) -> list[float]:
        """By position: share of the blocks asked for so long that reach it."""
        if self._reach is None:
            long, wanted = self.drafter.long, self.drafter.wanted
            found = [(there + 1.0) / (asked + 1.0) for there, asked in zip(long, wanted, strict=True)]
            self._reach = found + [found[-1]] * (MAX_K - DEPTHS)
        return self._reach

    def overall_rate(self, track: Track, given: AcceptancePrior | None) -> float:
        """Acceptance of the sequence, whatever its mood."""
        mean, strength = self.mean, _STRENGTH
        if given is not None:
            mean = _inside(
                total(given.by_position) / len(given.by_position) if given.by_position else given.mean
            )
            strength = min(max(given.strength, 0.5), _MOST_STRENGTH)
        rate = (track.accepted + mean * strength) / (track.accepted + track.rejected + strength)
        return 0.01 if rate < 0.01 else min(rate, 0.99)

    def acceptance(self, track: Track, given: AcceptancePrior | None) -> float:
        """Chance that a draft token is accepted where those before it are, after a block that fared like the last one."""
        return self.in_mood(track, self.overall_rate(track, given))

    def in_mood(self, track: Track, rate: float) -> float:
        """The same, the sequence's overall rate being known."""
        shared = self._moods
        if shared is None:
            moods = self.drafter.moods
            shared = self._moods = [odds_ratio(moods[at], moods[at + 1], moods[at + 2]) for at in (0, 3, 6)]
        mood = track.mood
        odds = rate / (1.0 - rate) * shared[mood]
        mean = odds / (1.0 + odds)
        at = 4 * mood
        accepted, rejected = track.moods[at], track.moods[at + 1]
        rate = (accepted + mean * _MOOD_STRENGTH) / (accepted + rejected + _MOOD_STRENGTH)
        return 0.01 if rate < 0.01 else min(rate, 0.99)

    def survival(
        self, track: Track, given: AcceptancePrior | None, depth: int, least: float = 0.0
    ) -> list[float]:
        """Chance that position j and all before it are accepted, down to ``depth`` positions or a chance of ``least``."""
        rate = self.acceptance(track, given)
        odds = rate / (1.0 - rate)
        profile = self.profile
        if given is not None and given.by_position:
            listed = [_inside(one) for one in given.by_position]
            mean = _inside(total(listed) / len(listed))
            profile = [one / (1.0 - one) * (1.0 - mean) / mean for one in listed]
        if depth > len(profile):
            profile = profile + [profile[-1]] * (depth - len(profile))
        found = []
        alive = 1.0
        for factor in profile[:depth]:
            there = odds * factor
            alive *= there / (1.0 + there)
            found.append(alive)
            if alive < least:
                break
        return found

    def overall_fill(self, track: Track) -> float:
        """Share of questions to which there is a guess, in this sequence, whatever its mood."""
        asked = track.filled + track.empty + _FILL_STRENGTH
        rate = (track.filled + self.fill_mean * _FILL_STRENGTH) / asked
        return 0.01 if rate < 0.01 else min(rate, 0.99)

    def fill(self, track: Track) -> float:
        """Chance that there is a guess at all, after a block that fared like the last one."""
        if self.always:
            return 1.0
        shared = self._fills
        if shared is None:
            fills = self.drafter.fills
            shared = self._fills = [odds_ratio(fills[at], fills[at + 1], fills[at + 2]) for at in (0, 3, 6)]
        rate = self.overall_fill(track)
        mood = track.mood
        odds = rate / (1.0 - rate) * shared[mood]
        mean = odds / (1.0 + odds)
        at = 4 * mood
        filled, empty = track.moods[at + 2], track.moods[at + 3]
        return (filled + mean * _MOOD_STRENGTH) / (filled + empty + _MOOD_STRENGTH)

    def slope_s(self) -> float:
        """How much longer a draft takes for each further token: fitted where depths differed, else in proportion."""
        if self._slope_s < 0.0:
            self._slope_s = self._slope()
        return self._slope_s

    def _slope(self) -> float:
        drafter = self.drafter
        if drafter.weight < 1.0 or drafter.k <= 0:
            return 0.0
        variance = drafter.k_square - drafter.k * drafter.k
        in_proportion = drafter.draft_s / drafter.k
        if variance <= 0.25:
            return in_proportion
        fitted = (drafter.k_time - drafter.k * drafter.draft_s) / variance
        return min(max(fitted, 0.0), in_proportion)


def total(values: Iterable[float]) -> float:
    """Their sum, one after the other: ``sum`` compensates from Python 3.12 on, and compiled code would have to do the same."""
    found = 0.0
    for value in values:
        found += value
    return found


def _inside(rate: float) -> float:
    if rate < 0.01:
        return 0.01
    if rate > 0.99:
        return 0.99
    return rate


def odds_ratio(seen: float, true: float, told: float) -> float:
    """True odds over told odds of ``seen`` trials, cautious while they are few."""
    if seen < 1.0:
        return 1.0
    expected = _inside(told / seen)
    found = _inside((true + _CAUTION * expected) / (seen + _CAUTION))
    ratio = found * (1.0 - expected) / ((1.0 - found) * expected)
    return 0.1 if ratio < 0.1 else min(ratio, 10.0)


# --- learning: ``track`` and ``drafter`` are changed, ``view`` is of before the step --------------------------------


def waited_for(
    track: Track,
    drafter: DrafterTrack,
    view: View,
    asked: int,
    proposed: int,
    drafted: int,
    agreed: int,
    prior: AcceptancePrior | None,
) -> None:
    """A round that was waited for: ``proposed`` tokens came (0 or less: none), ``drafted`` were verified."""
    _filled(track, drafter, view, asked, proposed)
    if proposed <= 0:
        track.mood = NOTHING
        return
    if not drafted:
        return
    _trials(track, drafter, view, drafted, agreed, prior)
    if agreed:
        track.zero_rounds = 0
        return
    track.zero_rounds += 1
    if track.zero_rounds >= ZERO_ROUNDS and not track.suspended:
        track.suspended, track.on, track.since = True, False, 0
        track.next_probe = track.probe_gap = FIRST_PROBE


def looked_at(
    track: Track,
    drafter: DrafterTrack,
    view: View,
    look: Look,
    wanted: int,
    prior: AcceptancePrior | None,
) -> None:
    """A guess that was not waited for, compared with what was committed meanwhile."""
    length, checked, agreed, read, work_s = look
    if read > _READ_MANY:
        drafter.read_s = _smoothed(drafter.read_s, max(work_s - drafter.look_s, 0.0) / read, _DEAR_TOKEN_S)
    elif work_s > 0.0:
        drafter.look_s = _smoothed(drafter.look_s, work_s, _DEAR_TOKEN_S * max(length, 1))
    _filled(track, drafter, view, wanted, length)
    if not length:
        track.mood = NOTHING
        return
    if agreed and track.suspended:  # half open: what was known is old
        track.suspended, track.zero_rounds = False, 0
        track.accepted *= 0.25
        track.rejected *= 0.25
    _trials(track, drafter, view, checked, agreed, prior)
    if agreed:
        track.since = max(track.since, OFF_DWELL)
        track.next_probe = min(track.next_probe, 1)
        track.probe_gap = FIRST_PROBE


def _trials(
    track: Track, drafter: DrafterTrack, view: View, length: int, agreed: int, prior: AcceptancePrior | None
) -> None:
    """The first ``agreed`` positions were right, the next one wrong."""
    overall = view.overall_rate(track, prior)
    told = view.in_mood(track, overall)
    wrong = 1 if agreed < length else 0
    trials = agreed + wrong
    mood = track.mood
    at = 4 * mood
    _notice(track, overall, agreed, wrong)
    moods = track.moods
    keep = _KEPT[trials] if trials < len(_KEPT) else _KEEP
    moods[at] = keep * moods[at] + agreed
    moods[at + 1] = keep * moods[at + 1] + wrong
    track.accepted = keep * track.accepted + agreed
    track.rejected = keep * track.rejected + wrong
    _more(drafter.moods, 3 * mood, trials, agreed, overall)
    track.mood = NOTHING if not agreed else PART if wrong else ALL
    seen, true, expected = drafter.seen, drafter.true, drafter.told
    # Behind the last trial nothing is known, and nothing is forgotten.
    seen[:trials] = [_KEEP_SHARED * one + 1.0 for one in seen[:trials]]
    true[:agreed] = [_KEEP_SHARED * one + 1.0 for one in true[:agreed]]
    if wrong and agreed < DEPTHS:
        true[agreed] = _KEEP_SHARED * true[agreed]
    expected[:trials] = [_KEEP_SHARED * one + told for one in expected[:trials]]
    if length < DEPTHS:
        seen[length] *= _KEEP_UNSEEN
        true[length] *= _KEEP_UNSEEN
        expected[length] *= _KEEP_UNSEEN
    drafter.accepted = _KEEP_DRAFTER * drafter.accepted + agreed
    drafter.rejected = _KEEP_DRAFTER * drafter.rejected + wrong


def _notice(track: Track, rate: float, agreed: int, wrong: int) -> None:
    """Acceptance may have changed: then most of what was counted is of another text.

    Two likelihood ratios of the latest tokens, each begun anew whenever nothing speaks for a change (Page 1954, CUSUM).
    """
    # With odds o, another o': tokens accepted are o'/o (1+o)/(1+o') times as likely, one rejected (1+o)/(1+o') times.
    odds = rate / (1.0 - rate)
    better = track.better * ((1.0 + odds) / (1.0 + _SHIFT * odds)) ** (agreed + wrong) * _SHIFT**agreed
    worse = track.worse * ((1.0 + odds) / (1.0 + odds / _SHIFT)) ** (agreed + wrong) / _SHIFT**agreed
    if better < _ALARM and worse < _ALARM:
        track.better = max(better, 1.0)
        track.worse = max(worse, 1.0)
        return
    track.better = track.worse = 1.0
    track.accepted *= _AFTER_CHANGE
    track.rejected *= _AFTER_CHANGE
    moods = track.moods
    for at in (0, 4, 8):
        moods[at] *= _AFTER_CHANGE
        moods[at + 1] *= _AFTER_CHANGE


_KEPT = [max(_KEEP_TOKEN**trials, _KEEP) for trials in range(MAX_K + 1)]


def _more(odds: list[float], at: int, trials: int, true: int, told: float) -> None:
    odds[at] = _KEEP_SHARED * odds[at] + trials
    odds[at + 1] = _KEEP_SHARED * odds[at + 1] + true
    odds[at + 2] = _KEEP_SHARED * odds[at + 2] + trials * told


def _filled(track: Track, drafter: DrafterTrack, view: View, asked: int, proposed: int) -> None:
    """Whether there was a guess, and how long it was."""
    filled, empty = (1, 0) if proposed > 0 else (0, 1)
    mood = track.mood
    _more(drafter.fills, 3 * mood, 1, filled, view.overall_fill(track))
    at = 4 * mood
    moods = track.moods
    moods[at + 2] = _KEEP_FILL * moods[at + 2] + filled
    moods[at + 3] = _KEEP_FILL * moods[at + 3] + empty
    track.filled = _KEEP_FILL * track.filled + filled
    track.empty = _KEEP_FILL * track.empty + empty
    drafter.filled = _KEEP_DRAFTER * drafter.filled + filled
    drafter.empty = _KEEP_DRAFTER * drafter.empty + empty
    if filled:
        reached, told = drafter.long, drafter.wanted
        told[:asked] = [_KEEP_LENGTH * one + 1.0 for one in told[:asked]]
        if proposed >= asked:
            reached[:asked] = [_KEEP_LENGTH * one + 1.0 for one in reached[:asked]]
        else:
            longer = [_KEEP_LENGTH * one for one in reached[proposed:asked]]
            reached[:asked] = [_KEEP_LENGTH * one + 1.0 for one in reached[:proposed]] + longer


def timed(drafter: DrafterTrack, exposed_s: float, draft_s: float, k: int) -> None:
    """Asking for ``k`` tokens added so much time between two steps; the drafter itself took ``draft_s``."""
    # An outlier (a prompt that had to be read first, a core that was lost) counts for little, the first one too: what
    # looks dear is not asked again, and would never be known to be cheap.
    drafter.weight += 1.0
    rate = max(_LEAST_RATE, 1.0 / drafter.weight)
    exposed_s = min(exposed_s, 3.0 * drafter.exposed_s + 5e-4)
    draft_s = min(draft_s, 3.0 * drafter.draft_s + 5e-4 if drafter.weight > 1.0 else _DEAR_TOKEN_S * k)
    drafter.exposed_s += max(_LEAST_RATE, 1.0 / (1.0 + drafter.weight)) * (exposed_s - drafter.exposed_s)
    drafter.draft_s += rate * (draft_s - drafter.draft_s)
    drafter.k += rate * (k - drafter.k)
    drafter.k_square += rate * (k * k - drafter.k_square)
    drafter.k_time += rate * (k * draft_s - drafter.k_time)


def _smoothed(before: float, now: float, first: float) -> float:
    """Outliers count for little, the first value for ``first`` at most: it has much to warm up, and would keep others from being seen."""
    return before + 0.25 * (min(now, 3.0 * before) - before) if before > 0.0 else min(now, first)


def unasked(drafter: DrafterTrack) -> None:
    """A step in which nobody asked: what asking costs is known a little less well, so that it is tried again some day."""
    drafter.exposed_s += _FORGET_COST * (min(drafter.exposed_s, FIRST_EXPOSED_S) - drafter.exposed_s)
