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

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; nothing of ours goes there
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
PREFIX = "paceline-"
RAY_LOG = "ray.log"
OWNER_FILE = "launcher.pid"
KEPT_DIRECTORIES = 5
KEPT_SUFFIXES = {".log", ".settings", ".toml", Path(OWNER_FILE).suffix}
LONGEST_TEMP_DIR = 40  # Ray puts sockets below it, and a socket's path has at most 107 characters


class LaunchError(PacelineError):
    """Ray or a tier could not be brought up; the message says which one is missing and why."""


@contextlib.contextmanager
def work_directory(*, keep_logs: bool = False) -> Iterator[Path]:
    """A directory for Ray's sockets and everybody's logs.

    After an error it stays as it is. With ``keep_logs`` the tiers' logs and settings stay after a stop, too; those of
    the last ``KEPT_DIRECTORIES`` stacks are kept, older ones go when another one is made.
    """
    base = tempfile.gettempdir()
    if len(base) > LONGEST_TEMP_DIR:
        base = "/tmp"  # noqa: S108
    _remove_old_directories(Path(base))
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    (path / OWNER_FILE).write_text(str(os.getpid()), encoding="ascii")
    try:
        yield path
    except Exception:
        raise
    except BaseException:  # interrupted
        _clear(path, keep_logs=keep_logs)
        raise
    _clear(path, keep_logs=keep_logs)


def _clear(path: Path, *, keep_logs: bool) -> None:
    if not (keep_logs and any(path.glob("*.log"))):
        shutil.rmtree(path, ignore_errors=True)
        return
    for child in path.iterdir():
        if child.is_symlink() or not child.is_dir():
            if child.suffix not in KEPT_SUFFIXES:
                child.unlink(missing_ok=True)
        else:
            shutil.rmtree(child, ignore_errors=True)


def _remove_old_directories(base: Path) -> None:
    """Of directories that stacks of this user have left, all but the newest few."""
    left = []
    for owner in base.glob(f"{PREFIX}*/{OWNER_FILE}"):
        with contextlib.suppress(OSError, ValueError):
            about = owner.stat()
            if about.st_uid == os.getuid() and not is_alive(int(owner.read_text(encoding="ascii"))):
                left.append((about.st_mtime, owner.parent))
    for _, path in sorted(left)[: -(KEPT_DIRECTORIES - 1)]:
        shutil.rmtree(path, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """Whether a process has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
    messages = work_dir / RAY_LOG if work_dir is not None else None
    try:
        if work_dir is None:
            ray.init(address=config.ray_address, **QUIET)
        else:
            _start_local(config, work_dir)
    except Exception as error:
        raise LaunchError(f"Ray does not start: {cause(error)}") from error
    except BaseException:  # interrupted while Ray starts
        if work_dir is not None:
            _end_processes_of(work_dir)
        raise
    try:
        with _messages_to(messages):
            yield
    finally:
        try:
            ray.shutdown()
        finally:
            if work_dir is not None:
                _end_processes_of(work_dir)


@contextlib.contextmanager
def _messages_to(path: Path | None) -> Iterator[None]:
    """What Ray's node tells its driver goes into ``path``: it would print pages on our standard output, in colours.

    Ray has no switch for it (``log_to_driver`` is about the workers' own output), so the function that prints is
    replaced while the session lasts, where this version of Ray has it.
    """
    worker: Any = getattr(getattr(ray_module(), "_private", None), "worker", None)
    printed = getattr(worker, "print_to_stdstream", None)
    if path is None or printed is None:
        yield
        return

    def write(data: dict[str, Any], *_arguments: Any, **_options: Any) -> None:
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in data.get("lines", ()))

    worker.print_to_stdstream = write
    try:
        yield
    finally:
        worker.print_to_stdstream = printed


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
                _node_ip_address=LOOPBACK,
                _temp_dir=str(work_dir),
                **QUIET,
            )
            work_dir.chmod(0o700)  # Ray opens it to everybody
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
    # All of Ray's sockets on loopback. Without this switch Ray takes 127.0.0.1 for a mistake, looks for the machine's
    # own address and listens on every interface. Read when ray is imported.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
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
