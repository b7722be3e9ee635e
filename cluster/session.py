"""Ray for the time of a context: a private local one, or a place in one that runs already.

A local Ray has a token of its own, logs and sockets in a directory of its own, and is gone with its context.
``ray stop`` is machine-wide and never called.
"""

import contextlib
import logging
import math
import os
import re
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.config import ClusterConfig
from paceline.errors import PacelineError

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; nothing of ours goes there
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
LONGEST_TEMP_DIR = 40  # Ray puts sockets below it, and a socket's path has at most 107 characters


class LaunchError(PacelineError):
    """Ray or a tier could not be brought up; the message says which one is missing and why."""


@contextlib.contextmanager
def work_directory() -> Iterator[Path]:
    """A directory for Ray's sockets and everybody's logs; kept after an error, so that the logs can be read."""
    base = tempfile.gettempdir()
    if len(base) > LONGEST_TEMP_DIR:
        base = "/tmp"  # noqa: S108
    path = Path(tempfile.mkdtemp(prefix="paceline-", dir=base))
    try:
        yield path
    except Exception:
        raise
    except BaseException:  # interrupted
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def ray_session(config: ClusterConfig, work_dir: Path | None) -> Iterator[None]:
    """Ray: the one this process has already, the one at ``ray_address``, or with ``work_dir`` a local one of our own.

    Only what was started here is shut down.
    """
    if work_dir is not None:
        _prepare_environment()
    ray = ray_module()
    if ray.is_initialized():
        yield
        return
    try:
        if work_dir is None:
            ray.init(address=config.ray_address, **QUIET)
        else:
            _start_local(config, work_dir)
    except Exception as error:
        raise LaunchError(f"Ray does not start: {cause(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()
        if work_dir is not None:
            _end_processes_of(work_dir)


def _start_local(config: ClusterConfig, work_dir: Path) -> None:
    """A Ray with what the tiers reserve, and no more.

    Tried twice: on a busy machine, forked from a process with many threads, Ray's own node process was seen not to
    come up (2 of about 80 starts); Ray gives up after 30 s and the next start works.
    """
    placements = (config.draft, config.verify, config.router)
    cpus = sum(one.num_cpus * one.replicas for one in placements)
    resources: dict[str, float] = {}
    for one in placements:
        for name, amount in one.resources.items():
            resources[name] = resources.get(name, 0.0) + amount * one.replicas
    for last_attempt in (False, True):
        try:
            ray_module().init(
                address="local",
                num_cpus=max(1, math.ceil(cpus)),  # not all cores: Ray starts an idle process for each
                resources=resources,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _temp_dir=str(work_dir),
                **QUIET,
            )
            return
        except Exception:
            ray_module().shutdown()
            _end_processes_of(work_dir)
            if last_attempt:
                raise


def _end_processes_of(work_dir: Path) -> None:
    """Kills what Ray left behind: processes of Ray (not a user's ``tail -f``) whose command line names our directory."""
    ours = os.fsencode(work_dir / "session_")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError, ProcessLookupError):
            command = path.read_bytes()
            if ours in command and b"/ray/" in command and int(path.parent.name) != os.getpid():
                os.kill(int(path.parent.name), signal.SIGKILL)


def _prepare_environment() -> None:
    """Settings that Ray reads from the environment.

    Token authentication is on by default. Without a token at hand Ray would write one below HOME; this one lives in
    the environment of this process and its children only. It stays: a second Ray in this process needs the same.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray forks from this process to start its own; gRPC's handlers for that are neither needed nor safe with threads.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    # A tier without a share of a GPU still sees it: on one machine the tiers share what is there.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def ray_module() -> Any:
    """Imported late: the command line starts without it."""
    import ray

    return ray


def cause(error: BaseException) -> str:
    """Of a remote traceback: the exception at its end, with all lines of its message."""
    lines = str(error).strip().splitlines()
    for index in range(len(lines) - 1, -1, -1):
        name, colon, _ = lines[index].partition(": ")
        if colon and re.fullmatch(r"[A-Za-z_][\w.]*", name):
            first = lines[index].removeprefix(name.rpartition(".")[0] + ".")
            return "\n".join([first, *lines[index + 1 :]])
    return lines[-1] if lines else type(error).__name__
