"""Small words that several commands say."""

import time


def counted(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def clock(at: float) -> str:
    """A unix time as people here write it; 0 is the start."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else "the start"


def lasting(seconds: float) -> str:
    """A time as somebody who waits wants to hear it."""
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
