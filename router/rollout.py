"""How far speculation is rolled out, by type of task and drafter: a share that grows while nothing speaks against it.

A passed check (or an operator) lets a task in at the first step. The requests outside the share are decoded plainly, by lot:
they are what the others are compared with. After each window of speculative requests the share goes up a step if they were no
slower, down a step if they were, and to zero when their tail is heavier (``router.tail``). From zero only another check or an
operator leads back. The judge is a pure machine without a clock; its state, evidence included, is one document of the ledger.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from router.evidence import seconds_per_token, speed_ratio
from router.ledger.book import Book
from router.ledger.documents import LAST_AT, check_fields, counts_from, entries, value_of
from router.ledger.group import Arm, Group
from router.ledger.keeper import Bins
from router.ledger.store import Audit
from router.ledger.sums import AT, SPEED, Row, no_sums
from router.tail import compare_tails

ORDERS = "rollout_orders"
"""Name of the document of what checks and operators said."""
KEPT_ORDERS = 200
"""The document holds so many, the newest ones."""
_METRICS = ("gap", "ttft")
_WRITE_EVERY_S = 5.0
_CHANCE, _CHANCE_WHEN_FULL = 0.0025, 0.00025
"""Of stopping a rollout whose tail is no heavier, at each look: two looks a window while it grows, one afterwards."""
_ENOUGH_PLAIN = 20
_MOST = 1600
"""Requests kept as evidence of a way; beyond them all counts are halved."""

Subject = tuple[str, str]
"""Type of task and drafter."""
Counts = dict[int, int]


class Stage(Enum):
    """Where a rollout stands."""

    UNCHECKED = "unchecked"  # nothing said yet, or a check failed
    CANARY = "canary"  # a share speculates
    FULL = "full"  # all do, but for the holdout
    STOPPED = "stopped"  # the tail broke, or windows failed down to nothing
    OVERRIDE = "override"  # as an operator says, whatever windows show


class Said(Enum):
    """What an order says."""

    PASSED = "passed"  # a check: let it in
    FAILED = "failed"  # a check: keep it out
    SET = "set"  # an operator: go on from this share
    ALLOW = "allow"  # an operator: this share, whatever is measured
    STOP = "stop"  # an operator: none
    CLEAR = "clear"  # an operator: as if never checked


@dataclass(frozen=True, slots=True)
class Order:
    """What a check or an operator said. ``number`` rises from one to the next."""

    number: int
    said: Said
    task: str
    drafter: str
    share: float = 1.0
    note: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutRules:
    """How fast it goes."""

    steps: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    window: int = 40
    """Speculative requests of a window."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a subject stands, for those who plan and those who ask."""

    stage: Stage
    share: float
    since: float
    reason: str
    windows: int
    speculative: int
    plain: int
    """Requests of the present window, and plain ones to compare with."""


NOT_CHECKED = Standing(Stage.UNCHECKED, 0.0, 0.0, "no check has passed for it yet", 0, 0, 0)


@dataclass(slots=True)
class _Way:
    """Requests of one way of decoding: how fast, and their times by bin."""

    speed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPEED, 0))
    bins: dict[str, Counts] = field(default_factory=lambda: {metric: {} for metric in _METRICS})
    requests: int = 0

    def add(self, row: Row, bins: Bins) -> None:
        self.requests += int(row[AT["requests"]])
        for name in SPEED:
            self.speed[name] += int(row[AT[name]])
        for (metric, number), count in bins.items():
            if metric in self.bins:
                self.bins[metric][number] = self.bins[metric].get(number, 0) + count
        while self.requests > _MOST:
            self.requests //= 2
            self.speed = {name: value // 2 for name, value in self.speed.items()}
            self.bins = {
                m: {n: c // 2 for n, c in counts.items() if c > 1} for m, counts in self.bins.items()
            }

    def row(self) -> Row:
        row = no_sums()
        for name, value in self.speed.items():
            row[AT[name]] = value
        return row

    def document(self) -> dict[str, Any]:
        bins = {metric: sorted(counts.items()) for metric, counts in self.bins.items()}
        return {"speed": self.speed, "bins": bins, "requests": self.requests}

    @classmethod
    def restored(cls, told: Mapping[str, Any]) -> "_Way":
        check_fields(told, requests=int)
        check_fields(told["speed"], **dict.fromkeys(told["speed"], int))
        bins = {metric: counts_from(counts) for metric, counts in told["bins"].items()}
        return cls(dict(told["speed"]), bins, told["requests"])


@dataclass(slots=True)
class _Line:
    """One subject."""

    stage: Stage = Stage.UNCHECKED
    share: float = 0.0
    since: float = 0.0
    reason: str = "no check has passed for it yet"
    windows: int = 0
    looked_at: int = 0  # requests of the window at the last look
    window: _Way = field(default_factory=_Way)
    speculative: _Way = field(default_factory=_Way)
    plain: _Way = field(default_factory=_Way)

    def standing(self) -> Standing:
        return Standing(
            self.stage,
            self.share,
            self.since,
            self.reason,
            self.windows,
            self.window.requests,
            self.plain.requests,
        )

    def begin(self, stage: Stage, share: float, now: float, reason: str) -> None:
        """Another stage; evidence is collected anew where it starts from nothing."""
        if self.share == 0.0:
            self.speculative, self.plain = _Way(), _Way()
        self.stage, self.share, self.since, self.reason = stage, share, now, reason
        self.window, self.looked_at = _Way(), 0


class Rollout:
    """One per ledger; a judge of the keeper, for its thread."""

    name = "rollout"

    def __init__(self, rules: RolloutRules | None = None) -> None:
        self._rules = rules or RolloutRules()
        self._lines: dict[Subject, _Line] = {}
        self._applied = 0
        self._waiting: list[Order] = []
        self._changed = False
        self._write_at = 0.0

    # --- evidence ---

    def heard(self, name: str, value: str) -> None:
        """A document was written: orders are carried out at the next step."""
        if name == ORDERS:
            known = {order.number for order in self._waiting}
            self._waiting += [
                order
                for order in orders_from(value)
                if order.number > self._applied and order.number not in known
            ]

    def observe(self, group: Group, row: Row, bins: Bins) -> None:
        """Sums of requests. Only those that a lot parted are compared."""
        arm = Arm(group.arm)
        if arm is Arm.AUTO:
            line = self._lines.get((group.task, group.drafter))
            if line is not None:
                for way in (line.window, line.speculative):
                    way.add(row, bins)
                self._changed = True
        elif arm is Arm.HOLDOUT:
            for (task, _), line in self._lines.items():
                if task == group.task and line.share > 0:
                    line.plain.add(row, bins)
                    self._changed = True

    # --- deciding ---

    def step(self, book: Book, now: float) -> tuple[str, Sequence[Audit]] | None:
        """Carry out orders, look at windows."""
        audits = [self._carry_out(order, now) for order in self._waiting]
        self._waiting.clear()
        for subject, line in self._lines.items():
            before = line.share
            words = self._look(line, now)
            if words:
                moved = f"{before:.0%} -> {line.share:.0%}: {words}" if line.share != before else words
                audits.append(Audit(now, "rollout", "/".join(subject), moved, {"share": line.share}))
        if not audits and not (self._changed and now >= self._write_at):
            return None
        self._changed, self._write_at = False, now + _WRITE_EVERY_S
        return self.document(), audits

    def _carry_out(self, order: Order, now: float) -> Audit:
        line = self._lines.setdefault((order.task, order.drafter), _Line())
        before = line.share
        note = (
            order.note
            or f"said by {'a check' if order.said in {Said.PASSED, Said.FAILED} else 'an operator'}"
        )
        match order.said:
            case Said.PASSED if line.stage in {Stage.CANARY, Stage.FULL, Stage.OVERRIDE}:
                line.reason = note  # it is on its way already
            case Said.PASSED:
                line.begin(Stage.CANARY, self._rules.steps[0], now, note)
            case Said.SET:
                line.begin(_stage(order.share), order.share, now, note)
            case Said.ALLOW:
                line.begin(Stage.OVERRIDE, order.share, now, note)
            case Said.STOP:
                line.begin(Stage.STOPPED, 0.0, now, note)
            case Said.FAILED:
                line.begin(Stage.UNCHECKED, 0.0, now, note)
            case Said.CLEAR:
                why = f": {order.note}" if order.note else ""
                line.begin(Stage.UNCHECKED, 0.0, now, f"not checked since it was cleared by an operator{why}")
        self._applied = max(self._applied, order.number)
        words = f"{order.said.value}: {before:.0%} -> {line.share:.0%}, {note}"
        return Audit(now, "rollout", f"{order.task}/{order.drafter}", words, {"share": line.share})

    def _look(self, line: _Line, now: float) -> str:
        """At the middle and the end of a window; what was decided, in words."""
        size = self._rules.window * (5 if line.stage is Stage.FULL else 1)
        due = size if line.stage is Stage.FULL or line.looked_at else size // 2
        if line.stage not in {Stage.CANARY, Stage.FULL} or line.window.requests < due:
            return ""
        if line.plain.requests < _ENOUGH_PLAIN:
            return ""
        line.looked_at = line.window.requests
        broken = self._broken(line)
        if broken:
            line.begin(Stage.STOPPED, 0.0, now, broken)
            return broken
        if line.window.requests < size:
            return ""
        line.windows += 1
        speed = speed_ratio(seconds_per_token(line.plain.row()), seconds_per_token(line.window.row()))
        words = f"{speed.mean:.2f} of plain speed over {line.window.requests} requests"
        if speed.count and speed.mean < 1.0:
            return self._down(line, now, words)
        return self._up(line, now, words)

    def _broken(self, line: _Line) -> str:
        # Shared by the four tests of a look.
        chance = (_CHANCE_WHEN_FULL if line.stage is Stage.FULL else _CHANCE) / (2 * len(_METRICS))
        for metric in _METRICS:
            for way in (line.window, line.speculative):
                test = compare_tails(way.bins[metric], line.plain.bins[metric])
                if test is not None and test.chance <= chance:
                    named = {"gap": "time a token", "ttft": "first token"}[metric]
                    return f"the tail is broken, {named}: {test.words}"
        return ""

    def _up(self, line: _Line, now: float, words: str) -> str:
        higher = [step for step in self._rules.steps if step > line.share]
        if not higher:
            line.begin(Stage.FULL, line.share, line.since, line.reason)
            return ""
        line.begin(_stage(higher[0]), higher[0], now, f"window passed: {words}")
        return line.reason

    def _down(self, line: _Line, now: float, words: str) -> str:
        lower = [step for step in self._rules.steps if step < line.share]
        if lower:
            line.begin(Stage.CANARY, lower[-1], now, f"window failed: {words}")
        else:
            line.begin(Stage.STOPPED, 0.0, now, f"window failed at the first step: {words}")
        return line.reason

    # --- state ---

    def document(self) -> str:
        """All that has to outlive the process, evidence included."""
        lines = [
            {
                "task": task, "drafter": drafter, "stage": line.stage.value, "share": line.share, "since": line.since,
                "reason": line.reason, "windows": line.windows, "looked_at": line.looked_at,
                "window": line.window.document(), "speculative": line.speculative.document(), "plain": line.plain.document(),
            }
            for (task, drafter), line in sorted(self._lines.items())
        ]  # fmt: skip
        return json.dumps({"applied": self._applied, "lines": lines})

    def restore(self, document: str) -> None:
        """Go on from ``document``."""
        told = json.loads(document)
        check_fields(told, applied=int)
        self._applied = told["applied"]
        for entry in told["lines"]:
            check_fields(
                entry,
                task=str, drafter=str, share=float, since=float, reason=str, windows=int, looked_at=int,
            )  # fmt: skip
            self._lines[entry["task"], entry["drafter"]] = _Line(
                Stage(entry["stage"]), entry["share"], entry["since"], entry["reason"], entry["windows"], entry["looked_at"],
                *(_Way.restored(entry[name]) for name in ("window", "speculative", "plain")),
            )  # fmt: skip

    def standings(self) -> dict[Subject, Standing]:
        """Of every subject of which something was said."""
        return {subject: line.standing() for subject, line in self._lines.items()}


def _stage(share: float) -> Stage:
    if share <= 0:
        return Stage.STOPPED
    return Stage.FULL if share >= 1.0 else Stage.CANARY


def standings_from(document: str) -> dict[Subject, Standing]:
    """What a rollout's document says."""
    rollout = Rollout()
    rollout.restore(document)
    return rollout.standings()


def orders_from(document: str) -> list[Order]:
    """What was said, oldest first. Raises ValueError for what is no such document."""
    orders = [value_of(Order, entry) for entry in entries(document)]
    for order in orders:
        if not 0.0 <= order.share <= 1.0:
            raise ValueError(f"share: {order.share!r} is none")
        if not 0.0 <= order.at < LAST_AT:
            raise ValueError(f"at: {order.at!r} is no time")
    return orders


def with_orders(document: str, new: Sequence[Order]) -> str:
    """The document with ``new`` ones behind, numbered on.

    A number is at least the microsecond in which the order was said. Counted from the document alone, numbers would begin again where the one
    before was lost or could not be read, and what has a number that was carried out once is not carried out.
    """
    orders = orders_from(document)
    number = max((order.number for order in orders), default=0)
    for order in new:
        number = max(number + 1, int(1e6 * order.at))
        orders.append(Order(number, order.said, order.task, order.drafter, order.share, order.note, order.at))
    return json.dumps([asdict(order) | {"said": order.said.value} for order in orders[-KEPT_ORDERS:]])
