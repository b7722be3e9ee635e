"""The controller as a pure function: worlds are scripted, time is virtual."""

import itertools
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.types import AcceptancePrior, DepthReason
from verify_service.allocation import TAIL
from verify_service.belief import ZERO_ROUNDS, DrafterTrack, Look, Track, View
from verify_service.controller import decide
from verify_service.costs import table_of
from verify_service.facts import Decision, Ready, RowFact, State, StepFacts
from verify_service.prices import Model
from verify_service.trimming import trim

sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmarks import regret, worlds

DEAR = table_of([(1, r, (6.0 + 1.0 * (r - 1)) / 1e3) for r in (1, 2, 5, 9, 17)])
FLAT = table_of([(1, 1, 0.02), (1, 17, 0.0201), (8, 8, 0.02), (8, 136, 0.0201)])


def row(
    id_: int = 1,
    *,
    k_max: int = 4,
    room: int = 100,
    fixed: bool = False,
    asked: int = 0,
    proposed: int = -1,
    drafted: int = 0,
    agreed: int = 0,
    look: Look | None = None,
    prior: AcceptancePrior | None = None,
    finished: bool = False,
    drafter: str = "d",
    found: tuple[float, ...] | None = None,
    alone: bool = False,
    looked: bool = False,
    unread: int = 0,
) -> RowFact:
    return RowFact(
        id_, drafter, k_max, room, fixed, asked, proposed, drafted, agreed, look, prior, finished, found, alone,
        looked, unread,
    )  # fmt: skip


def facts(*rows: RowFact, gap_s: float = 0.0005, running: int = 0, plain: int = 0) -> StepFacts:
    count = len(rows)
    num_rows = count + sum(one.drafted for one in rows)
    return StepFacts(0, rows, count, num_rows, 0, 256.0, 0.0, 0.0, gap_s, 0.0002, running or count, plain)


class Run:
    """One controller with its state."""

    def __init__(self, table=DEAR) -> None:
        self.model, self.state = Model(table), State()

    def step(self, *rows: RowFact, **more) -> dict[int, Decision]:
        self.state, decisions = decide(self.model, self.state, facts(*rows, **more))
        return decisions

    def rounds(self, count: int, agreed: int, k: int = 4) -> Decision:
        """``count`` rounds whose block of ``k`` has so many right."""
        decision = self.step(row())[1]
        for _ in range(count):
            if decision.wait:
                drafted = min(decision.k, k)
                fact = row(asked=decision.k, proposed=drafted, drafted=drafted, agreed=min(agreed, drafted))
            else:
                look = Look(k, 1, min(agreed, 1)) if decision.k else None
                fact = row(look=look)
            decision = self.step(fact)[1]
        return decision


def test_what_is_accepted_is_drafted_and_what_is_not_is_not() -> None:
    """All right: as deep as the plan allows. Never right: nothing, within a few rounds."""
    assert Run().rounds(20, agreed=4).k == 4
    never = Run()
    decision = never.rounds(10, agreed=0)
    assert not decision.wait
    assert decision.reason in {DepthReason.COST, DepthReason.ASKING, DepthReason.SUSPENDED}


def test_free_rows_are_taken_and_dear_ones_are_not() -> None:
    """The same acceptance, another cost table, another depth."""
    cheap, dear = Run(FLAT).rounds(40, agreed=1), Run(DEAR).rounds(40, agreed=1)
    assert cheap.k > dear.k


def test_eight_rounds_without_a_token_suspend_and_a_guess_that_came_true_ends_it() -> None:
    """Half open: the drafter is looked at more and more rarely, and is back soon after it is right again."""
    run = Run(FLAT)  # so cheap that only the suspension stops it
    decision, waited = run.step(row())[1], 0
    while decision.wait:
        waited += 1
        fact = row(asked=decision.k, proposed=decision.k, drafted=decision.k, agreed=0)
        decision = run.step(fact)[1]
        assert waited <= ZERO_ROUNDS
    looks = []
    for index in range(120):
        look = Look(4, 1, 0) if decision.k else None
        decision = run.step(row(look=look))[1]
        assert not decision.wait
        if decision.k:
            looks.append(index)
    gaps = [b - a for a, b in itertools.pairwise(looks)]
    assert 1 < len(looks) < 40
    assert gaps[-1] >= gaps[0]
    rounds = 0
    while not decision.wait:
        decision = run.step(row(look=Look(4, 1, 1) if decision.k else None))[1]
        rounds += 1
        assert rounds < 40


def test_a_drafter_that_reads_long_before_it_guesses_is_looked_at_rarely() -> None:
    """Beside look-ups, on the target's own cores: what reading a prompt took in one sequence keeps others from asking for it."""

    def rounds_until_look(run: Run, id_: int, unread: int, most: int = 400) -> int:
        for count in range(most):
            decision = run.step(row(id_, found=(0.4,), looked=True, unread=unread))[id_]
            if decision.k:
                return count
        return most

    run = Run()
    assert rounds_until_look(run, 1, 900) < 20  # nothing is known yet
    run.step(row(1, found=(0.4,), looked=True, look=Look(4, 4, 0, 900, 0.12), unread=4))
    assert rounds_until_look(run, 1, 4) < 40  # it is read by now: such looks cost a guess
    assert rounds_until_look(run, 2, 900) == 400
    assert rounds_until_look(run, 3, 20) < 60


def test_a_drafter_with_nothing_to_say_is_not_asked_every_round() -> None:
    """An empty answer costs the time of asking: after some the sequence goes on plainly, and looks now and then."""
    run = Run()
    decision = run.step(row())[1]
    waited = 0
    for _ in range(100):
        if decision.wait:
            waited += 1
            fact = row(asked=decision.k, proposed=0)
        else:
            fact = row(look=Look(0, 0, 0) if decision.k else None)
        decision = run.step(fact, gap_s=0.001 if decision.wait else 0.0002)[1]
    assert waited < 12
    assert decision.reason is DepthReason.ASKING


def test_plain_rows_bound_the_step() -> None:
    """The tail guard: with a plain row beside it, a step takes at most 1.10 times the plain one."""
    run = Run()
    decision = run.step(row(), row(2, drafter=""), running=2, plain=1)
    for _ in range(30):
        k = decision[1].k if decision[1].wait else 0
        fact = row(asked=k, proposed=k, drafted=k, agreed=k)
        decision = run.step(fact, row(2, drafter=""), running=2, plain=1)
        if decision[1].wait:
            times = run.model.times(run.state, 2, 10)
            assert times[decision[1].k] <= TAIL * times[0]
    assert decision[2].reason is DepthReason.PLAIN
    ready = [Ready(1, 4, fixed=False)]
    (k, reason) = trim(run.model, run.state, ready, 2, 0, num_plain=1)[1]
    assert k < 4
    assert reason is DepthReason.TAIL
    assert trim(run.model, run.state, ready, 2, 0, num_plain=0)[1][0] > k


def test_a_prompt_bounds_the_step() -> None:
    """A first token waits for the steps that read its prompt: draft rows beside them make them a tenth longer, at most."""
    run = Run()
    run.rounds(40, agreed=4)
    ready = [Ready(1, 8, fixed=False)]
    assert trim(run.model, run.state, ready, 1, 0, num_plain=0)[1] == (8, None)
    for prompt_rows in (4, 30):
        k, reason = trim(run.model, run.state, ready, 1, prompt_rows, num_plain=0)[1]
        times = run.model.times(run.state, 1, 1 + prompt_rows + 8)
        assert times[prompt_rows + k] <= TAIL * times[prompt_rows] < times[prompt_rows + k + 1]
        assert reason is DepthReason.TAIL


def test_a_fixed_depth_is_kept_whatever_happens() -> None:
    """A request that names k gets it, cut by nothing but its room."""
    run = Run()
    for _ in range(30):
        decision = run.step(row(fixed=True, asked=4, proposed=4, drafted=4, agreed=0))[1]
        assert (decision.k, decision.wait, decision.reason) == (4, True, DepthReason.FIXED)
    assert trim(run.model, run.state, [Ready(1, 4, fixed=True)], 1, 0, 0) == {1: (4, None)}
    decision = run.step(row(fixed=True, room=2))[1]
    assert (decision.k, decision.reason) == (2, DepthReason.ROOM)


def test_what_was_looked_up_is_not_asked_for_again() -> None:
    """Nobody is waited for where something good was found, nor where there is nobody else; a cascade's model otherwise."""
    run = Run(FLAT)
    found = run.step(row(found=(0.9, 0.8)), row(2, found=(), alone=True), row(3, found=()))
    assert (found[1].wait, found[1].reason) == (False, DepthReason.LOOKED_UP)
    assert found[1].expected_tokens == pytest.approx(2.7)
    assert (found[2].k, found[2].reason) == (0, DepthReason.NOT_FOUND)
    assert found[3].wait


def test_a_model_that_promises_more_than_the_look_up_is_asked() -> None:
    """A weak guess from look-up does not stand in the way of a good model; a suspended one is not asked for it."""
    run = Run(FLAT)
    run.rounds(40, agreed=4)
    assert run.step(row(found=(0.1,)))[1].wait
    assert not run.step(row(found=(0.1,), alone=True))[1].wait
    bad = Run(FLAT)
    bad.rounds(40, agreed=0)
    assert not bad.step(row(found=(0.1,)))[1].wait


def test_a_drafter_that_is_not_asked_is_looked_at_now_and_then() -> None:
    """While look-ups win, the model's guesses are compared with what is committed, without anybody waiting."""
    run = Run(FLAT)
    decisions = [run.step(row(found=(0.9, 0.9, 0.9, 0.9)))[1] for _ in range(60)]
    assert not any(one.wait for one in decisions)
    assert 1 <= sum(one.k > 0 for one in decisions) <= 30


def test_look_ups_that_gain_nothing_become_rare_and_a_strong_guess_brings_them_back() -> None:
    """Guesses that are cut or wrong round after round: one round in four is looked up, then in eight, then in sixteen."""
    run, rests, looked = Run(DEAR), [], True
    for _ in range(1200):
        found = (0.1,) if looked else None
        decision = run.step(row(found=found, alone=True, looked=looked, drafted=1 if looked else 0))[1]
        rests.append(decision.rest)
        looked = not decision.rest
    assert not any(rests[:31])
    assert 0.5 < sum(rests[40:120]) / 80 < 0.9
    assert sum(rests[-160:]) == 150
    assert not run.step(row(found=(0.9, 0.8), alone=True, looked=True))[1].rest
    assert not run.step(row(found=(0.1,), alone=True, looked=True, drafted=2, agreed=2))[1].rest


def test_look_ups_that_pay_never_rest() -> None:
    """Half of the rounds find something that is right."""
    run = Run(DEAR)
    for at in range(400):
        right = at % 2
        told = row(found=(0.5, 0.4), alone=True, looked=True, drafted=2 * right, agreed=2 * right)
        assert not run.step(told)[1].rest


def test_a_block_that_says_how_likely_it_is_is_cut_by_that() -> None:
    """Dear rows: the likely guesses stay, the unlikely ones go; what sequences did before counts for nothing."""
    run = Run(DEAR)
    run.step(row(found=(0.95, 0.9, 0.05, 0.01), alone=True))
    ready = [Ready(1, 4, False, (0.95, 0.9, 0.05, 0.01))]
    kept = trim(run.model, run.state, ready, 1, 0, 0)
    assert kept[1] == (2, DepthReason.COST)


def test_the_plans_prior_decides_the_first_round() -> None:
    """Before anything is seen the ledger's word counts, by position where it is given."""
    good, bad = AcceptancePrior(0.9, 8.0), AcceptancePrior(0.05, 8.0)
    assert Run().step(row(prior=good))[1].k == 4
    assert not Run().step(row(prior=bad))[1].wait
    survival = View(DrafterTrack()).survival(Track("d"), AcceptancePrior(0.5, 8.0, (0.9, 0.5, 0.1)), 3)
    assert survival == pytest.approx([0.9, 0.45, 0.045], rel=0.01)


def test_survival_never_rises_along_a_block() -> None:
    """Position j needs all before it."""
    run = Run()
    run.rounds(30, agreed=2)
    survival = View(run.state.drafters["d"]).survival(run.state.tracks[1], None, 8)
    assert all(a >= b for a, b in itertools.pairwise(survival))


def test_nothing_is_remembered_of_a_sequence_that_ended() -> None:
    """The state does not grow."""
    run = Run()
    for number in range(50):
        run.step(row(number))
        assert run.step(row(number, asked=4, proposed=4, drafted=4, agreed=2, finished=True)) == {}
    assert run.state.tracks == {}


def test_steps_that_take_longer_than_the_table_says_are_believed() -> None:
    """Rows three times as dear as measured: the correction finds it, within its bounds."""
    run = Run()
    for _ in range(300):
        for rows, step_s in ((1, 0.006), (5, 0.016)):
            fact = facts(row())._replace(num_rows=rows, num_sequences=1, forward_s=step_s)
            run.state, _ = decide(run.model, run.state, fact)
    times = run.model.times(run.state, 1, 6)
    assert times[0] == pytest.approx(0.006, rel=0.05)
    assert times[4] == pytest.approx(0.016, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6))
def test_any_facts_give_depths_within_bounds(seed: int, count: int) -> None:
    """Whatever a step reports, depths lie between 0 and the bound, and the same facts decide the same again."""
    rng = random.Random(seed)
    first, second = Run(rng.choice([DEAR, FLAT, None])), None
    dear_s = rng.choice([0.002, 1e9, 1e308])
    second = Run(first.model.table)
    for _ in range(25):
        rows = []
        for id_ in rng.sample(range(8), count):
            k_max = rng.randrange(1, 9)
            proposed = rng.randrange(-1, k_max + 1)
            drafted = rng.randrange(max(proposed, 0) + 1)
            rows.append(
                row(
                    id_,
                    k_max=k_max,
                    room=rng.randrange(20),
                    fixed=rng.random() < 0.2,
                    asked=k_max if proposed >= 0 else rng.randrange(2),
                    proposed=proposed,
                    drafted=drafted,
                    agreed=rng.randrange(drafted + 1),
                    look=rng.choice(
                        [None, Look(0, 0, 0), Look(3, 1, 1, 400, 0.03), Look(3, 2, 0, 5, dear_s)]
                    ),
                    prior=rng.choice([None, AcceptancePrior(rng.random(), rng.uniform(0, 50))]),
                    finished=rng.random() < 0.1,
                    drafter=rng.choice(["", "d", "e"]),
                )
            )
        fact = facts(*rows, gap_s=rng.choice([-1.0, 0.0, 0.001, 3.0]))._replace(
            forward_s=rng.choice([0.0, 0.01, 5.0]), accept_s=rng.random(), draft_s=rng.random()
        )
        first.state, decisions = decide(first.model, first.state, fact)
        second.state, again = decide(second.model, second.state, fact)
        assert decisions == again
        assert first.state == second.state
        for one in rows:
            if one.finished:
                assert one.id not in decisions
            else:
                assert 0 <= decisions[one.id].k <= min(one.k_max, one.room)
        ready = [Ready(one.id, one.proposed, one.fixed) for one in rows if one.proposed > 0]
        kept = trim(first.model, first.state, ready, count, rng.choice([0, 20]), rng.randrange(2))
        assert all(0 <= kept[one.id][0] <= one.length for one in ready)


def test_one_slow_look_does_not_hide_a_drafter() -> None:
    """The first answer of a drafter has much to load: a second of it does not make the next hundred looks dear."""
    run = Run()
    run.step(row())
    run.step(row(look=Look(2, 2, 1, 5, 1.0), unread=5))
    assert run.state.drafters["d"].look_s <= 0.02
    run.step(row(look=Look(2, 2, 1, 500, 60.0), unread=5))
    assert run.state.drafters["d"].read_s <= 0.01


def test_no_step_is_free_however_short_the_context() -> None:
    """What looking back costs is measured beside others, and may come out above all of a step: a step then still takes time."""
    table = table_of([(1, 1, 0.004), (1, 5, 0.006), (32, 32, 0.04)], sequence_key_s=2e-5, row_key_s=1e-5)
    state = State(context=1.0)
    for sequences in (1, 2, 32):
        times = Model(table).times(state, sequences, sequences + 8)
        assert min(times) > 0
        for _ in range(3):
            fact = facts(row())._replace(
                context=1.0, num_sequences=sequences, num_rows=sequences, forward_s=0.003
            )
            state, decisions = decide(Model(table), state, fact)
            assert decisions[1].expected_tokens >= 1


@pytest.mark.parametrize(
    "name", ["one stream, a=.9", "nothing is ever right", "drift .85, .1", "task mix drifts", "load 1, 32, 1"]
)
def test_regret_is_small(name: str) -> None:
    """Near the oracle that knows all chances, and not behind the best static depth; shorter than the benchmark's run."""
    world = next(world for world in worlds.worlds(0.4) if world.name == name)
    found = regret.compare(world)
    assert found["vs_oracle"] > 0.93
    assert found["vs_static"] > 0.97
    assert found["vs_plain"] > 0.98


def test_what_is_known_of_drafters_that_nobody_asks_for_is_forgotten() -> None:
    """A plan may name any: of so many the longest unused ones go, never one of an open sequence."""
    run = Run()
    run.step(row(1, drafter="open"), row(2, drafter="first"))
    run.step(row(2, drafter="first", finished=True))
    for number in range(200):
        run.step(row(10 + number, drafter=f"made up {number}"))
        run.step(row(10 + number, drafter=f"made up {number}", finished=True))
    names = list(run.state.drafters)
    assert len(names) == 64
    assert "open" in names
    assert "first" not in names
    assert names[-1] == "made up 199"
    assert run.step(row(1, drafter="open"))[1].reason is not DepthReason.UNSAID
    many = Run()
    many.step(*(row(number, drafter=str(number)) for number in range(100)))
    many.step(*(row(number, drafter=str(number)) for number in range(100)))
    assert len(many.state.drafters) == 100, "all of them are in use"
