"""How far a drafter works ahead of the verdict (DESIGN section 5)."""

from dataclasses import dataclass

MAX_LEVEL = 2
MAX_FAN = 16


@dataclass(frozen=True, slots=True)
class Lookahead:
    """Level 0: waits for the verdict. 1: goes on as if everything were accepted. 2: from several outcomes at once.

    ``fan`` is the number of outcomes at each accepted length under level 2, 0 under the others.
    """

    level: int = 0
    fan: int = 0

    def credit(self, k: int) -> int:
        """Blocks that may be pushed ahead of the verdict on ``k`` guesses: one for each outcome."""
        if self.level == 0 or k == 0:
            return 0
        return 1 if self.level == 1 else (k + 1) * self.fan


NO_LOOKAHEAD = Lookahead()
