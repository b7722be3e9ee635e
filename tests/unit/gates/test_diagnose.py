"""Planted troubles are named, each alone; what is healthy is left alone; two kinds of rounds are told from one."""

import json

import numpy as np
import pytest
from planted import planted, records
from typer.testing import CliRunner

from cluster.cli import app
from cluster.diagnose_words import diagnosis_lines
from gates.bimodal import FEWEST_ROUNDS, shape_of
from gates.diagnose import Trouble, diagnose
from gates.evidence import blocks_of_row, from_records, from_rows
from router.ledger.book import Cell
from router.ledger.store import Store


def seen(name, offline=None):
    world = planted(name)
    rows = list(world.rows())
    return from_rows(rows, world.holdout(), offline or {})


def troubles(evidence):
    return [finding.trouble for finding in diagnose(evidence).findings]


@pytest.mark.parametrize(
    ("name", "trouble"),
    [
        ("slow", Trouble.SLOW),
        ("tail", Trouble.TAIL),
        ("quality", Trouble.QUALITY),
        ("cost", Trouble.COST),
        ("short", Trouble.SHORT),
        ("drift", Trouble.DRIFT),
    ],
)
def test_a_planted_trouble_is_named_and_no_other(name, trouble):
    """From the ledger's sums alone."""
    assert troubles(seen(name)) == [trouble]


def test_offline_acceptance_above_online_is_named_and_not_taken_for_drift():
    """0.59 is accepted online; 0.80 offline is a trouble, 0.65 is none. What drifted was right offline."""
    assert troubles(seen("healthy", {"model": 0.80})) == [Trouble.OFFLINE]
    assert troubles(seen("healthy", {"": 0.65})) == []
    assert troubles(seen("drift", {"model": 0.70})) == [Trouble.DRIFT]


def test_repeated_phrases_are_named_from_recorded_outputs():
    """12 of 60 speculative outputs repeat a phrase that their plain twins say once."""
    assert troubles(from_records(records(repeats=True))) == [Trouble.REPEATS]


def test_outputs_that_differ_from_plain_are_a_matter_of_quality():
    """10 of 60 differ, without repeats: law or numerics."""
    found = diagnose(from_records(records(different=True))).findings
    assert [one.trouble for one in found] == [Trouble.QUALITY]
    assert "10 of 60" in found[0].evidence


@pytest.mark.parametrize(
    ("timing", "trouble", "words"),
    [
        ("time_to_first_token_s", Trouble.FIRST, "P99 of the first token is 3.00"),
        ("total_s", Trouble.SLOWEST, "P99 of the whole request is"),
    ],
)
def test_a_tail_that_failed_in_a_check_is_named_with_its_requests(timing, trouble, words):
    """One request in ten takes three times as long as its plain twin, on the mean all are faster."""
    lines = []
    for line in records():
        told = json.loads(line)
        if told["plan"]["drafter"] and int(told["key"]) % 10 == 3:
            told["timings"][timing] *= 3.0
        lines.append(json.dumps(told))
    found = diagnose(from_records(lines)).findings
    assert [one.trouble for one in found] == [trouble]
    assert words in found[0].evidence
    assert "beyond it 6 of 60, by id or line:" in found[0].evidence
    assert "13 (code, " in found[0].evidence
    assert "and 1 more" in found[0].evidence


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("usage.completion_tokens", 1e999),
        ("usage.prompt_tokens", 2**70),
        ("timings.total_s", 1e999),
        ("timings.decode_s", float("nan")),
        ("speculative.num_rounds", -(2**63) - 1),
        ("rounds", [{"batch_sequences": 1, "drafted": 4, "accepted": 2**31, "ignored": 0}]),
        ("rounds", [{"batch_sequences": 1, "drafted": 4, "accepted": -3, "ignored": 0}]),
        ("token_ids", [[]]),
        ("task_type", ["code"]),
        ("plan.drafter", 5),
    ],
)
def test_a_record_that_cannot_be_meant_is_named_by_its_line(field, value):
    """Whatever stands in it: no figure beyond counting, no picture of two billion lines."""
    told = json.loads(records()[1])
    *path, last = field.split(".")
    inner = told
    for name in path:
        inner = inner[name]
    inner[last] = value
    with pytest.raises(ValueError, match="line 2: no record of a request"):
        from_records([records()[0], json.dumps(told)])


def test_what_is_healthy_is_left_alone():
    """Sums and records."""
    assert troubles(seen("healthy")) == []
    assert troubles(from_records(records())) == []


def draw(rng, rounds, rates, k):
    found = {}
    for _ in range(rounds):
        rate, depth = rates(rng), 0
        while depth < k and rng.random() < rate(depth):
            depth += 1
        key = (depth, depth == k)
        found[key] = found.get(key, 0) + 1
    return found


def either(rng):
    """Two rounds in five accept next to nothing."""
    rate = 0.05 if rng.random() < 0.4 else 0.93
    return lambda depth: rate


def test_two_kinds_of_rounds_are_told_from_one():
    """40 histograms of 400 rounds of one kind, with even and with falling acceptance: none is called (odds of a false
    alarm 1 in 1,000 each); of two kinds 20 of 20 are. A U shape alone is no second kind: it is where blocks end."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        assert not shape_of(draw(rng, 400, lambda r: lambda depth: 0.8, 4)).bimodal
        assert not shape_of(draw(rng, 400, lambda r: lambda depth: 0.85 - 0.1 * depth, 6)).bimodal
        two = draw(rng, 400, either, 4)
        assert shape_of(two).bimodal


@pytest.mark.parametrize(("requests", "named"), [(5, []), (40, [Trouble.TAIL])])
def test_two_kinds_of_rounds_are_a_trouble_from_twelve_requests_on(requests, named):
    """Five requests that are unlike each other have rounds enough for the test, and say nothing about a task."""
    speculative = [line for line in planted("tail").rows() if line[0].drafter][:requests]
    assert sum(blocks_of_row(sum(row for _, _, row in speculative)).values()) >= FEWEST_ROUNDS
    assert troubles(from_rows(speculative, "[]", {})) == named


def test_blocks_come_back_out_of_counts_by_position():
    """The ledger's sums by position hold the histogram."""
    world = planted("healthy")
    rows = [row for group, _, row in world.rows() if group.drafter]
    blocks = blocks_of_row(sum(rows[1:], rows[0].copy()))
    assert sum(blocks.values()) == sum(int(row[5]) for row in rows)  # spec_rounds
    assert set(blocks) == {(0, False), (1, False), (2, False), (3, False), (4, True)}


def test_the_command_reads_a_ledger_beside_its_writer(tmp_path):
    """The file is locked by its writer; looking is allowed. The histogram is drawn, the trouble in capitals."""
    world, path = planted("tail"), tmp_path / "ledger.sqlite"
    store = Store.opened(str(path))
    cells = {}
    for group, at, row in world.rows():
        cell = Cell(group, 3600, int(at))
        cells[cell] = cells[cell] + row if cell in cells else row
    store.write(cells.items(), documents={"holdout": world.holdout()})
    done = CliRunner().invoke(app, ["diagnose", "--ledger", str(path)])
    assert done.exit_code == 0, done.output
    assert "THE MEAN IS FAST, THE TAIL IS SLOW (code)" in done.output
    assert "bimodal" in done.output
    assert "####" in done.output
    assert max(map(len, done.output.splitlines())) <= 80
    told = json.loads(CliRunner().invoke(app, ["diagnose", "--ledger", str(path), "--json"]).output)
    assert [one["trouble"] for one in told] == ["tail"]
    store.close()


def test_what_cannot_be_read_is_said_in_words(tmp_path):
    """A line that is no record, a file that is no ledger, neither of the two."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n')
    for arguments, words in (
        (["--records", str(path)], "line 1"),
        (["--ledger", str(path)], "is no ledger"),
        ([], "either --ledger or --records"),
    ):
        done = CliRunner().invoke(app, ["diagnose", *arguments])
        assert done.exit_code == 2
        assert words in done.output


def test_too_few_requests_are_said_not_to_be_judged():
    """Ten of each say nothing: neither a trouble nor that there is none."""
    lines = " ".join(" ".join(diagnosis_lines(diagnose(from_records(records()[:20])))).split())
    assert "None of the known troubles" not in lines
    assert "Too few requests to judge by." in lines
    assert "Not judged: code: speed, from 10 speculative and 10 plain requests where 12 of each are" in lines
    assert "acceptance, from 10 requests that drafted where 12 are needed." in lines
    assert "rounds of 10 requests" in lines
    assert "too few to say more: 60 rounds of 12 requests are needed" in lines
    assert "%" not in lines
    one = " ".join(" ".join(diagnosis_lines(diagnose(from_records(records()[:2])))).split())
    assert "acceptance, from 1 request that drafted where 12 are needed." in one
    whole = "\n".join(diagnosis_lines(diagnose(from_records(records()))))
    assert "Not judged" not in whole


def test_no_trouble_is_said_too():
    """And the accepted lengths are drawn anyway."""
    lines = list(diagnosis_lines(diagnose(seen("healthy"))))
    assert "None of the known troubles shows." in lines
    assert any("one kind of round" in line for line in lines)
