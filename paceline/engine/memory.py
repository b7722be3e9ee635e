"""What the process holds of the machine's memory."""

import contextlib
import ctypes
import gc


def give_back_free_memory() -> None:
    """Hand freed pages back to the system: loading and measuring leave many that will not be wanted again.

    glibc keeps them otherwise, and they count as resident. Does nothing where the C library has no such call.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
