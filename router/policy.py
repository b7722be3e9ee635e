"""The decision how to decode one request, and its reasons in words.

In this order: the request's own wish; an operator's rule; whether the request can gain at all (output long enough, a
drafter there, room); the guard; the lot of the holdout. Everything is looked up in memory. The output depends on none of
it (I1).
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from paceline.config import RouterConfig
from paceline.types import AcceptancePrior, Mode, Plan
from router.evidence import acceptance, seconds_per_token
from router.guard import GuardState, Subject, Verdict, verdicts_from
from router.ledger.group import Arm, Group, temperature_bucket
from router.ledger.memory import Memory
from router.ledger.sums import AT, Row, accepted_by_position, drafted_by_position
from router.lot import drawn
from router.plan import DecodingWish, PlanTable
from router.rollout import NOT_CHECKED, Standing, standings_from
from router.rules import Action, Rule, Rules

_EXPECTED_FROM = 20
"""Requests of a task from which their mean length says something."""
_PRIOR_POSITIONS = 8
_PRIOR_STRENGTH = 24.0
"""Draft tokens that the ledger's word is worth at most: the request's own rounds shall soon outweigh it."""
_EXPLORED = 0.05
"""Share of speculative requests that try a drafter of which too little is known."""
_KNOWN_FROM = 30
_CACHE_S = 1.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What the policy goes by."""

    request_id: str
    task: str
    tenant: str
    temperature: float
    prompt_tokens: int
    max_tokens: int
    wish: DecodingWish
    drafters: Mapping[str, str]
    """Known drafters and their versions, the target's identity in them."""
    available: Mapping[str, bool]
    has_room: bool
    """Whether a sequence more finds memory at once."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan, to what kind of requests it belongs, and what was looked at on the way."""

    plan: Plan
    arm: Arm
    considered: tuple[str, ...]


_logger = logging.getLogger(__name__)


class Policy:
    """Decides; one per router. Lives on the event loop."""

    def __init__(self, config: RouterConfig, table: PlanTable, memory: Memory) -> None:
        self.rules = Rules()
        self._config = config
        self._table = table
        self._memory = memory
        self._verdicts: dict[Subject, Verdict] = {}
        self._standings: dict[Subject, Standing] = {}
        self.decided: Counter[tuple[str, Arm]] = Counter()
        """Decisions by task and arm, since the start: what a metrics endpoint shows."""
        self._figures: dict[tuple[str, ...], tuple[float, Row]] = {}
        memory.on_documents = self.learn

    def learn(self, documents: Mapping[str, str]) -> None:
        """Take in what the ledger's writer decided, or operators did. One that cannot be read changes nothing."""
        for name, document in documents.items():
            try:
                self._learn(name, document)
            except Exception:  # of another version, say: the ledger is exchanged with all the same
                _logger.exception("a document of the ledger cannot be read", extra={"document": name})

    def _learn(self, name: str, document: str) -> None:
        if name == "guard":
            self._verdicts = verdicts_from(document)
        elif name == "rollout":
            self._standings = standings_from(document)
        elif name == "rules":
            self.rules = Rules.parse(document)

    def state(self, task: str, drafter: str) -> GuardState:
        """Of the guard; what begins with plain decoding is tried by a few requests until it is known, or was checked."""
        verdict = self._verdicts.get((task, drafter))
        if self.gated and self.standing(task, drafter).share and (verdict is None or not verdict.switches):
            return GuardState.ON
        if verdict is not None:
            return verdict.state
        return GuardState.ON if self._table.rule(task).mode == "speculative" else GuardState.HALF_OPEN

    @property
    def gated(self) -> bool:
        """Whether a type of task has to be let in before it speculates."""
        return self._config.rollout.gate == "on"

    def standing(self, task: str, drafter: str) -> Standing:
        """Of the rollout, as last heard."""
        return self._standings.get((task, drafter), NOT_CHECKED)

    def usual_drafter(self, task: str, available: Mapping[str, bool]) -> str:
        """Which one automatic mode prefers for a type of task; empty where there is none."""
        names = [name for name in (*self._table.preferred(task), *self._config.drafters) if name in available]
        return names[0] if names else next(iter(sorted(available)), "")

    @property
    def standings(self) -> Mapping[Subject, Standing]:
        """Of all rollouts that something was said of."""
        return self._standings

    @property
    def verdicts(self) -> Mapping[Subject, Verdict]:
        """Of the guard, as last heard."""
        return self._verdicts

    def decide(self, ask: Ask) -> Decision:
        """The plan of one request."""
        decision = self._decide(ask)
        self.decided[ask.task, decision.arm] += 1
        return decision

    def _decide(self, ask: Ask) -> Decision:
        seen: list[str] = []
        if ask.wish.mode is not None:
            plan = self._as_wished(ask, ask.wish)
            return Decision(self._with_prior(plan, ask, seen), Arm.ASKED, tuple(seen))
        pinned = self.rules.pin(ask.task, ask.tenant)
        if pinned is not None:
            return self._pinned(pinned, ask, seen)
        if self._table.is_set(ask.task) and self._table.rule(ask.task).mode == "plain":
            return Decision(
                Plan.plain(self._table.reason(ask.task)), Arm.PINNED, ("router.plans says plain",)
            )
        cannot = self._cannot_gain(ask, seen)
        if cannot:
            return Decision(Plan.plain(cannot), Arm.INELIGIBLE, tuple(seen))
        return self._measured(ask, seen)

    # --- the steps ---

    def _pinned(self, rule: Rule, ask: Ask, seen: list[str]) -> Decision:
        words = f"an operator's rule for {rule.scope}" + (f": {rule.note}" if rule.note else "")
        if rule.action is Action.PLAIN:
            return Decision(Plan.plain(words), Arm.PINNED, tuple(seen))
        wish = DecodingWish(Mode.SPECULATIVE, rule.drafter or None, None)
        plan = self._as_wished(ask, wish)
        if plan.mode is Mode.PLAIN:
            return Decision(
                Plan.plain(f"{words}, but there is no drafter to choose"), Arm.PINNED, tuple(seen)
            )
        plan = replace(
            plan, reason=plan.reason.replace("asked for by the request", words), k_max=rule.k or plan.k_max
        )
        return Decision(self._with_prior(plan, ask, seen), Arm.PINNED, tuple(seen))

    def _as_wished(self, ask: Ask, wish: DecodingWish) -> Plan:
        """What a request or a rule wants; a forbidden drafter only where it is named."""
        if wish.drafter is None:
            choice = {
                name: here
                for name, here in ask.available.items()
                if not self.rules.forbids(name, ask.task, ask.tenant)
            }
            return self._table.as_wished(ask.task, wish, choice)
        return self._table.as_wished(ask.task, wish, ask.available)

    def _cannot_gain(self, ask: Ask, seen: list[str]) -> str:
        """Why speculation cannot pay for this request whatever was measured; empty: it can."""
        least = self._config.min_expected_tokens
        if ask.max_tokens < least:
            return f"at most {ask.max_tokens} output tokens: under {least} speculation does not pay"
        expected = self._expected_tokens(ask.task)
        if expected is not None:
            seen.append(f"{ask.task} puts out {expected:.0f} tokens on average")
            if expected < least:
                return (
                    f"{expected:.0f} output tokens expected, the mean of {ask.task} in the last week: under {least} "
                    "speculation does not pay"
                )
        hottest = self._table.rule(ask.task).max_temperature
        if ask.temperature > hottest:
            return f"at temperature {ask.temperature:g} little of {ask.task} can be foreseen; up to {hottest:g} it is drafted"
        if not ask.has_room:
            return "the memory for sequences is full: drafting would take time from those that wait"
        if not self._candidates(ask):
            names = self._table.preferred(ask.task)
            wanted = next((name for name in names if name in ask.available), names[0])
            state = "not available now" if wanted in ask.available else "not known to the verify tier"
            if ask.available and wanted not in ask.available:
                state += f", which knows {', '.join(sorted(ask.available))} (draft.drafters)"
            if ask.available.get(wanted):
                state = "forbidden by an operator's rule"
            return f"drafter {wanted!r} is {state}; with it: {self._table.reason(ask.task)}"
        return ""

    def _measured(self, ask: Ask, seen: list[str]) -> Decision:
        drafter = self._drafter(ask, seen)
        rule, state = self._table.rule(ask.task), self.state(ask.task, drafter)
        verdict = self._verdicts.get((ask.task, drafter))
        seen.append(
            f"guard of {ask.task}/{drafter}: {state.value}"
            + (f", {verdict.reason}" if verdict and verdict.reason else "")
        )
        k = rule.k
        if self.gated:
            kept = self._kept_out(ask, drafter, seen)
            if kept is not None:
                return kept
        if state is GuardState.ON:
            if drawn(ask.request_id, "holdout", self._config.holdout, self._config.holdout_key):
                share = f"{self._config.holdout:.0%}"
                return Decision(
                    Plan.plain(f"one of the {share} that are decoded plainly by lot, to compare with"),
                    Arm.HOLDOUT,
                    tuple(seen),
                )
            plan = Plan.speculative(drafter, k, self._why_on(ask, drafter, verdict), self._table.law)
            return Decision(self._with_prior(plan, ask, seen), Arm.AUTO, tuple(seen))
        guard = self._config.guard
        switched = verdict is not None and verdict.switches > 0
        probed = guard.probe_share if switched else guard.first_share
        if state is GuardState.HALF_OPEN and drawn(ask.request_id, "probe", probed):
            plan = Plan.speculative(
                drafter,
                k,
                f"one of the {probed:.0%} that try whether {drafter!r} pays for {ask.task}",
                self._table.law,
            )
            return Decision(self._with_prior(plan, ask, seen), Arm.PROBE, tuple(seen))
        if verdict is None or not switched:
            return Decision(Plan.plain(self._table.reason(ask.task)), Arm.OFF, tuple(seen))
        return Decision(
            Plan.plain(f"{drafter!r} is off for {ask.task}: {verdict.reason}"), Arm.OFF, tuple(seen)
        )

    def _kept_out(self, ask: Ask, drafter: str, seen: list[str]) -> Decision | None:
        """The plain decision of a request that the rollout does not let in; None: it is let in."""
        standing = self.standing(ask.task, drafter)
        seen.append(
            f"rollout of {ask.task}/{drafter}: {standing.stage.value} at {standing.share:.0%}, {standing.reason}"
        )
        if not standing.share:
            reason = (
                f"{drafter!r} is not rolled out for {ask.task}: {standing.stage.value}, {standing.reason}"
            )
            return Decision(Plan.plain(reason), Arm.OFF, tuple(seen))
        if standing.share < 1 and not drawn(ask.request_id, "rollout", standing.share):
            reason = f"{standing.share:.0%} of {ask.task} speculate, the others are decoded plainly by lot, to compare with"
            return Decision(Plan.plain(reason), Arm.HOLDOUT, tuple(seen))
        return None

    def _why_on(self, ask: Ask, drafter: str, verdict: Verdict | None) -> str:
        row = self._row(ask.task, drafter, ask.drafters.get(drafter, ""))
        found = acceptance(row)
        reason = self._table.reason(ask.task)
        if self._table.rule(ask.task).mode == "plain" and verdict is not None:
            reason = verdict.reason
        if found.count:
            return f"{reason}; {found.mean:.0%} of draft tokens accepted over {found.count} requests"
        return reason

    # --- drafters ---

    def _candidates(self, ask: Ask) -> list[str]:
        """Those that may be chosen, the preferred one first: the table's, and those that the operator lists."""
        allowed = [
            name
            for name, here in ask.available.items()
            if here and not self.rules.forbids(name, ask.task, ask.tenant)
        ]
        first = next((name for name in self._table.preferred(ask.task) if name in allowed), None)
        listed = [name for name in self._config.drafters if name in allowed and name != first]
        return [first, *listed] if first is not None else listed

    def _drafter(self, ask: Ask, seen: list[str]) -> str:
        """The fastest one by measurement among those that the guard has on; now and then one that is not known yet."""
        names = self._candidates(ask)
        if len(names) == 1:
            return names[0]
        on = [name for name in names if self.state(ask.task, name) is GuardState.ON] or names[:1]
        speeds = {
            name: seconds_per_token(self._row(ask.task, name, ask.drafters.get(name, ""))) for name in on
        }
        unknown = [name for name in on if speeds[name].count < _KNOWN_FROM]
        for name in unknown:
            if name != on[0] and drawn(ask.request_id, f"try {name}", _EXPLORED):
                seen.append(f"too little is known of {name!r}: tried by lot")
                return name
        known = [name for name in on if speeds[name].count >= _KNOWN_FROM]
        if len(known) < 2:
            return known[0] if known and on[0] not in known and on[0] not in unknown else on[0]
        best = min(known, key=lambda name: speeds[name].mean)
        seen.append(
            "time per token: " + ", ".join(f"{name} {1e3 * speeds[name].mean:.1f} ms" for name in known)
        )
        return best

    # --- figures from the ledger ---

    def _expected_tokens(self, task: str) -> float | None:
        """Mean output of a request of this task in the last week; None where too few were seen."""
        row = self._sums(("length", task), lambda group: group.task == task)
        requests = int(row[AT["requests"]])
        return int(row[AT["output_tokens"]]) / requests if requests >= _EXPECTED_FROM else None

    def _row(self, task: str, drafter: str, version: str) -> Row:
        return self._sums(
            ("drafter", task, drafter, version),
            lambda g: g.task == task and g.drafter == drafter and g.version == version,
        )

    def _with_prior(self, plan: Plan, ask: Ask, seen: list[str]) -> Plan:
        """``plan`` with what the ledger knows about the acceptance of its kind."""
        if plan.mode is Mode.PLAIN:
            return plan
        version, heat = ask.drafters.get(plan.drafter, ""), temperature_bucket(ask.temperature)
        row = self._sums(
            ("prior", ask.task, plan.drafter, version, heat),
            lambda g: (
                (g.task, g.drafter, g.version, g.temperature) == (ask.task, plan.drafter, version, heat)
            ),
        )
        prior = prior_from(row)
        if prior is not None:
            seen.append(
                f"acceptance of the first draft tokens: {', '.join(f'{a:.2f}' for a in prior.by_position[:4])}"
            )
        return replace(plan, prior=prior)

    def _sums(self, key: tuple[str, ...], chosen: Callable[[Group], bool]) -> Row:
        """Of the last week; a second old at most, since every request asks."""
        now = self._memory.now()
        known = self._figures.get(key)
        if known is not None and now - known[0] < _CACHE_S:
            return known[1]
        if len(self._figures) > 4096:  # versions and tasks come and go
            self._figures.clear()
        row = self._memory.window("7d", chosen)
        self._figures[key] = (now, row)
        return row


def prior_from(row: Row) -> AcceptancePrior | None:
    """Acceptance by position, given that all before it were accepted; None where little is known."""
    drafted, accepted = drafted_by_position(row), accepted_by_position(row)
    trials = int(drafted[0])
    if trials < _KNOWN_FROM:
        return None
    by_position: list[float] = []
    for position in range(_PRIOR_POSITIONS):
        reached = int(min(drafted[position], accepted[position - 1])) if position else trials
        if reached < _KNOWN_FROM:
            break
        by_position.append((int(accepted[position]) + 0.5) / (reached + 1))
    seen = sum(int(min(drafted[j], accepted[j - 1])) if j else trials for j in range(len(by_position)))
    mean = sum(int(accepted[j]) for j in range(len(by_position))) / seen
    mean = min(0.99, max(0.01, mean))
    strength = min(_PRIOR_STRENGTH, seen / 10)
    return AcceptancePrior(mean, strength, tuple(min(0.99, max(0.01, a)) for a in by_position))
