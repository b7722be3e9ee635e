"""Plans against figures known beforehand, and as they are printed and drawn."""

import json

import pytest
from planted import planted
from typer.testing import CliRunner

from cluster.cli import app
from cluster.plan_words import plan_lines, plan_picture
from gates.capacity import Memory
from gates.plan import Scenario, plan
from paceline.simulation import DeviceCost
from router.ledger.book import Cell
from router.ledger.store import Store

VERIFY, DRAFT = DeviceCost(0.028, 64, 0.0), DeviceCost(0.006, 64, 0.0)


def test_the_pair_of_the_design():
    """Draft 6 ms, verify 28 ms, acceptance 0.8: k = 4 is best, and breaks even at 0.474."""
    answer = plan(Scenario((0.8,), VERIFY, DRAFT))
    assert answer.best_k == 4
    assert answer.best.round_s == pytest.approx(0.052)
    assert answer.best.speed == pytest.approx(3.3616 * 28 / 52)
    assert answer.best.break_even == pytest.approx(0.4743, abs=1e-3)
    assert answer.depths[8].tokens == pytest.approx(4.3289, abs=5e-5)
    assert sum(depth.gain for depth in answer.depths[1:5]) == pytest.approx(answer.best.speed - 1)


def test_a_weak_drafter_is_left_out():
    """At 0.3 no k pays: plain decoding is the answer, also in words."""
    answer = plan(Scenario((0.15,), VERIFY, DRAFT))
    assert answer.best_k == 0
    assert any("Best: plain decoding" in line for line in plan_lines(answer))


def test_load_makes_the_best_k_smaller():
    """Rows beyond the free ones cost: 32 sequences leave room for fewer draft tokens than one."""
    verify = DeviceCost(0.028, 64, 0.0004)
    alone, loaded = (plan(Scenario((0.8,), verify, DRAFT, sequences=n)) for n in (1, 32))
    assert loaded.best_k < alone.best_k
    assert loaded.best.speed < alone.best.speed


def test_acceptance_by_position_falls_faster():
    """The same first position, worse behind it: fewer tokens, a smaller k."""
    even, falling = (plan(Scenario(rates, VERIFY, DRAFT)) for rates in ((0.8,), (0.8, 0.6, 0.4)))
    assert falling.depths[2].tokens == pytest.approx(1 + 0.8 + 0.8 * 0.6)
    assert falling.best_k < even.best_k


def test_a_round_trip_costs_and_drafting_ahead_hides_the_draft():
    """On a device of its own a drafter works while the target does; a shared one cannot."""
    near, far = (plan(Scenario((0.8,), VERIFY, DRAFT, rtt_s=rtt_s)) for rtt_s in (0.0, 0.02))
    assert far.best.speed < near.best.speed
    assert near.depths[near.best_ahead_k].ahead_speed > 1.5 * near.best.speed
    shared = plan(Scenario((0.8,), VERIFY, DRAFT, shared=True))
    assert all(depth.ahead_speed == pytest.approx(depth.speed) for depth in shared.depths)


def test_drafting_ahead_is_not_chosen_for_a_rounding_error():
    """With a draft that costs nothing there is nothing to hide, at any k."""
    free = plan(Scenario((0.8,), VERIFY, DeviceCost(0.0, 64, 0.0)))
    assert {depth.ahead_level for depth in free.depths} == {0}


def test_capacity_lost_to_the_drafter_is_priced():
    """58 sequences become 50; the full device says what that costs in tokens a second and in money."""
    memory = Memory(80e9, 16e9, 500e3, 2e9, 60e3)
    scenario = Scenario((0.8,), VERIFY, DRAFT, sequences=8, context=2068, memory=memory, price_per_hour=3.6)
    capacity = plan(scenario).capacity
    assert capacity is not None
    assert (capacity.sequences_before, capacity.sequences_after) == (58, 50)
    assert capacity.cost_before == pytest.approx(1.0 / capacity.tokens_s_before)
    assert capacity.tokens_s_before == pytest.approx(58 / 0.028)


def test_the_command_prints_80_columns_draws_and_speaks_json(tmp_path):
    """The table, a picture that is XML, one line of JSON."""
    arguments = ["plan", "-a", "0.8", "--draft-ms", "6", "--verify-ms", "28", "--price", "2"]
    memory = ["--device-gb", "24", "--context", "2048", "--target-gb", "16", "--target-kv-kb", "50"]
    picture = tmp_path / "plan.svg"
    done = CliRunner().invoke(app, [*arguments, *memory, "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert "Best: k = 4, 1.81 x plain decoding" in done.output
    assert picture.read_text().startswith("<svg")
    told = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert told["best_k"] == 4
    assert len(told["depths"]) == 9


def test_acceptance_is_taken_from_a_ledger(tmp_path):
    """By position, of one task and drafter; a task of which nothing is known is said to be so."""
    world, path = planted("healthy"), tmp_path / "ledger.sqlite"
    store = Store.opened(str(path))
    cells = {}
    for group, at, row in world.rows():
        cell = Cell(group, 3600, int(at))
        cells[cell] = cells[cell] + row if cell in cells else row
    store.write(cells.items())
    store.close()
    arguments = ["plan", "--ledger", str(path), "--draft-ms", "6", "--verify-ms", "28", "--json"]
    told = json.loads(CliRunner().invoke(app, [*arguments, "--task", "code", "--drafter", "model"]).output)
    assert told["scenario"]["acceptance"] == pytest.approx([0.8] * 4, abs=0.03)
    assert told["best_k"] == 4
    unknown = CliRunner().invoke(app, [*arguments, "--task", "poetry"])
    assert unknown.exit_code == 2
    assert "too few rounds" in unknown.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-a", "1.2"], "numbers from 0 to 1"),
        ([], "either --acceptance or --ledger"),
        (["-a", "0.8", "--task", "code"], "they need --ledger"),
        (["-a", "0.8", "--drafter", "suffix"], "they need --ledger"),
        (["--ledger", "nowhere.sqlite"], "no such file"),
        (["-a", "0.8", "--pair", "1b+8b"], "70b+1b"),
        (["-a", "0.8", "--device-gb", "24"], "--context"),
        (["-a", "0.8", "--verify-ms", "inf"], "--verify-ms inf: expected a number up to 1e+12"),
        (["-a", "0.8", "--draft-ms", "1e308", "--verify-ms", "1"], "--draft-ms 1e+308"),
        (["-a", "0.8", "--price", "inf"], "--price inf"),
    ],
)
def test_wrong_input_is_said_in_words(arguments, words):
    """Exit status 2, and what would be right."""
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code == 2
    assert words in done.output


def test_the_picture_is_well_formed():
    """It parses as XML and shows both curves."""
    from xml.etree import ElementTree as ET

    root = ET.fromstring(plan_picture(plan(Scenario((0.8, 0.7), VERIFY, DRAFT))))
    assert len(root.findall("{http://www.w3.org/2000/svg}path")) == 2
