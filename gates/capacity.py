"""How many sequences fit into a device, without a drafter and with one."""

from dataclasses import dataclass

FILL = 0.95
"""Share of the device that may be promised: the rest is for what nobody budgets."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Sizes in bytes; KV for each token of each sequence. The drafter's are 0 where it holds none."""

    device_bytes: float
    target_bytes: float
    target_kv_bytes: float
    draft_bytes: float = 0.0
    draft_kv_bytes: float = 0.0

    def weights_bytes(self, *, drafter: bool) -> float:
        """Of the target, and of the drafter where it is there."""
        return self.target_bytes + (self.draft_bytes if drafter else 0.0)

    def sequence_bytes(self, tokens: float, *, drafter: bool) -> float:
        """KV of one sequence of ``tokens`` tokens, in both tiers."""
        return tokens * (self.target_kv_bytes + (self.draft_kv_bytes if drafter else 0.0))

    def used_bytes(self, sequences: int, tokens: float, *, drafter: bool) -> float:
        """All of it with so many sequences."""
        return self.weights_bytes(drafter=drafter) + sequences * self.sequence_bytes(tokens, drafter=drafter)

    def sequences(self, tokens: float, *, drafter: bool) -> int:
        """Sequences of that length that fit; 0 where not even the weights do."""
        left = FILL * self.device_bytes - self.weights_bytes(drafter=drafter)
        return max(0, int(left / max(self.sequence_bytes(tokens, drafter=drafter), 1e-9)))
