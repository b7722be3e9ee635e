"""What is said of a failure on the other side of Ray."""

import subprocess
import sys

import pytest

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
    path.rmdir()


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
