"""What the ledger's sums are kept apart by."""

from bisect import bisect_right
from dataclasses import dataclass, fields
from enum import Enum

_BATCHES = ((1, "1"), (2, "2-4"), (5, "5-10"), (11, "11-31"), (32, "32+"))
_BATCH_STARTS = tuple(start for start, _ in _BATCHES)


class Arm(Enum):
    """Why a request was decoded as it was: only like is compared with like."""

    AUTO = "auto"  # speculative by the policy's choice
    HOLDOUT = "holdout"  # could have been speculative; plain, drawn by lot to compare with
    OFF = "off"  # could have been speculative; plain because the guard is off
    PROBE = "probe"  # speculative while the guard is off, to see whether it pays again
    INELIGIBLE = "ineligible"  # plain whatever the guard says: short output, no drafter, no room
    ASKED = "asked"  # as the request wanted
    PINNED = "pinned"  # as an operator's rule says


@dataclass(frozen=True, slots=True)
class Group:
    """Requests whose sums are added up. Empty ``drafter`` and ``law``: decoded plainly."""

    task: str
    tenant: str
    """Group of tenants, not a single one."""
    drafter: str
    version: str
    """Of the drafter, behind it the target's: figures of another pair say nothing."""
    law: str
    temperature: str
    batch: str
    arm: str

    @property
    def values(self) -> tuple[str, ...]:
        """In the order of the fields."""
        return tuple(getattr(self, name) for name in GROUP_FIELDS)


GROUP_FIELDS = tuple(field.name for field in fields(Group))


def batch_bucket(sequences: int) -> str:
    """1, 2-4, 5-10, 11-31 or 32+ sequences in a step."""
    return _BATCHES[max(0, bisect_right(_BATCH_STARTS, sequences) - 1)][1]


def temperature_bucket(temperature: float) -> str:
    """Greedy apart; above it by halves, since acceptance falls as draws spread."""
    if temperature == 0:
        return "0"
    if temperature <= 0.5:
        return "0-0.5"
    return "0.5-1" if temperature <= 1 else "1+"
