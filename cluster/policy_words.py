"""The policy in words."""

import math
from collections.abc import Iterable, Iterator

from cluster.words import clock, counted
from paceline.v1 import router_pb2
from router.evidence import MIN_REQUESTS
from router.holdout import ALPHA_EACH
from router.quantiles import fewest

_METRICS = {"ttft": "first token", "gap": "per token", "pause": "longest pause", "total": "whole request"}
ACTIONS = {
    router_pb2.POLICY_ACTION_PLAIN: "plain",
    router_pb2.POLICY_ACTION_SPECULATIVE: "speculative",
    router_pb2.POLICY_ACTION_FORBID: "forbid",
}


def rule_in_words(rule: router_pb2.PolicyRule) -> str:
    """One line."""
    scope = [f"{name} {value}" for name, value in (("task", rule.task), ("tenant", rule.tenant)) if value]
    words = f"{ACTIONS.get(rule.action, '?')} {rule.drafter}".strip() + (f" k={rule.k}" if rule.k else "")
    return f"{' and '.join(scope) or 'everything'}: {words}" + (f" ({rule.note})" if rule.note else "")


def ledger_in_words(policy: router_pb2.GetPolicyResponse) -> str:
    """Where it is, and how much of what was before it goes on from."""
    if policy.HasField("ledger_since"):
        remembered = f"{counted(policy.ledger_requests, 'request')} since {clock(policy.ledger_since)} (counted by hours)"
    elif policy.guards or policy.rules or policy.holdout or policy.audit:
        remembered = "no requests of the last eight days, but what was decided before"
    else:
        remembered = "new, no requests yet"
    return f"{policy.ledger}; {remembered}"


def in_words(policy: router_pb2.GetPolicyResponse) -> Iterator[str]:
    """The policy, line by line."""
    yield f"ledger: {ledger_in_words(policy)}"
    yield "rules of operators:" if policy.rules else "rules of operators: none"
    for rule in policy.rules:
        yield f"  {rule_in_words(rule)}"
    yield "guards:" if policy.guards else "guards: none has decided anything yet"
    for guard in policy.guards:
        yield f"  {guard.task} with {guard.drafter}: {guard.state}, {_acceptance_in_words(guard)}"
        if guard.reason:
            yield f"    since {clock(guard.since)}: {guard.reason}"
    yield f"holdout ({policy.holdout_share:.0%} decoded plainly by lot; below 1: speculation is faster):"
    yield from _comparisons(policy.holdout)
    if not policy.holdout:
        yield "  nothing to compare yet"
    yield "switched:" if policy.audit else "switched: nothing yet"
    for record in policy.audit:
        yield f"  {clock(record.at)} {record.kind} {record.subject}: {record.words}"


def _acceptance_in_words(guard: router_pb2.GuardStatus) -> str:
    """Of the last day; no figure from fewer requests than the guard itself would take a bound from."""
    requests = f"{counted(guard.requests, 'request')} that drafted in 24 h"
    if guard.requests < MIN_REQUESTS:
        return f"{requests}: too few for an acceptance, which takes {MIN_REQUESTS}"
    return f"acceptance {guard.acceptance:.2f}, {requests}" if guard.HasField("acceptance") else requests


def _comparisons(holdout: Iterable[router_pb2.HoldoutComparison]) -> Iterator[str]:
    """Quantiles of which something can be said; the others by what they lack."""
    too_few: dict[tuple[str, float], list[router_pb2.HoldoutComparison]] = {}
    for one in holdout:
        if one.ratio_low <= 0 and math.isinf(one.ratio_high):  # bounded on neither side
            too_few.setdefault((one.task, one.quantile), []).append(one)
            continue
        high = "?" if math.isinf(one.ratio_high) else f"{one.ratio_high:.2f}"
        needed = fewest(one.quantile, ALPHA_EACH)
        yield (
            f"  {one.task}, {_metric(one)}, P{100 * one.quantile:g}: "
            f"{_time(one.speculative_s, one.speculative_requests, needed)} against {_time(one.plain_s, one.plain_requests, needed)} ms, "
            f"ratio between {one.ratio_low:.2f} and {high} ({one.speculative_requests} and {one.plain_requests} requests)"
        )
    for (task, p), these in too_few.items():
        requests = max(one.speculative_requests for one in these), max(one.plain_requests for one in these)
        yield (
            f"  {task}, P{100 * p:g} of {', '.join(map(_metric, these))}: too few requests, {requests[0]} and {requests[1]}; "
            f"{fewest(p, ALPHA_EACH)} of each are needed"
        )


def _metric(one: router_pb2.HoldoutComparison) -> str:
    return _METRICS.get(one.metric, one.metric)


def _time(seconds: float, requests: int, needed: int) -> str:
    """No figure for a quantile that so few requests do not bound."""
    return f"{1e3 * seconds:.0f}" if requests >= needed else "?"
