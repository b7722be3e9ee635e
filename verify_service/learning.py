"""The controller's state after a step: acceptance, fill and cost of drafters, and how long steps take."""

from collections.abc import Set

from paceline.step_costs import LEAST_SHARE
from verify_service.belief import DEPTHS, DrafterTrack, Track, View, looked_at, timed, unasked, waited_for
from verify_service.facts import State, StepFacts
from verify_service.prices import Model

_MOST_DRAFTERS = 64
"""Of which something is remembered."""


def learn(model: Model, state: State, facts: StepFacts) -> State:
    """The state with the step's news in it; its tracks of this step's rows are new ones, which the caller may change."""
    tracks = dict(state.tracks)
    drafters: dict[str, DrafterTrack] = dict(state.drafters)
    views: dict[str, View] = {}
    deepest: dict[str, int] = {}
    anybody = False
    for row in facts.rows:
        name = row.drafter
        if not name:
            continue
        known = tracks.get(row.id)
        track = known.copy() if known is not None else Track(name, prior=row.prior)
        if not row.finished:
            tracks[row.id] = track
        elif known is not None:
            del tracks[row.id]
        if name not in views:
            # Taken out and put behind all others again: the first ones are the longest unused.
            known_drafter = drafters.pop(name, None)
            views[name] = View(DrafterTrack()) if known_drafter is None else state.view(name)
            drafters[name] = views[name].drafter.copy()
        asked = row.asked
        if asked > 0:
            anybody = True
            if asked > deepest.get(name, 0):
                deepest[name] = asked
            waited_for(
                track, drafters[name], views[name], asked, row.proposed, row.drafted, row.agreed, row.prior
            )
        if row.look is not None:
            wanted = min(row.k_max, DEPTHS)
            looked_at(track, drafters[name], views[name], row.look, wanted, row.prior)
    if len(drafters) > _MOST_DRAFTERS:
        _forget_unused(drafters, {track.drafter for track in tracks.values()} | views.keys())
    quiet_gap_s = state.quiet_gap_s
    if facts.gap_s >= 0.0:
        for name, depth in deepest.items():
            timed(drafters[name], max(facts.gap_s - quiet_gap_s, 0.0), facts.draft_s, depth)
        for name in drafters.keys() & views.keys() - deepest.keys():
            unasked(drafters[name])
        if not anybody:
            quiet_gap_s += 0.1 * (min(facts.gap_s, 3.0 * quiet_gap_s + 1e-4) - quiet_gap_s)
    pace, regions = _paced(model, state, facts)
    accept_row_s = state.accept_row_s
    logits = facts.num_rows - facts.prompt_rows
    if logits > 0:
        limit = 3.0 * accept_row_s + 2e-5
        accept_row_s += 0.1 * (min(facts.accept_s / logits, limit) - accept_row_s)
    context = state.context + 0.2 * (facts.context - state.context)
    return State(
        tracks,
        drafters,
        pace,
        regions,
        accept_row_s,
        quiet_gap_s,
        context,
        rate=0.0,
        found_gain=state.found_gain,
    )


def _forget_unused(drafters: dict[str, DrafterTrack], used: Set[str]) -> None:
    """Whoever asks names drafters; those that nobody asks for any more are dropped, the longest unused first."""
    unused = [name for name in drafters if name not in used]
    for name in unused[: len(drafters) - _MOST_DRAFTERS]:
        del drafters[name]


def _paced(model: Model, state: State, facts: StepFacts) -> tuple[float, tuple[float, ...]]:
    """How much slower than the table steps are now: all of them quickly, those of this size slowly."""
    if facts.forward_s <= 0.0 or not facts.num_sequences or facts.prompt_rows:
        return state.pace, state.regions  # prompt rows have another price: most of them go without the head
    curve = model.curve(facts.num_sequences, facts.num_rows)
    extra = facts.num_rows - facts.num_sequences
    region = model.regions(facts.num_sequences)[extra]
    table = model.table
    beyond = facts.context - table.context
    more_s = beyond * (facts.num_rows * table.row_key_s + facts.num_sequences * table.sequence_key_s)
    told_s = max(curve[extra] + more_s, LEAST_SHARE * curve[extra])
    if told_s <= 0.0:
        return state.pace, state.regions
    off = facts.forward_s / (told_s * state.pace * state.regions[region])
    off = min(max(off, 0.5), 2.0) - 1.0
    pace = min(max(state.pace * (1.0 + 0.1 * off), 0.02), 50.0)
    factors = list(state.regions)
    factors[region] = min(max(factors[region] * (1.0 + 0.03 * off), 0.6), 1.7)
    return pace, tuple(factors)
