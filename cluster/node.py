"""One Ray node in the foreground, for a container: joins the cluster, stays, ends when told to.

    python -m cluster.node head -- --config FILE ...    starts the cluster, then ``paceline up`` with these arguments
    python -m cluster.node join verify                  a node that offers the resource ``verify``

Containers start in any order, so a node that joins waits until the head answers. Ray replaces an actor whose node is gone
as soon as a node with its resource is there again, so a container that died only has to come back.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HEAD_PORT = 6379
FIRST_WORKER_PORT, LAST_WORKER_PORT = 21000, 21999
"""Ray's own, off the range from which it takes others."""
OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum is 75 MiB; nothing of ours goes there
WAIT_S = 0.25
END_S = 3.0
ATTEMPTS = 3
EARLY_S = 60.0
"""A node that ends within so long never was up."""


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster.node", description="One Ray node in the foreground."
    )
    parser.add_argument("role", choices=("head", "join"))
    parser.add_argument("resources", nargs="*", metavar="RESOURCE", help="what this node offers, one of each")
    parser.add_argument("--head", default=f"head:{HEAD_PORT}", help="host:port of the head, for join")
    known, own = _split(list(sys.argv[1:] if argv is None else argv))
    arguments = parser.parse_args(known)
    signal.signal(signal.SIGTERM, _told)
    signal.signal(signal.SIGINT, _told)
    try:
        if arguments.role == "head":
            sys.exit(_head(own))
        sys.exit(_join(arguments.head, arguments.resources))
    except KeyboardInterrupt:
        sys.exit(0)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _told(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _head(up_arguments: list[str]) -> int:
    """Ray's head, and the launcher beside it; when the launcher is told to end, it drains the tiers first."""
    with _running(_ray("--head", f"--port={HEAD_PORT}", "--include-dashboard=false", "--num-cpus=0")) as node:
        _await_port("127.0.0.1", HEAD_PORT, node)
        address = f"cluster.ray_address={_own_address()}:{HEAD_PORT}"
        launcher = subprocess.Popen([sys.executable, "-m", "cluster", "up", *up_arguments, "--set", address])
        try:
            code = launcher.wait()
        except KeyboardInterrupt:
            launcher.send_signal(signal.SIGTERM)
            code = launcher.wait()
        return code


def _join(head: str, resources: list[str]) -> int:
    host, _, port = head.rpartition(":")
    _await_port(host, int(port), None)
    offered = json.dumps(dict.fromkeys(resources, 1))
    attempt = 1
    while True:
        started = time.monotonic()
        with _running(_ray(f"--address={head}", f"--resources={offered}")) as node:
            code = node.wait()
        # Ray gives its own processes 30 s to start and no more; on a busy machine that can be too little.
        if attempt == ATTEMPTS or time.monotonic() - started > EARLY_S:
            return code
        attempt += 1
        print(f"Ray's node did not come up (exit code {code}): attempt {attempt} of {ATTEMPTS}", flush=True)


def _ray(*arguments: str) -> list[str]:
    return [
        str(Path(sys.executable).with_name("ray")),
        "start",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--min-worker-port={FIRST_WORKER_PORT}",
        f"--max-worker-port={LAST_WORKER_PORT}",
        "--disable-usage-stats",
        "--include-log-monitor=false",  # a process a node; the tiers log where their container shows it
        "--block",
        *arguments,
    ]


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The command's process while the block runs; afterwards it and its children are gone."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _await_port(host: str, port: int, node: subprocess.Popen[bytes] | None) -> None:
    """Until somebody listens there; the restart policy of the container is the limit, not we."""
    print(f"waiting for {host}:{port}", flush=True)
    while True:
        if node is not None and node.poll() is not None:
            sys.exit(f"Ray ended with exit code {node.returncode} before it listened")
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            return
        except OSError:
            time.sleep(WAIT_S)


def _own_address() -> str:
    """As other containers reach this one."""
    return socket.gethostbyname(socket.gethostname())


if __name__ == "__main__":
    main()
