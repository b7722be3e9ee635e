"""The policy, shown and steered: what ``GetPolicy`` and the rules' calls answer."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from paceline.errors import FieldViolation, InvalidRequestError, PeerLostError
from paceline.ranges import MAX_K
from paceline.v1 import router_pb2
from router.accept import RouterParts
from router.holdout import comparisons_from
from router.ledger.memory import Memory, Writer
from router.ledger.store import Audit
from router.ledger.sums import AT
from router.rollout import KEPT_ORDERS, ORDERS, Order, Said, with_orders
from router.rules import Action, Rule, Rules
from router.validate import MAX_NAME_CHARACTERS

_DEFAULT_AUDITS = 20
_FIRST_NEWS_S = 1.0
"""How long who asks right after the start waits for what the ledger remembers."""
_ATTEMPTS = 5
_LOOKED_THROUGH = 200
_MOST_RULES = 1000
"""Every request looks through them, and every exchange between router and ledger carries all."""
_MOST_NOTE = 1024
"""Characters."""
_ACTIONS = {
    router_pb2.POLICY_ACTION_PLAIN: Action.PLAIN,
    router_pb2.POLICY_ACTION_SPECULATIVE: Action.SPECULATIVE,
    router_pb2.POLICY_ACTION_FORBID: Action.FORBID,
}
_SAID = {
    router_pb2.ROLLOUT_ACTION_PASSED: Said.PASSED,
    router_pb2.ROLLOUT_ACTION_FAILED: Said.FAILED,
    router_pb2.ROLLOUT_ACTION_SET: Said.SET,
    router_pb2.ROLLOUT_ACTION_ALLOW: Said.ALLOW,
    router_pb2.ROLLOUT_ACTION_STOP: Said.STOP,
    router_pb2.ROLLOUT_ACTION_CLEAR: Said.CLEAR,
}
_ACTIONS_BACK = {action: value for value, action in _ACTIONS.items()}


class PolicyDesk:
    """Answers for the policy of one router; changes go through the ledger, so that all routers follow."""

    def __init__(self, parts: RouterParts, writer: Writer, ledger: str) -> None:
        self._parts = parts
        self._writer = writer
        self._ledger = ledger

    async def show(self, request: router_pb2.GetPolicyRequest) -> router_pb2.GetPolicyResponse:
        """The policy as it stands; without the audit while the ledger is away."""
        parts = self._parts
        words = self._ledger
        audits: list[Audit] = []
        try:
            audits = await self._writer.audits(request.audit_limit or _DEFAULT_AUDITS)
        except OSError as error:
            words += f"; away: {error}"
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_NEWS_S):
                    await parts.memory.heard.wait()
        requests, since = parts.memory.remembered()
        return router_pb2.GetPolicyResponse(
            rules=_rules(parts.policy.rules),
            guards=[self._guard(task, drafter) for task, drafter in sorted(parts.policy.verdicts)],
            holdout=_comparisons(parts.memory),
            audit=[
                router_pb2.AuditRecord(at=a.at, kind=a.kind, subject=a.subject, words=a.words) for a in audits
            ],
            holdout_share=parts.config.holdout,
            ledger=words,
            ledger_requests=requests,
            ledger_since=since,
        )

    async def set(self, rule: router_pb2.PolicyRule) -> list[router_pb2.PolicyRule]:
        """Adds ``rule``; the rules in force."""
        wrong = list(_wrong(rule, self._parts.namer.types))
        if wrong:
            raise InvalidRequestError(wrong)
        new = Rule(
            _ACTIONS[rule.action], rule.task, rule.tenant, rule.drafter, rule.k, rule.note, time.time()
        )
        words = f"{new.action.value} for {new.scope}" + (f": {new.note}" if new.note else "")
        return _rules(await self._change(lambda rules: _within(rules.plus(new)), new.scope, words))

    async def remove(
        self, request: router_pb2.RemovePolicyRuleRequest
    ) -> tuple[list[router_pb2.PolicyRule], bool]:
        """Takes the rule of that scope away; the rules in force, and whether there was one."""
        scope = request.task, request.tenant, request.drafter
        removed = False

        def without(rules: Rules) -> Rules:
            nonlocal removed  # from what the ledger held, which may be newer than what this router has heard of
            after = rules.without(*scope)
            removed = len(list(after)) < len(list(rules))
            return after if removed else rules

        named = [
            f"{name} {value!r}"
            for name, value in zip(("task", "tenant", "drafter"), scope, strict=True)
            if value
        ]
        after = await self._change(without, " and ".join(named) or "everything", "removed")
        return _rules(after), removed

    async def rollout(self) -> router_pb2.GetRolloutResponse:
        """The rollouts as they stand; without what moved while the ledger is away."""
        policy = self._parts.policy
        audits: list[Audit] = []
        with contextlib.suppress(OSError):
            audits = [one for one in await self._writer.audits(_LOOKED_THROUGH) if one.kind == "rollout"]
        return router_pb2.GetRolloutResponse(
            gated=policy.gated,
            rollouts=[
                router_pb2.RolloutStatus(
                    task=task,
                    drafter=drafter,
                    stage=standing.stage.value,
                    share=standing.share,
                    since=standing.since,
                    reason=standing.reason,
                    windows=standing.windows,
                    window_requests=standing.speculative,
                    plain_requests=standing.plain,
                )
                for (task, drafter), standing in sorted(policy.standings.items())
            ],
            audit=[
                router_pb2.AuditRecord(at=a.at, kind=a.kind, subject=a.subject, words=a.words)
                for a in audits[:_DEFAULT_AUDITS]
            ],
        )

    async def order(self, orders: Sequence[router_pb2.RolloutOrder]) -> int:
        """Puts what is said into the ledger, whose writer carries it out. Raises InvalidRequestError."""
        if not 1 <= len(orders) <= KEPT_ORDERS:
            raise InvalidRequestError.single("orders", f"{len(orders)}; expected 1 to {KEPT_ORDERS}")
        facts = await self._parts.replicas.facts()
        wrong = [
            violation
            for index, order in enumerate(orders)
            for violation in _wrong_order(f"orders[{index}]", order, self._parts.namer.types, facts.drafters)
        ]
        if wrong:
            raise InvalidRequestError(wrong)
        policy, available = self._parts.policy, dict.fromkeys(facts.drafters, True)
        new = [
            Order(
                0,
                _SAID[order.action],
                order.task,
                order.drafter or policy.usual_drafter(order.task, available),
                order.share if order.HasField("share") else 1.0,
                order.note,
                time.time(),
            )
            for order in orders
        ]
        words = ", ".join(f"{order.said.value} {order.task}/{order.drafter}" for order in new)
        await self._write(ORDERS, lambda document: with_orders(document, new), "rollout", words)
        return len(new)

    async def _write(self, name: str, change: Callable[[str], str], subject: str, words: str) -> str:
        """The document as changed; written only over what it was made from."""
        current = self._parts.memory.documents.get(name, "")
        audit = Audit(time.time(), "rule", subject, words, {})
        for _ in range(_ATTEMPTS):
            wanted = change(current)
            try:
                written, current = await self._writer.put_document(name, current, wanted, audit)
            except OSError as error:
                raise PeerLostError(f"the ledger, which keeps it, is away: {error}") from error
            if written:
                self._parts.memory.documents[name] = current
                return current
        raise PeerLostError(f"the {name.replace('_', ' ')} are being changed by others; try again")

    async def _change(self, change: Callable[[Rules], Rules], subject: str, words: str) -> Rules:
        """Written only over what it was made from: two operators at two routers do not undo each other."""

        def changed(document: str) -> str:
            before = Rules.parse(document)
            after = change(before)
            return document if after is before else after.document()

        document = await self._write("rules", changed, subject, words)
        self._parts.policy.learn({"rules": document})
        return Rules.parse(document)

    def _guard(self, task: str, drafter: str) -> router_pb2.GuardStatus:
        verdict = self._parts.policy.verdicts[task, drafter]
        row = self._parts.memory.window("24h", lambda g: g.task == task and g.drafter == drafter)
        drafted = int(row[AT["drafted"]])
        return router_pb2.GuardStatus(
            task=task,
            drafter=drafter,
            state=verdict.state.value,
            since=verdict.since,
            reason=verdict.reason,
            switches=verdict.switches,
            acceptance=int(row[AT["accepted"]]) / drafted if drafted else None,
            requests=int(row[AT["spec_requests"]]),
        )


def _wrong_order(
    path: str, order: router_pb2.RolloutOrder, task_types: Sequence[str], drafters: Collection[str]
) -> Iterator[FieldViolation]:
    if order.action not in _SAID:
        yield FieldViolation(
            f"{path}.action", f"{order.action}; expected passed, failed, set, allow, stop or clear"
        )
    if order.task not in (*task_types, "unsure"):
        yield FieldViolation(
            f"{path}.task", f"{order.task!r}; expected one of {', '.join(task_types)}, unsure"
        )
    if not drafters:
        yield FieldViolation(f"{path}.drafter", "no drafter is known yet; try again once one has connected")
    elif order.drafter and order.drafter not in drafters:
        yield FieldViolation(
            f"{path}.drafter", f"{order.drafter!r}; expected one of {', '.join(sorted(drafters))}"
        )
    if order.HasField("share") and not 0 <= order.share <= 1:
        yield FieldViolation(f"{path}.share", f"{order.share:g}; expected 0 to 1")
    yield from _wrong_texts(path, note=order.note)


def _wrong(rule: router_pb2.PolicyRule, task_types: Sequence[str]) -> Iterator[FieldViolation]:
    if rule.action not in _ACTIONS:
        yield FieldViolation("rule.action", f"{rule.action}; expected plain, speculative or forbid")
    if rule.task and rule.task not in (*task_types, "unsure"):
        yield FieldViolation("rule.task", f"{rule.task!r}; expected one of {', '.join(task_types)}, unsure")
    if rule.action == router_pb2.POLICY_ACTION_PLAIN and rule.drafter:
        yield FieldViolation("rule.drafter", f"{rule.drafter!r}; plain decoding has none")
    if rule.k and (rule.action != router_pb2.POLICY_ACTION_SPECULATIVE or rule.k > MAX_K):
        yield FieldViolation("rule.k", f"{rule.k}; expected 1 to {MAX_K}, only with speculative")
    yield from _wrong_texts("rule", tenant=rule.tenant, drafter=rule.drafter, note=rule.note)


def _wrong_texts(path: str, **texts: str) -> Iterator[FieldViolation]:
    """They stand in logs and on terminals, and every router hears of them."""
    for name, text in texts.items():
        most = _MOST_NOTE if name == "note" else MAX_NAME_CHARACTERS
        if len(text) > most:
            yield FieldViolation(f"{path}.{name}", f"{len(text)} characters; expected at most {most}")
        elif not text.isprintable():
            yield FieldViolation(f"{path}.{name}", f"{text[:40]!a}; expected printable characters")


def _within(rules: Rules) -> Rules:
    if (count := len(list(rules))) > _MOST_RULES:
        raise InvalidRequestError.single(
            "rule", f"{count} rules; at most {_MOST_RULES}: take some away first"
        )
    return rules


def _rules(rules: Rules) -> list[router_pb2.PolicyRule]:
    return [
        router_pb2.PolicyRule(
            task=r.task, tenant=r.tenant, drafter=r.drafter, action=_ACTIONS_BACK[r.action], k=r.k, note=r.note, set_at=r.set_at,
        )
        for r in rules
    ]  # fmt: skip


def _comparisons(memory: Memory) -> list[router_pb2.HoldoutComparison]:
    return [
        router_pb2.HoldoutComparison(
            task=c.task,
            metric=c.metric,
            quantile=c.p,
            speculative_s=c.speculative.estimate,
            plain_s=c.plain.estimate,
            ratio_low=0.0 if math.isinf(c.plain.high) else c.ratio.low,
            ratio_high=c.ratio.high,
            speculative_requests=c.requests[0],
            plain_requests=c.requests[1],
        )
        for c in comparisons_from(memory.documents.get("holdout", "[]"))
    ]
