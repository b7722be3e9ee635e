"""Settings of the interpreter for a process that answers within milliseconds."""

import gc
import sys

SWITCH_S = 0.0002
"""How long a thread may keep the interpreter while another one wants it. Python's own 5 ms is what a message of the link
may have to wait for, while the thread that wrote it goes on with less urgent things."""


def steady() -> None:
    """Call when the process is built, before it serves.

    What exists by then (half a million objects beside torch) stays for good: a full pass of the garbage collector over it
    would stop every stream for 0.1 to 0.3 s.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
