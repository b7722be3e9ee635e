"""The machine's name among machines."""

import socket
from pathlib import Path


def host_name() -> str:
    """The same for all processes of one running machine, containers included: those share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
