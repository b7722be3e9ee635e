"""The compiled controller: the same decisions, cuts and states as Python's, to the last bit, whatever a step reports."""

import ctypes
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import compiled
from paceline.types import AcceptancePrior, DepthReason
from verify_service import controller, native
from verify_service.belief import DrafterTrack, Look, Track
from verify_service.costs import CostTable, table_of
from verify_service.facts import Ready, RowFact, State, StepFacts
from verify_service.native import CompiledController, native_controller
from verify_service.native_check import decides_as_python, some_facts, some_ready
from verify_service.native_state import CompiledState
from verify_service.prices import Model
from verify_service.steering import Steering

sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmarks import controller as benchmark
from benchmarks import regret
from deploy.prebuild import PACKAGES

ROOT = Path(__file__).parents[3]
SOURCE = Path(native.__file__).parent / "compiled" / "controller.cpp"
needs_compiler = pytest.mark.skipif(native_controller() is None, reason="no C++ compiler at hand")

DEAR = table_of([(1, r, (6.0 + 1.0 * (r - 1)) / 1e3) for r in (1, 2, 5, 9, 17)], row_key_s=1e-6)
FLAT = table_of([(1, 1, 0.02), (1, 17, 0.0201), (8, 8, 0.02), (8, 136, 0.0201)], sequence_key_s=2e-5)
STEEP = table_of([(2, 2, 0.004), (4, 4, 0.005), (4, 40, 0.006), (32, 32, 0.01), (32, 300, 0.03)])
ONE_POINT = CostTable(((1, ((1, 0.01),)),))
TABLES = (DEAR, FLAT, STEEP, ONE_POINT, None)

NAMES = ("d", "e", "ö", "drafter", "\U0001f600", "\ud800", "")
INF, NAN = math.inf, math.nan
ODD_REALS = (0.0, -0.0, -1.0, 1e-320, 1e9, 1e308, INF, -INF, NAN)
ODD_COUNTS = (-1, 0, 1, 16, 17, 63, 64, 65, 66, 1000, 2**31, 2**40, 2**63, -(2**63), 10**30)


def repeatable(call, *arguments):
    """What comes of it: its answer, or the kind of its failure."""
    try:
        return call(*arguments), None
    except Exception as error:
        return None, type(error)


class Both:
    """Python's controller and the compiled one, asked the same."""

    def __init__(self, table=None, state=None):
        self.models = Model(table), Model(table)
        self.state = state or State()
        self.compiled = CompiledController(native_controller())
        self.theirs = self.state

    def step(self, facts):
        """Decisions of a step, None where Python fails; both are compared."""
        before = repr(self.state)
        for model in self.models:
            # Rows beyond all bounds have a price only where some step before has listed it.
            model._curves.clear()
            model._region_lists.clear()
        own, failed = repeatable(controller.decide, self.models[0], self.state, facts)
        theirs, their_failure = repeatable(self.compiled.decide, self.models[1], self.theirs, facts)
        assert their_failure is failed
        assert repr(self.state) == before
        assert repr(plain(self.theirs)) == before
        if failed is not None:
            return None
        assert repr(list(theirs[1].items())) == repr(list(own[1].items()))
        assert repr(plain(theirs[0])) == repr(own[0])
        self.state, self.theirs = own[0], theirs[0]
        return own[1]

    def cut(self, ready, *question):
        own = repeatable(controller.trim, self.models[0], self.state, ready, *question)
        theirs = repeatable(self.compiled.trim, self.models[1], self.theirs, ready, *question)
        assert repr(theirs) == repr(own)
        return own[0]

    def forget(self, id_):
        self.state, self.theirs = self.state.without(id_), self.theirs.without(id_)
        assert repr(plain(self.theirs)) == repr(self.state)

    @property
    def is_compiled(self):
        """Whether the last step was decided by compiled code."""
        return isinstance(self.theirs, CompiledState)


def plain(state):
    return state.plain() if isinstance(state, CompiledState) else state


def any_row(rng, id_, odd, names=NAMES):
    """A row as it may be; ``odd`` is the chance that a value of it is beyond what the engine reports."""

    def count(*usual):
        return rng.choice(ODD_COUNTS) if rng.random() < odd else rng.choice(usual)

    def real(usual):
        return rng.choice(ODD_REALS) if rng.random() < odd else usual

    # Not billions, either: Python would list the prices of as many rows.
    k_max = min(count(*range(1, 17), 64), 5000)
    most = min(max(k_max, 0), 64)
    asked = count(0, most, rng.randrange(most + 1))
    proposed = count(-1, 0, most, rng.randrange(most + 1)) if asked > 0 else count(-1)
    drafted = count(max(min(proposed, 64), 0), rng.randrange(max(min(proposed, 64), 0) + 1))
    agreed = count(rng.randrange(max(min(drafted, 64), 0) + 1), 0, max(min(drafted, 64), 0))
    look = None
    if rng.random() < 0.3:
        length = count(0, 1, 2, 4, rng.randrange(65))
        checked = count(0, 1, max(min(length, 64), 0))
        look = Look(
            length,
            checked,
            count(0, max(min(checked, 64), 0)),
            count(0, 5, 64, 65, 900),
            real(rng.choice((0.0, 1e-3, 2.0))),
        )
    found = None
    if rng.random() < 0.4:
        chance = rng.random()
        found = tuple(real(chance ** (at / 2)) for at in range(count(0, 1, 2, 4, 9) % 70))
    prior = None
    if rng.random() < 0.4:
        positions = rng.choice((0, 0, 1, 3, 16, 64, 100 if odd else 5))
        prior = AcceptancePrior(
            real(rng.random()),
            real(rng.uniform(0.0, 40.0)),
            tuple(real(rng.random()) for _ in range(positions)),
        )
    return RowFact(
        id_, rng.choice(names), k_max, count(0, 1, 2, 100, 100, 5000), rng.random() < 0.1, asked, proposed, drafted, agreed, look,
        prior, rng.random() < 0.06, found, rng.random() < 0.1, found is not None and rng.random() < 0.9, count(0, 3, 700),
    )  # fmt: skip


def any_facts(rng, ids, odd, names=NAMES):
    def count(usual):
        # Not billions: Python would list the prices of as many rows.
        return rng.choice((-7, -1, 0, 3, 5000, 2.0)) if rng.random() < odd else usual

    def real(usual):
        return rng.choice(ODD_REALS) if rng.random() < odd else usual

    rows = tuple(any_row(rng, id_, odd, names) for id_ in ids)
    drafted = sum(min(max(row.drafted, 0), 64) for row in rows)
    prompt_rows = rng.choice((0, 0, 0, 30, 500))
    return StepFacts(
        rng.randrange(9), rows, count(len(rows)), count(len(rows) + drafted + prompt_rows), count(prompt_rows), real(rng.uniform(1, 3000)),
        real(rng.choice((0.0, 0.01, 0.05, 5.0))), real(rng.choice((0.0, 1e-4, 1.0))), real(rng.choice((-1.0, 0.0, 2e-4, 2e-3, 3.0))),
        real(rng.choice((0.0, 1e-3, 0.1))), count(len(rows) + rng.randrange(4)), count(rng.choice((0, 0, 1))),
    )  # fmt: skip


def any_ready(rng, facts, odd):
    found = []
    for row in facts.rows:
        length = rng.choice(ODD_COUNTS[:10]) if rng.random() < odd else rng.randrange(1, 17)
        survival = None
        if rng.random() < 0.4:
            survival = tuple(
                rng.choice(ODD_REALS) if rng.random() < odd else rng.random() ** at
                for at in range(rng.randrange(20))
            )
        found.append(Ready(row.id, length, rng.random() < 0.15, survival))
    if found and rng.random() < odd:
        found.append(rng.choice(found))
    return found


def live(both, rng, steps, count, odd, names=NAMES):
    """So many steps of so many sequences, of whom some stay out, end, are forgotten; how many steps compiled code decided."""
    ids = [rng.choice((at, at, 1000 * at - 500, at * 2**55, -at)) for at in range(count)]
    done = 0
    for _ in range(steps):
        taken = [id_ for id_ in dict.fromkeys(ids) if rng.random() < 0.8]
        if rng.random() < odd:
            taken.append(rng.choice(ids))
        facts = any_facts(rng, taken, odd, names)
        both.step(facts)
        done += both.is_compiled
        both.cut(any_ready(rng, facts, odd), len(facts.rows), rng.choice((0, 0, 20)), rng.randrange(2))
        assert both.theirs.num_idle(taken) == both.state.num_idle(taken)
        if rng.random() < 0.1:
            both.forget(rng.choice(ids))
    return done


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 20))
def test_any_usual_steps_are_decided_alike(seed, count):
    """All that an engine reports: compiled code decides it, none of it is left to Python."""
    rng = random.Random(seed)
    both = Both(rng.choice(TABLES))
    steps = 25
    assert live(both, rng, steps, count, 0.0, rng.choice((NAMES, ("d",), ("d", "")))) == steps


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 12), odd=st.sampled_from((0.002, 0.01, 0.1)))
def test_steps_that_cannot_be_are_answered_as_in_python(seed, count, odd):
    """Counts out of range, times that are no numbers, ids twice: the same answer or the same failure, and the state lives on."""
    rng = random.Random(seed)
    live(Both(rng.choice(TABLES)), rng, 20, count, odd)


@needs_compiler
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_lives_with_ways_of_their_own_are_decided_alike(seed):
    """Sequences that differ lastingly get suspended, sure, quiet: states that steps of pure chance hardly reach."""
    rng = random.Random(seed)
    both = Both(rng.choice(TABLES))
    for step in range(80):
        facts = some_facts(rng, step, 12)
        both.step(facts)
        both.cut(some_ready(rng, facts), len(facts.rows), rng.choice((0, 20)), rng.randrange(2))
    assert both.is_compiled


@needs_compiler
@pytest.mark.parametrize("beside", [False, True])
def test_a_simulated_load_is_decided_alike(beside):
    """The benchmark's streams, the controller in charge."""
    world = benchmark.world(8, 1600, beside=beside)
    calls = []
    regret.run(world, "controller", calls=calls)
    both = Both(world.table)
    for asked, facts, decisions in calls:
        if asked is not None:
            *question, cut = asked
            assert both.cut(*question) == cut
        assert both.step(facts) == decisions
        assert both.is_compiled


@needs_compiler
def test_many_sequences_and_drafters_are_decided_alike():
    """A thousand tracks, a hundred drafters in use, and hundreds that are not."""
    both, rng = Both(STEEP), random.Random(3)
    for begun in (0, 500):
        both.step(any_facts(rng, range(begun, begun + 500), 0.0, ("d", "e")))
    assert len(both.state.tracks) > 900
    both.step(any_facts(rng, range(400), 0.0, tuple(map(str, range(100)))))
    for turn in range(3):
        names = tuple(f"{turn} {number}" for number in range(60))
        both.step(any_facts(rng, range(2000, 2100), 0.0, names))
    assert len(both.state.drafters) > 64
    for id_ in range(1000):
        both.forget(id_) if id_ % 50 == 0 else None
    both.step(any_facts(rng, range(950, 1050), 0.0))
    assert both.is_compiled


@needs_compiler
@pytest.mark.parametrize(
    "rows",
    [
        (),
        (RowFact(1, "d", 4, 9, False, 0, -1, 0, 0, None, None, False), RowFact(1, "d", 4, 9, False, 0, -1, 0, 0, None, None, False)),
        (RowFact("1", "d", 4, 9, False, 0, -1, 0, 0, None, None, False),),
        (RowFact(1, "d", 4, 9, False, 0, -1, 0, 0, None, None, False, ("?",)),),
        (RowFact(1, "d", 4, 9, False, 0, -1, 0, 0, Look(2, 2, 99, 0, 0.0), None, False),),
        (RowFact(1, "d", 4, 9, False, 0, -1, 0, 0, None, AcceptancePrior(0.5, 8.0, (0.5,) * 500), False),),
        (RowFact(1, "d", 400, 900, False, 0, -1, 0, 0, None, None, False),),
        (RowFact(1, "d", 4, 9, False, 0, -1, 0, 0, None, None, False, (0.5,) * 200),),
    ],
    ids=["none", "twice", "no number", "no chances", "more right than there are", "long prior", "deep", "much found"],
)  # fmt: skip
def test_odd_rows_are_python_s(rows):
    """Each alone, between steps as they should be."""
    both = Both(DEAR)
    usual = StepFacts(
        0,
        (RowFact(1, "d", 4, 9, False, 0, -1, 0, 0, None, None, False),),
        1,
        1,
        0,
        256.0,
        0.01,
        0.0,
        2e-4,
        0.0,
        1,
        0,
    )
    both.step(usual)
    both.step(usual._replace(rows=rows))
    for row in rows:
        both.forget(row.id)
    both.step(usual)
    assert both.is_compiled


@needs_compiler
def test_a_table_that_is_none_is_python_s():
    """Without a curve nothing can be decided: Python says so, the compiled one with it."""
    for curves in (
        (),
        ((1, ()),),
        ((1, ((1, NAN),)),),
        ((1, ((1, 0.0),)),),
        ((1, ((0, 0.1),)),),
        ((2**70, ((1, 0.1),)),),
    ):
        both = Both(CostTable(curves))
        both.models[0].table, both.models[1].table = CostTable(curves), CostTable(curves)
        live(both, random.Random(1), 4, 3, 0.0)


@needs_compiler
def test_another_model_is_another_table():
    """A controller that is asked about one model and then about another one."""
    compiled_one, facts = CompiledController(native_controller()), some_facts(random.Random(2), 0, 8)
    for table in (DEAR, STEEP, DEAR):
        _, found = compiled_one.decide(Model(table), State(), facts)
        assert found == controller.decide(Model(table), State(), facts)[1]


@needs_compiler
def test_states_go_over_and_come_back():
    """Everything in them; what is no state of ours, or too large, stays Python's."""
    track = Track(
        "d", 1.5, 2.5, -0.0, 4.5, 1, [float(at) for at in range(12)], 3, True, True, 7, 2, 64, 1.25, 2.75
    )
    track.reason, track.prior = DepthReason.ROOM, AcceptancePrior(0.25, 3.0, (0.5, 0.75))
    track.judged, track.worth_s, track.every, track.turn, track.better, track.worse = 9, -1e-9, 8, 5, 2.0, 3.0
    drafter = DrafterTrack(*(float(at) for at in range(4)), exposed_s=0.5, k_time=8.0, read_s=2**-40)
    drafter.seen, drafter.wanted, drafter.fills = [0.125] * 16, [7.0] * 16, [3.0] * 9
    state = State(
        {-5: track, 2**60: Track("\ud800")}, {"d": drafter, "\ud800": DrafterTrack()}, 2.0, tuple(float(at) for at in range(30)),
        1e-5, 2e-5, 99.0, 3.0, 4.0,
    )  # fmt: skip
    library = native_controller()
    there = CompiledState.of(library, state)
    assert repr(there.plain()) == repr(state)
    assert (there.pace, there.regions, there.accept_row_s, there.context) == (
        state.pace, state.regions, state.accept_row_s, state.context,
    )  # fmt: skip
    assert Model(DEAR).times(there, 2, 9) == Model(DEAR).times(state, 2, 9)
    for wrong in (
        State({1: Track("nobody")}),
        State({2**80: Track("d")}, {"d": DrafterTrack()}),
        State({1: Track("d", mood=3)}, {"d": DrafterTrack()}),
        State({1: Track("d", every=0)}, {"d": DrafterTrack()}),
        State(regions=(1.0,)),
        State(pace="fast"),  # type: ignore[arg-type]
    ):
        assert CompiledState.of(library, wrong) is None


@needs_compiler
def test_a_state_changes_no_more():
    """Deciding from it, cutting by it, forgetting in it: it stays as it was, and decides the same again."""
    rng = random.Random(5)
    both = Both(STEEP)
    live(both, rng, 12, 9, 0.0)
    state, before = both.theirs, repr(both.theirs.plain())
    facts = any_facts(rng, range(9), 0.0)
    answers = {repr(both.compiled.decide(both.models[1], state, facts)[1]) for _ in range(3)}
    both.compiled.trim(both.models[1], state, any_ready(rng, facts, 0.0), 9, 0, 0)
    assert state.without(next(iter(both.state.tracks))) is not state
    assert state.without(987654321) is state
    assert len(answers) == 1
    assert repr(state.plain()) == before


def test_an_ended_sequence_s_last_round_changes_only_the_next_state():
    """Python's state is a value, too: its track of a sequence that ends is not learnt into."""
    model, state = Model(DEAR), State()
    row = RowFact(1, "d", 4, 9, False, 4, 4, 4, 2, None, None, False)
    facts = StepFacts(0, (row,), 1, 5, 0, 256.0, 0.01, 0.0, 2e-4, 0.0, 1, 0)
    state, _ = controller.decide(model, state, facts)
    before = repr(state)
    controller.decide(model, state, facts._replace(rows=(row._replace(finished=True),)))
    assert repr(state) == before


# --- which one serves -----------------------------------------------------------------------------------------------


@pytest.fixture
def anew():
    """Loading is done once a process: here again, and once more afterwards."""
    native_controller.cache_clear()
    yield
    native_controller.cache_clear()


@needs_compiler
def test_the_compiled_one_serves_each_engine_with_its_own(anew):
    """Where there is a compiler; what is packed is nobody else's."""
    first, second = Steering(None)._policy, Steering(None)._policy
    assert isinstance(first, CompiledController)
    assert first is not second


def test_without_a_compiler_python_serves(anew, monkeypatch, caplog):
    """Said once, whatever asks."""
    monkeypatch.setenv(compiled.DISABLE, "1")
    assert Steering(None)._policy is controller
    assert Steering(None)._policy is controller
    assert caplog.text.count("depths decided in Python") == 1


def made(tmp_path, *changes):
    """The library of a source that was changed, without optimisation."""
    for path in SOURCE.parent.iterdir():
        text = path.read_text(encoding="utf-8")
        for old, new in changes:
            text = text.replace(old, new)
        (tmp_path / path.name).write_text(text, encoding="utf-8")
    target = tmp_path / "made.so"
    options = [*(one for one in compiled._OPTIONS if one != "-O3"), "-O0"]
    subprocess.run(
        [compiled.find_compiler(), *options, str(tmp_path / SOURCE.name), "-o", str(target)], check=True
    )
    return ctypes.CDLL(str(target))


@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        ("kFoundKeep = 0.05", "kFoundKeep = 0.0500001"),
        ("if (!usual) throw Unusual();", "throw Unusual();"),
        ("step->num_decisions = made.count;", "step->num_decisions = 0;"),
    ],
    ids=["a bit off", "never able", "says nothing"],
)
def test_wrong_code_is_not_used(anew, monkeypatch, caplog, tmp_path, change):
    """Asked at load whether it decides as Python does; Python serves, and the log says so."""
    wrong = made(tmp_path, change)
    monkeypatch.setattr(native, "load_compiled", lambda _: wrong)
    assert Steering(None)._policy is controller
    assert "what was compiled is wrong" in caplog.text


@needs_compiler
def test_what_was_compiled_beforehand_serves_without_a_compiler(anew, monkeypatch, tmp_path):
    """As in an image, for which all sources of these packages are compiled."""
    assert SOURCE.relative_to(ROOT).parts[0] in PACKAGES
    monkeypatch.setattr(compiled, "_OPTIONS", tuple(one for one in compiled._OPTIONS if one != "-O3"))
    path = compiled.prebuild(SOURCE, tmp_path / "native")
    monkeypatch.setenv(compiled.PREBUILT, str(path.parent))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    assert isinstance(Steering(None)._policy, CompiledController)
    assert native_controller()._name == str(path)


@needs_compiler
def test_the_check_at_load_is_passed_through_whole():
    """Neither a step nor a cut of it is one that compiled code leaves to Python."""
    asked = []

    class Watched(CompiledController):
        def _decide(self, *arguments):
            asked.append(super()._decide(*arguments))
            return asked[-1]

        def _trim(self, *arguments):
            asked.append(super()._trim(*arguments))
            return asked[-1]

    assert decides_as_python(Watched(native_controller()))
    assert len(asked) == 32
    assert None not in asked
