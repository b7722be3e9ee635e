"""A plan as a table of 80 columns, with bars, and as a picture."""

import textwrap
from collections.abc import Iterator

from cluster.words import counted
from gates.plan import Plan, Scenario
from gates.svg import lines as drawn_lines
from paceline.step_costs import CostTable

WIDTH = 80
_BAR = 24


def plan_lines(plan: Plan) -> Iterator[str]:
    """Line by line."""
    yield from _assumed(plan.scenario)
    yield ""
    yield "  k  tokens   round  ms for   speed    gain  break-   drafting ahead"
    yield "     a round     ms a token  x plain  of k    even    speed  level"
    for depth in plan.depths:
        even = "never" if depth.break_even is None else f"{depth.break_even:.3f}" if depth.k else "-"
        ahead = f"{depth.ahead_speed:.2f}" if depth.k and not plan.scenario.shared else "-"
        level = f"{depth.ahead_level}" + (f", F={depth.ahead_fan}" if depth.ahead_fan else "")
        yield (
            f"{depth.k:>3}  {depth.tokens:>6.3f} {1e3 * depth.round_s:>7.1f} {1e3 * depth.token_s:>7.1f} "
            f"{depth.speed:>8.2f} {depth.gain:>+7.2f}  {even:>6}   {ahead:>5}  {level if ahead != '-' else ''}"
            f"{'  <- best' if depth.k == plan.best_k else ''}".rstrip()
        )
    yield ""
    yield from _bars(plan)
    yield ""
    for line in _conclusion(plan):
        yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ")


def _assumed(scenario: Scenario) -> Iterator[str]:
    rates = ", ".join(f"{rate:.2f}" for rate in scenario.acceptance[:8])
    by = "by position " if len(scenario.acceptance) > 1 else ""
    yield f"Acceptance {by}{rates}; {counted(scenario.sequences, 'sequence')}" + (
        f" of {scenario.context:,} tokens" if scenario.context else ""
    )
    block = "a block" if scenario.one_pass else "a token"
    yield (
        f"Draft {1e3 * scenario.draft_s(1, scenario.sequences):.1f} ms {block}, plain step {1e3 * scenario.plain_s:.1f} ms, "
        f"round trip {1e3 * scenario.rtt_s:g} ms" + (", on one device" if scenario.shared else "")
    )
    if isinstance(scenario.verify, CostTable):
        yield f"Steps: measured, {scenario.verify.origin}"


def _bars(plan: Plan) -> Iterator[str]:
    most = max(1.0, *(depth.speed for depth in plan.depths))
    one = round(_BAR / most)
    yield "speed over plain decoding (| is plain)"
    for depth in plan.depths[1:]:
        bar = "#" * round(_BAR * depth.speed / most)
        marked = bar.ljust(one)[: one - 1] + "|" + bar[one:] if one else bar
        yield f"  k={depth.k:<2} {marked:<{_BAR + 1}} {depth.speed:.2f}"


def _conclusion(plan: Plan) -> Iterator[str]:
    best, scenario = plan.best, plan.scenario
    if best.k:
        yield (
            f"Best: k = {best.k}, {best.speed:.2f} x plain decoding, {1e3 * best.token_s:.1f} ms a token; breaks even "
            f"at acceptance {best.break_even:.3f}."
        )
    else:
        yield "Best: plain decoding. No k pays at this acceptance, cost and load."
    if not scenario.shared and plan.best_ahead_k:
        ahead = plan.depths[plan.best_ahead_k]
        yield f"Drafting ahead (a device of its own for the drafter): k = {ahead.k}, {ahead.ahead_speed:.2f} x plain."
        yield from _levels(plan)
    yield "At a round trip of: " + "; ".join(
        f"{1e3 * one.rtt_s:g} ms {one.speed:.2f} x"
        + ("" if scenario.shared else f" (ahead {one.ahead_speed:.2f})")
        for one in plan.distances
    )
    if plan.cost_plain is not None and plan.cost_speculative is not None:
        yield (
            f"Cost of 1,000 tokens at this load: {plan.cost_plain:.3g} plain, {plan.cost_speculative:.3g} with "
            f"k = {best.k}."
        )
    capacity = plan.capacity
    if capacity is None:
        return
    yield (
        f"Sequences of {capacity.tokens:,} tokens that fit into 95 % of the device: {capacity.sequences_before} -> "
        f"{capacity.sequences_after} with the drafter."
    )
    priced = (
        ""
        if capacity.cost_before is None or capacity.cost_after is None
        else f"; 1,000 tokens cost {capacity.cost_before:.3g} -> {capacity.cost_after:.3g}"
    )
    yield (
        f"With the device full: {capacity.tokens_s_before:,.0f} -> {capacity.tokens_s_after:,.0f} tokens/s "
        f"(k = {capacity.k_after}){priced}."
    )


def _levels(plan: Plan) -> Iterator[str]:
    """What the levels in the table mean, and where they end."""
    scenario, drafted = plan.scenario, plan.depths[1:]
    used = {depth.ahead_level for depth in drafted}
    if 1 in used:
        yield "Level 1: while the target verifies, the drafter goes on as if all were accepted."
    if 2 in used:
        yield (
            "Level 2: while the target verifies, the drafter goes on from the F likeliest outcomes at every accepted "
            "length, in one batch."
        )
    if 0 in used:
        first = next(depth.k for depth in drafted if not depth.ahead_level)
        since = 1 + max((depth.k for depth in drafted if depth.ahead_level), default=0)
        where = f"from k = {since} on" if since == first else "elsewhere"
        step_s = scenario.step_s(scenario.sequences * (first + 1)) + scenario.rtt_s
        block_s = (1 if scenario.one_pass else first) * scenario.draft_s(1, scenario.sequences)
        yield f"Level 0, {where}: the drafter waits for the verdict." + (
            f" A block of {first} would take it at least {1e3 * block_s:.0f} ms, a step hides {1e3 * step_s:.0f}."
            if block_s > step_s
            else " Nothing that goes ahead is faster there."
        )


def plan_picture(plan: Plan) -> str:
    """Speed over k as SVG, waiting for the verdict and drafting ahead."""
    series = {"waiting for the verdict": [(float(d.k), d.speed) for d in plan.depths]}
    if not plan.scenario.shared:
        series["drafting ahead"] = [(float(d.k), d.ahead_speed) for d in plan.depths]
    rates = ", ".join(f"{rate:.2f}" for rate in plan.scenario.acceptance[:4])
    return drawn_lines(
        series,
        title=f"Speed over plain decoding, acceptance {rates}, {counted(plan.scenario.sequences, 'sequence')}",
        x_label="draft tokens a round, k",
        y_label="times plain decoding",
        mark=1.0,
        mark_label="plain",
    )
