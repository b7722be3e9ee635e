"""What is said of a failure on the other side of Ray."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from cluster import session
from cluster.session import _end_processes_of, cause, work_directory


def test_the_cause_is_the_exception_at_the_end():
    """All lines of its message, without the traceback and the module's path."""
    text = (
        "The actor died because of an error raised in its creation task, ray::TierActor.__init__()\n"
        '  File "verify_service/service.py", line 3, in create_server\n'
        "paceline.errors.ConfigError: wrong settings:\n"
        "  model.name = 'x': no such model"
    )
    assert cause(RuntimeError(text)) == "ConfigError: wrong settings:\n  model.name = 'x': no such model"
    assert cause(RuntimeError("plain words")) == "plain words"
    assert cause(RuntimeError()) == "RuntimeError"


def test_logs_stay_after_an_error_only():
    """The directory is gone after success and after Ctrl-C; after an error its logs can be read."""
    with work_directory() as path:
        assert path.is_dir()
    assert not path.exists()
    with pytest.raises(KeyboardInterrupt), work_directory() as path:
        raise KeyboardInterrupt
    assert not path.exists()
    with pytest.raises(ValueError, match="x"), work_directory() as path:
        raise ValueError("x")
    assert path.exists()
    shutil.rmtree(path)


def test_with_keep_logs_only_the_logs_stay(tmp_path, monkeypatch):
    """Logs and settings after a normal stop; Ray's own files are gone. Without any log nothing stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(session, "LONGEST_TEMP_DIR", 1000)
    with work_directory(keep_logs=True) as path:
        (path / "verify-0.log").write_text("x")
        (path / "settings.toml").write_text("x")
        (path / "session_1").mkdir()
        (path / "session_latest").symlink_to(path / "session_1")
    assert {child.name for child in path.iterdir()} == {"verify-0.log", "settings.toml", "launcher.pid"}
    with work_directory(keep_logs=True) as path:
        (path / "session_1").mkdir()
    assert not path.exists()


def test_old_logs_go_when_a_new_stack_comes(tmp_path, monkeypatch):
    """The last few are kept; one whose launcher still runs, and a directory that is not ours, are left alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(session, "LONGEST_TEMP_DIR", 1000)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for index in range(9):
        directory = tmp_path / f"paceline-{index}"
        directory.mkdir()
        owner = directory / "launcher.pid"
        owner.write_text(str(os.getpid() if index == 0 else gone.pid))
        os.utime(owner, (index, index))
    (tmp_path / "paceline-other").mkdir()
    with work_directory() as path:
        left = {child.name for child in tmp_path.iterdir()} - {path.name}
    assert left == {"paceline-0", *(f"paceline-{index}" for index in range(5, 9)), "paceline-other"}


def test_only_processes_of_our_ray_are_ended(tmp_path):
    """What Ray left behind is killed; a person's look at the logs is not."""
    sleep = [sys.executable, "-c", "import time; time.sleep(30)"]
    left = subprocess.Popen([*sleep, "/site-packages/ray/core/raylet", f"--dir={tmp_path}/session_1"])
    look = subprocess.Popen([*sleep, f"{tmp_path}/session_1/logs"])
    other = subprocess.Popen([*sleep, "/site-packages/ray/core/raylet", f"--dir={tmp_path}-2/session_1"])
    _end_processes_of(tmp_path)
    assert left.wait(5) == -9
    for process in (look, other):
        assert process.poll() is None
        process.kill()
        process.wait()
