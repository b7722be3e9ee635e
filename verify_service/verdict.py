"""Accept, and commit: the only place where tokens become output (I1).

The law here is the coupled one (DESIGN section 4): the target has drawn its own token for every row, with the noise
that is keyed by position; draft tokens are accepted while they equal it. The first unequal target token replaces the
guess; when all are equal, the last row's token is the bonus. Every committed token is thus the target's own draw, and
the output cannot depend on the drafter.
"""

from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from paceline.engine import SlotKV
from paceline.types import FinishReason
from verify_service.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round gives. ``accepted`` and ``ignored`` count draft tokens: agreed and kept, agreed but cut."""

    committed: tuple[int, ...]
    accepted: int
    ignored: int
    finish: FinishReason | None


def judge(
    draft: SequenceOf[int], target: SequenceOf[int], *, stop_ids: AbstractSet[int], room: int
) -> Verdict:
    """The verdict on ``draft`` (K tokens), given the target's own tokens for the K + 1 positions.

    ``room`` (>= 1) is how many tokens may still be committed. The cut comes after the first stop token, which is
    itself committed, or after ``room`` tokens.
    """
    assert len(target) == len(draft) + 1, "one target token per draft token, and one more"
    agreed = 0
    while agreed < len(draft) and draft[agreed] == target[agreed]:
        agreed += 1
    kept: list[int] = []
    finish: FinishReason | None = None
    for token in target[: agreed + 1]:
        kept.append(token)
        if token in stop_ids:
            finish = FinishReason.STOP
            break
        if len(kept) == room:
            finish = FinishReason.LENGTH
            break
    accepted = min(agreed, len(kept))
    return Verdict(tuple(kept), accepted, agreed - accepted, finish)


def commit(sequence: Sequence, verdict: Verdict, kv: SlotKV) -> None:
    """Make the verdict's tokens the sequence's, and set the KV length: that is the whole rollback (I4).

    The last committed token has not been through the model yet, so the KV of one token less than the sequence is
    valid; what lies behind it belongs to rejected tokens and is unreachable from here on.
    """
    assert sequence.slot is not None
    sequence.tokens.extend(verdict.committed)
    kv.truncate(sequence.slot, len(sequence.tokens) - 1)
