"""Accept, and commit: the only place where tokens become output (I1).

Under the coupled law (DESIGN section 4) the target has drawn its own token for every row, with the noise that is keyed
by position; draft tokens are accepted while they equal it. The first unequal target token replaces the guess; when
all are equal, the last row's token is the bonus. Every committed token is thus the target's own draw, and the output
cannot depend on the drafter. Under the sampled laws ``paceline.sampling.sampled`` decides how many draft tokens stay and
draws the token behind them: then the output's distribution cannot depend on the drafter, its tokens do.
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
    """The coupled law's verdict on ``draft`` (K tokens), given the target's own tokens for the K + 1 positions.

    Those behind the first that differs from the draft may be left out.
    """
    agreed = 0
    while agreed < len(draft) and draft[agreed] == target[agreed]:
        agreed += 1
    return settle(target[: agreed + 1], agreed, stop_ids=stop_ids, room=room)


def settle(tokens: SequenceOf[int], agreed: int, *, stop_ids: AbstractSet[int], room: int) -> Verdict:
    """The verdict of a round that gives ``tokens``, ``agreed`` of them from the draft and the target's own behind them.

    ``room`` (>= 1) is how many tokens may still be committed. The cut comes after the first stop token, which is
    itself committed, or after ``room`` tokens.
    """
    kept: list[int] = []
    finish: FinishReason | None = None
    for token in tokens:
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
