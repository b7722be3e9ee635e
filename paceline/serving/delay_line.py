"""A longer wire: a TCP relay on loopback that holds every byte back, to see what a distance between two tiers costs.

Only simulated stacks and measurements use it. It has threads of its own rather than the event loop's timers, which are
right to a millisecond only.
"""

import contextlib
import queue
import random
import socket
import threading
import time
from types import TracebackType
from typing import Self

from paceline.simulation import sleep_until

_PIECE = 1 << 16


class DelayLine:
    """Listens on a free port of loopback (``address``) and relays to ``endpoint``; ``start`` first, then ``stop``.

    Each way takes half of ``rtt_s`` and up to ``jitter_s`` more, drawn for each piece; pieces keep their order.
    """

    def __init__(self, endpoint: str, *, rtt_s: float, jitter_s: float = 0.0) -> None:
        self._endpoint = endpoint
        self.rtt_s = rtt_s
        self.jitter_s = jitter_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopping = False

    @property
    def address(self) -> str:
        """Where to connect instead of the endpoint."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def start(self) -> None:
        """Accept connections from now on."""
        threading.Thread(target=self._accept, name="delay-line", daemon=True).start()

    def stop(self) -> None:
        """Cut everything."""
        self._stopping = True
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Break the connections there are; new ones are welcome."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            _close(one)

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    def _accept(self) -> None:
        host, _, port = self._endpoint.rpartition(":")
        while not self._stopping:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._sockets |= {near, far}
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._relay(near, far)
            self._relay(far, near)

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(
                target=work, args=(source, target, pieces), name="delay-line", daemon=True
            ).start()

    def _read(
        self, source: socket.socket, target: socket.socket, pieces: "queue.SimpleQueue[tuple[float, bytes]]"
    ) -> None:
        piece = b"x"
        while piece:
            try:
                piece = source.recv(_PIECE)
            except OSError:
                piece = b""
            pieces.put((time.monotonic() + self.rtt_s / 2 + random.random() * self.jitter_s, piece))

    def _write(
        self, source: socket.socket, target: socket.socket, pieces: "queue.SimpleQueue[tuple[float, bytes]]"
    ) -> None:
        while True:
            due, piece = pieces.get()
            sleep_until(due)
            try:
                if not piece:
                    break
                target.sendall(piece)
            except OSError:
                break
        with self._lock:
            self._sockets -= {source, target}
        for one in (source, target):
            _close(one)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        one.shutdown(socket.SHUT_RDWR)
    one.close()
