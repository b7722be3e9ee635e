"""Switches speculation off for a type of task and a drafter that do not pay, and on again when they do.

Off: the upper bound of acceptance is below what speculation needs, or the upper bound of the speed ratio is below 1. What
it needs is the measured break-even; without a measurement the golden number 0.55 stands in (DESIGN section 6). On again: acceptance back above by the
margin between 0.55 and 0.60, and the speed ratio at 1.02 where it is measured. In between lies a cool-down, then probes:
a small share of requests that speculate to find out.

Evidence is recent: the requests since the last switch, in blocks, of which the last ones are looked at in runs of growing
length, so that a sudden change shows after some dozens of requests whatever the weeks before were like. The judge is a
pure machine: no clock, no random numbers; its state is one document that outlives the process.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from router.evidence import ALPHA, UNKNOWN, Interval, acceptance, break_even, seconds_per_token, speed_ratio
from router.ledger.book import Book
from router.ledger.documents import check_fields
from router.ledger.group import Arm, Group
from router.ledger.keeper import Bins
from router.ledger.store import Audit
from router.ledger.sums import AT, Row, add_to, total


class GuardState(Enum):
    """Whether speculation is on."""

    ON = "on"
    OFF = "off"  # cooling down: no probes yet
    HALF_OPEN = "half-open"  # off, with probes


@dataclass(frozen=True, slots=True)
class GuardRules:
    """When to switch."""

    off_acceptance: float = 0.55
    on_acceptance: float = 0.60
    off_speed: float = 1.0
    on_speed: float = 1.02
    cool_down_requests: int = 100
    """Eligible requests before probes begin; so many ``cool_down_s`` pass, whichever is first. Doubled by every switch off
    within a day."""
    cool_down_s: float = 60.0
    max_cool_down: int = 64
    """Cool-downs grow up to so many times."""
    min_requests: int = 24
    """With a draft, before anything is decided."""
    probe_share: float = 0.12
    """Of eligible requests, while half-open."""
    begins_on: Callable[[str], bool] = lambda _task: True
    """Whether a type of task begins with speculation; else with a few requests that try it."""


_NO_BINS: Mapping[tuple[str, int], int] = {}
Subject = tuple[str, str]
"""Type of task and drafter."""

_BLOCK = 10
_BLOCKS = 40
_RUNS = (4, 8, 16, 40)
"""Blocks in the runs that are looked at: the last 30 to 40, 80, 160 and 400 requests."""
_DAY_S = 86_400.0


@dataclass(slots=True)
class _Block:
    """Some requests in a row, by batch bucket: what a token costs depends on how many share a step."""

    rows: dict[str, Row] = field(default_factory=dict)
    requests: int = 0

    def add(self, batch: str, row: Row) -> None:
        known = self.rows.get(batch)
        if known is None:
            self.rows[batch] = row.copy()
        else:
            add_to(known, row)
        self.requests += int(row[AT["requests"]])


class _Recent:
    """The last requests, in blocks."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: deque[_Block] = deque([_Block()], maxlen=_BLOCKS)

    def add(self, batch: str, row: Row) -> None:
        if self.blocks[-1].requests >= _BLOCK:
            self.blocks.append(_Block())
        self.blocks[-1].add(batch, row)

    def clear(self) -> None:
        self.blocks.clear()
        self.blocks.append(_Block())

    def last(self, length: int) -> dict[str, Row]:
        """Sums of the last ``length`` blocks, by batch bucket."""
        sums: dict[str, Row] = {}
        for block in list(self.blocks)[-length:]:
            for batch, row in block.rows.items():
                sums[batch] = total((sums[batch], row)) if batch in sums else row
        return sums


@dataclass(slots=True)
class _Line:
    """What is known of one subject."""

    state: GuardState = GuardState.ON
    since: float = 0.0
    reason: str = ""
    switches: int = 0
    recent_offs: list[float] = field(default_factory=list)
    cooled: int = 0  # eligible requests since it went off
    recent: _Recent = field(default_factory=_Recent)
    changed: bool = True  # something was observed since the last look


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the guard says of a subject, for those who plan and those who ask."""

    state: GuardState
    since: float
    reason: str
    switches: int


class Guard:
    """One per ledger. ``observe`` what requests did, ``step`` now and then. Not for more than one thread."""

    name = "guard"

    def __init__(self, rules: GuardRules | None = None) -> None:
        self._rules = rules or GuardRules()
        self._lines: dict[Subject, _Line] = {}
        self._plain: dict[str, _Recent] = {}  # by task; "" holds all
        self._unsaid = False  # a subject that no document has named yet

    # --- evidence ---

    def heard(self, name: str, value: str) -> None:
        """Nothing of it concerns this judge."""

    def observe(self, group: Group, row: Row, bins: Bins = _NO_BINS) -> None:
        """Sums of a request, or of several."""
        arm = Arm(group.arm)
        if group.drafter:
            if arm in {Arm.AUTO, Arm.PROBE}:
                line = self._line((group.task, group.drafter))
                line.recent.add(group.batch, row)
                line.changed = True
            return
        self._plain.setdefault("", _Recent()).add(group.batch, row)
        if arm in {Arm.HOLDOUT, Arm.OFF}:  # could have been speculative: to compare with
            self._plain.setdefault(group.task, _Recent()).add(group.batch, row)
            for (task, _), line in self._lines.items():
                if task == group.task:
                    line.changed = True
                    line.cooled += int(row[AT["requests"]])

    def _line(self, subject: Subject) -> _Line:
        line = self._lines.get(subject)
        if line is None:
            on = self._rules.begins_on(subject[0])
            line = self._lines[subject] = _Line(GuardState.ON if on else GuardState.HALF_OPEN)
            self._unsaid = True
        return line

    def _run(self, task: str, line: _Line, length: int) -> "_Run":
        plain = [self._plain[key].last(_BLOCKS) for key in (task, "") if key in self._plain]
        return _Run(line.recent.last(length), plain, ALPHA / len(_RUNS))

    # --- deciding ---

    def step(self, book: Book, now: float) -> tuple[str, Sequence[Audit]] | None:
        """Switch what has to be switched."""
        audits = []
        for subject, line in self._lines.items():
            before = line.state
            words = self._decide(subject[0], line, now)
            if line.state is not before:
                task, drafter = subject
                line.since = now
                audits.append(
                    Audit(
                        now,
                        "guard",
                        f"{task}/{drafter}",
                        f"{before.value} -> {line.state.value}: {words}",
                        {"switches": line.switches},
                    )
                )
        if not audits and not self._unsaid:
            return None
        self._unsaid = False
        return self.document(), audits

    def _decide(self, task: str, line: _Line, now: float) -> str:
        """Change ``line`` if there is reason; gives the reason in words."""
        rules = self._rules
        if line.state is GuardState.OFF:
            grown = min(rules.max_cool_down, 2 ** max(0, len(line.recent_offs) - 1))
            if (
                line.cooled >= rules.cool_down_requests * grown
                or now - line.since >= rules.cool_down_s * grown
            ):
                line.recent.clear()
                line.state = GuardState.HALF_OPEN
                return "the cool-down is over: a few requests try it again"
            return ""
        if not line.changed:
            return ""
        line.changed = False
        if line.state is GuardState.ON:
            reason = self._against(task, line)
            if reason:
                line.recent_offs = [at for at in line.recent_offs if now - at < _DAY_S] + [now]
                line.state, line.reason, line.cooled = GuardState.OFF, reason, 0
                line.switches += 1
                line.recent.clear()
            return reason
        reason = self._in_favour(task, line)
        if reason:
            line.state, line.reason = GuardState.ON, reason
            line.switches += 1
            line.recent.clear()
        return reason

    def _against(self, task: str, line: _Line) -> str:
        """Why it should go off; empty: it should not."""
        for length in self._lengths(line):
            run = self._run(task, line, length)
            # Costs are known as soon as one request was plain. The golden number may be far off where a row costs next to
            # nothing, so it gets to judge only where they do not come.
            least = self._rules.min_requests * (1 if run.break_even is not None else 3)
            if run.accepted.count < least:
                continue
            if run.speed.high < self._rules.off_speed:
                return f"measured {_times(run.speed)} of plain speed over {run.speed.count} requests"
            needed, origin = self._needed(run)
            if run.accepted.high < needed and run.speed.low < self._rules.off_speed:
                return f"acceptance {_share(run.accepted)} over {run.accepted.count} requests, under {needed:.2f} ({origin})"
        return ""

    def _in_favour(self, task: str, line: _Line) -> str:
        """Why it should go on; empty: it should not."""
        rules = self._rules
        for length in self._lengths(line):
            run = self._run(task, line, length)
            if run.accepted.count < rules.min_requests:
                continue
            needed, origin = self._needed(run)
            wanted = needed + rules.on_acceptance - rules.off_acceptance
            likely = run.accepted.low >= needed and run.accepted.mean >= wanted
            if run.speed.low >= rules.on_speed or (likely and not run.speed.mean < rules.on_speed):
                speed = f", {_times(run.speed)} of plain speed" if run.speed.count else ""
                return (
                    f"probes: acceptance {_share(run.accepted)}{speed} over {run.accepted.count} requests; "
                    f"needed {needed:.2f} ({origin})"
                )
        return ""

    def _needed(self, run: "_Run") -> tuple[float, str]:
        if run.break_even is not None:
            return run.break_even, "measured break-even"
        return self._rules.off_acceptance, "default, costs not measured yet"

    @staticmethod
    def _lengths(line: _Line) -> list[int]:
        """Of the runs to look at: longer ones only where there is that much."""
        return [length for length in _RUNS if length == _RUNS[0] or length <= len(line.recent.blocks)]

    # --- state ---

    def verdicts(self) -> dict[Subject, Verdict]:
        """Of every subject seen."""
        return {
            subject: Verdict(line.state, line.since, line.reason, line.switches)
            for subject, line in self._lines.items()
        }

    def document(self) -> str:
        """All that has to outlive the process."""
        return json.dumps(
            [
                {
                    "task": task, "drafter": drafter, "state": line.state.value, "since": line.since,
                    "reason": line.reason, "switches": line.switches, "recent_offs": line.recent_offs,
                    "cooled": line.cooled,
                }
                for (task, drafter), line in sorted(self._lines.items())
            ]
        )  # fmt: skip

    def restore(self, document: str) -> None:
        """Go on from ``document``; evidence is collected anew."""
        for entry in json.loads(document):
            check_fields(entry, task=str, drafter=str, since=float, reason=str, switches=int, cooled=int)
            for at in entry["recent_offs"]:
                check_fields({"recent_offs": at}, recent_offs=float)
            line = self._line((entry["task"], entry["drafter"]))
            line.state = GuardState(entry["state"])
            line.since, line.reason, line.switches = entry["since"], entry["reason"], entry["switches"]
            line.recent_offs, line.cooled = list(entry["recent_offs"]), entry["cooled"]


def verdicts_from(document: str) -> dict[Subject, Verdict]:
    """What a guard's document says."""
    guard = Guard()
    guard.restore(document)
    return guard.verdicts()


class _Run:
    """What a run of requests says, against plain decoding of the same task in steps of the same size."""

    def __init__(self, speculative: dict[str, Row], plain: Sequence[dict[str, Row]], alpha: float) -> None:
        self.accepted = acceptance(total(speculative.values()), alpha)
        self.speed, self.break_even = UNKNOWN, None
        if not speculative:
            return
        batch = max(speculative, key=lambda name: int(speculative[name][AT["timed_tokens"]]))
        mine = speculative[batch]
        costs = [seconds_per_token(rows[batch], alpha) if batch in rows else UNKNOWN for rows in plain]
        if costs:
            self.speed = speed_ratio(costs[0], seconds_per_token(mine, alpha)) if len(costs) > 1 else UNKNOWN
            # What a plain token costs hardly depends on the task: any will do until there are some of this one.
            known = next((cost for cost in costs if cost.count), UNKNOWN)
            if known.count:
                self.break_even = break_even(mine, known.mean)


def _share(interval: Interval) -> str:
    return f"{interval.mean:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _times(interval: Interval) -> str:
    return f"{interval.mean:.2f} times ({interval.low:.2f} to {interval.high:.2f})"
