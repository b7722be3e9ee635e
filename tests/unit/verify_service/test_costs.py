"""Cost tables: measured once, kept in a file that is believed only where it can be, interpolated in between."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import ModelConfig
from paceline.engine import Runner, load_runner
from paceline.testing.tiny_models import tiny_model_dir
from verify_service import costs
from verify_service.costs import cost_key, load_or_measure, measure, read_table, table_of, write_table

torch.set_num_threads(1)
TABLE = table_of(
    [(1, 1, 10e-3), (1, 2, 11e-3), (1, 5, 14e-3), (1, 9, 24e-3), (4, 4, 20e-3), (4, 20, 60e-3)],
    context=100,
    row_key_s=1e-6,
    sequence_key_s=2e-6,
)
KEY = {"model": "m", "machine": "x"}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = tiny_model_dir(tmp_path_factory.mktemp("model"))
    return load_runner(ModelConfig(name=str(path), dtype="float32"), kv_slots=5, max_context=400)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "costs"


def test_measured_points_come_back_and_others_lie_between() -> None:
    """Linear in rows and in sequences; beyond the last point the steepness goes on."""
    assert TABLE.step_s(5, 1) == pytest.approx(14e-3)
    assert TABLE.step_s(3, 1) == pytest.approx(12e-3)
    assert TABLE.step_s(13, 1) == pytest.approx(34e-3)
    assert TABLE.step_s(4, 4) == pytest.approx(20e-3)
    assert TABLE.step_s(24, 4) == pytest.approx(70e-3)
    assert TABLE.step_s(8, 8) == pytest.approx(30e-3)
    assert 10e-3 < TABLE.step_s(2, 2) < 20e-3


def test_longer_contexts_cost_more() -> None:
    """By the row and by the sequence."""
    assert TABLE.step_s(5, 1, 1100) == pytest.approx(14e-3 + 1000 * (5e-6 + 2e-6))
    assert TABLE.step_s(5, 1, 100) == pytest.approx(14e-3)


@given(
    times=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=8),
    sequences=st.integers(1, 70),
    extra=st.integers(0, 200),
)
def test_more_rows_never_cost_less(times: list[float], sequences: int, extra: int) -> None:
    """Whatever was measured, a noisy point makes no row free, and every time is positive."""
    table = table_of([(1, rows + 1, step_s) for rows, step_s in enumerate(times)])
    low, high = table.step_s(sequences + extra, sequences), table.step_s(sequences + extra + 1, sequences)
    assert 0 < low <= high * (1 + 1e-9)


def test_measuring_leaves_the_slots_free_and_keeps_to_its_budget(runner: Runner) -> None:
    """The clock decides: with no time left only the smallest steps are measured."""
    now = iter(range(10_000))
    table = measure(runner, 0.0, lambda: float(next(now)))
    assert runner.kv.is_idle()
    assert table is not None
    assert max(rows for _, curve in table.curves for rows, _ in curve) <= 5
    full = measure(runner, 5.0)
    assert full is not None
    assert runner.kv.is_idle()
    assert {count for count, _ in full.curves} == {1, 2, 4}  # five slots
    assert full.step_s(1, 1) > 0


def test_the_second_start_reads_the_file(
    runner: Runner, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same key, same table, nothing measured."""
    monkeypatch.setattr(costs, "_OTHER_DAYS", 1e9)  # a busy machine is not the matter here
    first = load_or_measure(runner, 1.0)
    assert first is not None
    (path,) = cache.iterdir()
    monkeypatch.setattr(costs, "measure", lambda *_: pytest.fail("measured again"))
    second = load_or_measure(runner, 1.0)
    assert second is not None
    assert (second.curves, second.row_key_s) == (first.curves, first.row_key_s)
    assert second.origin == "measured at an earlier start"
    assert json.loads(path.read_text())["key"] == cost_key(runner)


def test_other_threads_or_kernels_are_another_key(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that changes the figures changes the key."""
    key = cost_key(runner)
    monkeypatch.setattr(costs, "_engine_sources", lambda: "other")
    assert cost_key(runner) != key


def kept_as(runner: Runner, cache: Path, table: costs.CostTable) -> None:
    """``table`` as the file of ``runner``."""
    load_or_measure(runner, 0.01)
    (path,) = cache.iterdir()
    write_table(path, cost_key(runner), table)


def test_a_file_of_longer_times_is_measured_anew(
    runner: Runner, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key fits, the plain step does not: a copied cache, or figures of a day when the machine was busy."""
    kept_as(runner, cache, table_of([(1, 1, 9.0), (1, 5, 9.5)]))
    with caplog.at_level(logging.WARNING):
        table = load_or_measure(runner, 1.0)
    assert "do not fit" in caplog.text
    assert table is not None
    assert table.step_s(1, 1) < 1.0


def test_a_busy_machine_does_not_spoil_what_was_measured_on_a_quiet_one(
    runner: Runner, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All steps take longer than the file tells: it stays, since ratios hold and the controller follows the pace."""
    kept_as(runner, cache, table_of([(1, 1, 1e-7), (1, 5, 2e-7)]))
    with caplog.at_level(logging.WARNING):
        table = load_or_measure(runner, 1.0)
    assert "their ratios are kept" in caplog.text
    assert table is not None
    assert table.step_s(1, 1) == 1e-7
    assert load_or_measure(runner, 1.0) == table


def good() -> dict[str, Any]:
    return {
        "schema": 1,
        "key": KEY,
        "context": 256,
        "row_key_s": 0.0,
        "sequence_key_s": 0.0,
        "points": [[1, 1, 0.01], [1, 5, 0.02]],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"key": {"model": "another", "machine": "x"}},
        {"points": []},
        {"points": [[1, 1, -0.01]]},
        {"points": [[1, 1, float("nan")]]},
        {"points": [[1, 1, 1e9]]},
        {"points": [[1, 1, 10**400]]},
        {"points": [[1, 1, 0]]},
        {"points": [[1, 1, "soon"]]},
        {"points": [[1, 1, True]]},
        {"points": [[2, 1, 0.01]]},
        {"points": [[1, 5, 0.01]]},
        {"points": [[1, 1, 0.01], [1, 1, 0.02]]},
        {"points": [[1, 1]]},
        {"points": 7},
        {"context": 0},
        {"row_key_s": -1},
        {"row_key_s": None},
    ],
)
def test_absurd_and_foreign_files_are_ignored_with_a_word(
    cache: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    """Never an error, never a strange decision: a line in the log, and it is measured anew."""
    cache.mkdir(parents=True)
    path = cache / "t.json"
    path.write_text(json.dumps(good()))
    assert read_table(path, KEY) is not None
    path.write_text(json.dumps(good() | change))
    with caplog.at_level(logging.WARNING):
        assert read_table(path, KEY) is None
    assert "cost table ignored" in caplog.text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 1}', "\x00\xff", json.dumps(good())[:60]]
)
def test_truncated_files_are_ignored(cache: Path, text: str) -> None:
    """Half a file is none."""
    cache.mkdir(parents=True)
    (cache / "t.json").write_text(text, encoding="latin-1")
    assert read_table(cache / "t.json", KEY) is None


def test_what_is_written_is_read(cache: Path) -> None:
    """To the last bit."""
    write_table(cache / "t.json", KEY, TABLE)
    back = read_table(cache / "t.json", KEY)
    assert back is not None
    assert (back.curves, back.context, back.row_key_s) == (TABLE.curves, TABLE.context, TABLE.row_key_s)
    assert [path.name for path in cache.iterdir()] == ["t.json"]


def test_a_disturbed_time_gives_way_to_that_of_a_larger_step():
    """One of 17 rows took seven times as long as two sequences of 18: something else ran. So did one of 16 against 32."""
    table = table_of(
        [
            (1, 1, 0.004),
            (1, 13, 0.02),
            (1, 17, 0.147),
            (2, 2, 0.005),
            (2, 18, 0.04),
            (16, 16, 0.0727),
            (32, 32, 0.0585),
        ]
    )
    assert table.step_s(17, 1) == 0.04
    assert table.step_s(16, 16) == 0.0585
    assert table.step_s(13, 1) == 0.02


def test_a_step_costs_no_more_than_two_of_half_its_rows():
    """Seven rows of four sequences took 405 ms, four rows 47: something else ran."""
    table = table_of(
        [(1, 1, 0.008), (1, 2, 0.009), (4, 4, 0.047), (4, 7, 0.405), (4, 12, 0.4), (4, 20, 0.41)]
    )
    assert table.step_s(7, 4) == 2 * 0.047
    assert table.step_s(12, 4) == 0.4
