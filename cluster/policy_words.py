"""The policy and its decisions in words."""

import math
from collections.abc import Iterator

from cluster.words import clock, counted
from paceline.client import RequestSummary
from paceline.types import Mode
from paceline.v1 import router_pb2

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


def in_words(policy: router_pb2.GetPolicyResponse) -> Iterator[str]:
    """The policy, line by line."""
    yield f"ledger: {policy.ledger}"
    yield "rules of operators:" if policy.rules else "rules of operators: none"
    for rule in policy.rules:
        yield f"  {rule_in_words(rule)}"
    yield "guards:" if policy.guards else "guards: none has decided anything yet"
    for guard in policy.guards:
        accepted = f", acceptance {guard.acceptance:.2f}" if guard.HasField("acceptance") else ""
        yield f"  {guard.task} with {guard.drafter}: {guard.state}{accepted}, {counted(guard.requests, 'request')} in 24 h"
        if guard.reason:
            yield f"    since {clock(guard.since)}: {guard.reason}"
    yield f"holdout ({policy.holdout_share:.0%} decoded plainly by lot; below 1: speculation is faster):"
    for one in policy.holdout:
        high = "?" if math.isinf(one.ratio_high) else f"{one.ratio_high:.2f}"
        yield (
            f"  {one.task}, {_METRICS.get(one.metric, one.metric)}, P{100 * one.quantile:g}: "
            f"{1e3 * one.speculative_s:.0f} against {1e3 * one.plain_s:.0f} ms, ratio between {one.ratio_low:.2f} "
            f"and {high} ({one.speculative_requests} and {one.plain_requests} requests)"
        )
    if not policy.holdout:
        yield "  nothing to compare yet"
    yield "switched:" if policy.audit else "switched: nothing yet"
    for record in policy.audit:
        yield f"  {clock(record.at)} {record.kind} {record.subject}: {record.words}"


def explained(request: RequestSummary) -> Iterator[str]:
    """Why a request was decoded as it was, line by line."""
    plan, decision = request.plan, request.decision
    yield f"request {request.request_id}" + (f" of tenant {request.tenant}" if request.tenant else "")
    yield f"  task: {request.task_type}, {decision.task_origin}"
    for words in decision.considered:
        yield f"  looked at: {words}"
    how = plan.mode.value
    if plan.mode is Mode.SPECULATIVE:
        how += f" with {plan.drafter}, up to {plan.k_max} draft tokens" + (
            f", law {plan.law.value}" if plan.law else ""
        )
    yield f"  decoded: {how} ({decision.arm})"
    yield f"  because: {plan.reason}"
    stats = request.speculative
    if stats.num_spec_steps:
        yield (
            f"  came of it: {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} draft tokens accepted in "
            f"{stats.num_spec_steps} rounds, {stats.mean_acceptance_length or 0:.2f} tokens a round"
        )
    yield f"  ended: {request.outcome}, {request.usage.completion_tokens} tokens in {request.timings.total_s:.2f} s"
