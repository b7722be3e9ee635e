"""Where a check may write, known before anything is measured."""

import os
from pathlib import Path

import pytest

from cluster.check_cli import report_name, written
from paceline.errors import ConfigError


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".html"])
def test_a_report_never_replaces_what_is_read(suffix, tmp_path, monkeypatch):
    """By whatever name, or link, the file of requests, the ledger or the settings are called."""
    traffic = tmp_path / f"two{suffix}"
    traffic.write_text("{}\n", encoding="utf-8")
    (tmp_path / f"link{suffix}").symlink_to(traffic)
    monkeypatch.chdir(tmp_path)
    for name in ("two", "./two", f"two{suffix}", "link", str(tmp_path / "two")):
        with pytest.raises(ConfigError, match="name another"):
            report_name(Path(name), reads=[Path("other"), traffic])
    assert report_name(tmp_path / "three", reads=[traffic]) == tmp_path / "three"


def test_only_the_reports_own_suffixes_are_left_off(tmp_path, monkeypatch):
    """Two dated or numbered reports lie side by side."""
    monkeypatch.chdir(tmp_path)
    for name, html in (
        ("run.1", "run.1.html"),
        ("run.2", "run.2.html"),
        ("check-2026.11.30", "check-2026.11.30.html"),
        ("a.html", "a.html"),
        ("a.jsonl", "a.html"),
        (".hidden", ".hidden.html"),
    ):
        assert written(report_name(Path(name), reads=[]), ".html") == Path(html)


@pytest.mark.parametrize("name", ["", ".", "..", "/", "nowhere/report", "taken"])
def test_what_cannot_be_written_is_said_before_anything_is_measured(name, tmp_path, monkeypatch):
    """A check takes minutes: its report is not refused at the end of it."""
    (tmp_path / "taken.json").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--report|cannot write"):
        report_name(Path(name), reads=[])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_refused(tmp_path):
    """The same where rights are missing."""
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="not allowed"):
        report_name(tmp_path / "report", reads=[])


def test_names_that_are_no_text_are_refused():
    """They stand on the page: the command line's errors say so in words."""
    with pytest.raises(UnicodeError):
        report_name(Path("report"), reads=[Path(os.fsdecode(b"od\xff.jsonl"))])
