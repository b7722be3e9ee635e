"""What the command line says where little is known: rollouts just heard of, costs that nobody gave, plain rows, wrong files."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app, settings_in_words
from cluster.options import beside
from cluster.rollout_cli import status_lines
from cluster.simulated import simulated
from cluster.six_tables import print_conclusion
from cluster.words import broken
from evaluation.recordings import load_recording
from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.types import Mode
from paceline.v1 import router_pb2
from router.plan import TASK_TYPES, PlanTable


def test_a_simulated_pairs_own_settings_are_not_listed():
    """One line for all of them, one for each setting on top."""
    config = load_config(None, [*simulated("8b+1b"), "simulation.rtt_ms=5"])
    said = settings_in_words(config, SimpleNamespace(log_dir=None), "8b+1b")
    assert said.splitlines() == ["Settings: those of --simulate 8b+1b, but", "  simulation.rtt_ms = 5.0"]


def test_what_was_just_said_is_not_called_unchecked():
    """The audit comes a moment before the standing."""
    moved = router_pb2.AuditRecord(kind="rollout", subject="code/suffix", words="passed: 0% -> 10%, check")
    told = router_pb2.GetRolloutResponse(gated=True, audit=[moved])
    words = "\n".join(status_lines(told))
    assert "no type of task was checked" not in words
    assert "just heard of, takes effect within a second or two: code/suffix" in words
    standing = router_pb2.RolloutStatus(task="code", drafter="suffix", stage="canary", share=0.1)
    told.rollouts.append(standing)
    assert "just heard of" not in "\n".join(status_lines(told))
    empty = router_pb2.GetRolloutResponse(gated=True)
    assert "no type of task has passed a check yet" in "\n".join(status_lines(empty))


@pytest.mark.parametrize(
    ("given", "said", "unsaid"),
    [
        ([], ["a target's step of", "a draft forward of"], []),
        (["--draft-ms", "6"], ["a target's step of 28 ms"], ["a draft forward"]),
    ],
)
def test_a_plan_says_what_it_took_over(given, said, unsaid):
    """Costs that nobody gave are those of a pair, by name."""
    done = CliRunner().invoke(app, ["plan", "-a", "0.8", *given])
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    for part in said:
        assert part in words
    for part in unsaid:
        assert part not in words
    assert max(map(len, done.output.splitlines())) <= 80


@dataclasses.dataclass(frozen=True)
class Six:
    """As much of a comparison as the sum looks at."""

    plain: object
    automatic: object
    speculative: object
    first_difference: int | None = None


def ran(mode, seconds):
    timings = SimpleNamespace(decode_s=seconds, total_s=seconds)
    finished = SimpleNamespace(timings=timings, plan=SimpleNamespace(mode=mode))
    return SimpleNamespace(finished=finished, started=SimpleNamespace(trace_id=""))


def test_the_sum_of_the_demonstration_holds_no_noise_of_plain_rows(capsys):
    """A row decoded plainly twice is 1.00 in it, however fast it happened to be."""
    fast, plain = ran(Mode.SPECULATIVE, 1.0), ran(Mode.PLAIN, 2.0)
    lucky = ran(Mode.PLAIN, 0.5)
    rows = [Six(plain, fast, fast), Six(plain, lucky, ran(Mode.SPECULATIVE, 4.0))]
    print_conclusion(Console(highlight=False, width=80), rows)
    words = capsys.readouterr().out
    assert "automatic, as the router decided: 1.33x decode" in words
    assert "always speculative: 0.80x decode" in words
    assert "counts as 1.00" in words


def test_a_replay_says_what_it_wants(tmp_path):
    """Records of a check hold no prompts."""
    path = tmp_path / "paceline-check.jsonl"
    path.write_text(json.dumps({"request_id": "a", "token_ids": [1]}) + "\n")
    with pytest.raises(ConfigError, match=r"verify\.records\.token_ids = true.*paceline check"):
        load_recording([path])


@pytest.mark.parametrize("given", ["nan", "1.2", "-0.1", "suffix=much", "inf"])
def test_an_offline_share_is_a_share(tmp_path, given):
    """Nothing can be compared with what is none."""
    records = tmp_path / "records.jsonl"
    records.write_text("")
    done = CliRunner().invoke(app, ["diagnose", "--records", str(records), "--offline", given])
    assert done.exit_code == 2
    assert "expected a share from 0 to 1" in done.output


def test_reasons_name_no_drafter():
    """Which drafter it would have been, others decide."""
    table = PlanTable({})
    assert not [name for name in TASK_TYPES if "lookup" in table.reason(name)]


@pytest.mark.parametrize(
    ("router", "verify"),
    [("127.0.0.1:7440", "127.0.0.1:7441"), ("gpu-7:9000", "gpu-7:7441"), ("[::1]:7440", "[::1]:7441")],
)
def test_a_router_on_another_host_has_its_verify_replica_there(router, verify):
    """A check of it asks no replica of this machine."""
    assert beside(router) == verify


@pytest.mark.parametrize("width", [20, 40, 79])
def test_long_lines_are_broken_between_words(width):
    """Nothing is lost, nothing is longer than the terminal, what goes on is indented; elsewhere the line stays whole."""
    line = "    since yesterday: 12 requests of 3,000, an acceptance of 0.42, and so on for a good while"
    parts = broken(line, width)
    assert broken(line, 0) == [line]
    assert " ".join(part.strip() for part in parts) == line.strip()
    assert all(len(part) <= width for part in parts)
    assert parts[0].startswith("    since")
    assert all(part.startswith(" " * 8) for part in parts[1:])


def test_a_word_longer_than_the_terminal_stays_whole():
    """A path that was cut could not be copied."""
    assert (
        broken("see /a/very/long/path/that/goes/on/and/on", 20)[-1].strip()
        == "/a/very/long/path/that/goes/on/and/on"
    )
