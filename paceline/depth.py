"""Why a round drafted as many tokens as it did, in few words, from the figures in its record."""

from paceline.types import DepthReason, RoundRecord

_WHY = {
    DepthReason.PLAIN: "the plan is plain",
    DepthReason.FIXED: "k is fixed by the request",
    DepthReason.ALL: "all that the plan allows pays",
    DepthReason.COST: "one more row does not pay",
    DepthReason.TAIL: "one more row would hold up plain rows",
    DepthReason.ASKING: "asking the drafter costs more than its guesses are worth",
    DepthReason.SUSPENDED: "nothing was accepted for several rounds; the drafter is tried now and then",
    DepthReason.DWELL: "switched a moment ago",
    DepthReason.ROOM: "the request has room for so many",
    DepthReason.LOOKED_UP: "looked up beside the target",
    DepthReason.NOT_FOUND: "nothing to look up",
}


def why_so_deep(record: RoundRecord, k_max: int) -> str:
    """For example ``asked 2 of 4: 1.31 expected tokens; one more row does not pay: 0.9 ms for 0.4 ms worth``."""
    why = _WHY.get(record.depth_reason, "")
    if not why:
        return ""
    expected = (
        f"{record.expected_tokens:.2f} expected tokens; " if record.asked and record.expected_tokens else ""
    )
    price = ""
    # Where the row alone looks cheap something else decided (drafting, rows further on): the figures would contradict.
    dear = record.depth_reason is DepthReason.COST and record.next_cost_s > record.next_worth_s
    if dear or (record.depth_reason is DepthReason.TAIL and record.next_cost_s):
        price = f": {1e3 * record.next_cost_s:.1f} ms for {1e3 * record.next_worth_s:.1f} ms worth"
    return f"asked {record.asked} of {k_max}: {expected}{why}{price}"
