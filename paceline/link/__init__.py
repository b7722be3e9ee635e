"""Who may say what, when, on the link between verify and draft: rules without I/O, used by both sides."""

from paceline.link.lookahead import MAX_FAN, MAX_LEVEL, NO_LOOKAHEAD, Lookahead
from paceline.link.rules import Fate, MirrorState, ProposalGate
from paceline.link.stamps import Stamp

__all__ = [
    "MAX_FAN",
    "MAX_LEVEL",
    "NO_LOOKAHEAD",
    "Fate",
    "Lookahead",
    "MirrorState",
    "ProposalGate",
    "Stamp",
]
