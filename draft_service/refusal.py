"""Why a sequence gets no guesses here: the values behind ``SequenceRefusal``."""

from dataclasses import dataclass
from enum import Enum


class RefusalReason(Enum):
    """See the enum of the same name in draft.proto."""

    UNKNOWN_DRAFTER = "unknown drafter"
    CAPACITY = "capacity"
    CONTEXT = "context"
    OUT_OF_SYNC = "out of sync"
    MALFORMED = "malformed"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One sequence, under one epoch, is not mirrored (any more)."""

    sequence_id: int
    epoch: int
    reason: RefusalReason
    message: str
