"""Why one request was decoded as it was, in words."""

from collections.abc import Iterator

from paceline.client import Decision, RequestSummary
from paceline.types import Mode, Plan

_PLAIN_BECAUSE = {
    "holdout": "Chance decided: a small share of the requests that could speculate is decoded plainly by lot, so that "
    "both ways can be compared.",
    "ineligible": "For this very request the router expects no gain from speculation, or has no drafter.",
    "off": "The router keeps speculation off for this type of task, by what was measured or by its table.",
    "pinned": "An operator's rule or router.plans says so.",
}


def why_no_drafts(plan: Plan, decision: Decision) -> str:
    """For who expected speculation and got plain decoding that was not asked for: what it means, and the way round."""
    because = _PLAIN_BECAUSE.get(decision.arm, "")
    if plan.mode is not Mode.PLAIN or not because:
        return ""
    return f"{because} The text is the same either way. To speculate all the same: --speculative, or --k N."


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
    if words := why_no_drafts(plan, decision):
        yield f"  that means: {words}"
    stats = request.speculative
    if stats.num_spec_steps:
        yield (
            f"  came of it: {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} draft tokens accepted in "
            f"{stats.num_spec_steps} rounds, {stats.mean_acceptance_length or 0:.2f} tokens a round"
        )
    yield f"  ended: {request.outcome}, {request.usage.completion_tokens} tokens in {request.timings.total_s:.2f} s"
