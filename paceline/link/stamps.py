"""The stamp that every entry on the link carries."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a message speaks about.

    ``sequence_id`` is unique within a verify replica's life. ``epoch`` starts at 1 and rises each time the sequence
    is opened again. ``base_len`` is the sequence's length in tokens that the message builds on.
    """

    sequence_id: int
    epoch: int
    base_len: int
