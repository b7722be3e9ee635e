"""One literal table for each direction of the link: what becomes of a message, given what its receiver knows.

Nothing here does I/O, keeps time or raises for a peer's mistake: a message is applied or it meets one of the named
fates, and a refused message leaves the state as it was. DESIGN section 3, invariants I1 and I7.

    verify --Open, Commit, Close--> draft      judged by MirrorState (one per sequence, on the draft side)
    verify <------- Proposal ------- draft     judged by ProposalGate (one per sequence, on the verify side)

A proposal may be drafted ahead of the verdict: it then assumes that certain tokens will be committed behind its base_len,
and is used iff they are. It may come before the verdict (kept, under a credit) or after it (used on the spot if it
fits).
"""

from collections.abc import Sequence
from enum import Enum

from paceline.link.stamps import Stamp


class Fate(Enum):
    """What becomes of a message."""

    APPLY = "apply"
    STALE = "stale"  # speaks of something that is over
    DUPLICATE = "duplicate"  # says what is known already
    GAP = "gap"  # builds on something that never arrived
    MISMATCH = "mismatch"  # cannot be meant: an epoch never issued, a token that does not exist
    AHEAD = "ahead"  # assumes an outcome that is still open: kept until the verdict
    MISSED = "missed"  # assumed another outcome than the actual one


class Age(Enum):
    """How a message's epoch, or base length, relates to the receiver's."""

    OLDER = "older"
    SAME = "same"
    NEWER = "newer"


def _age(theirs: int, ours: int) -> Age:
    return Age.SAME if theirs == ours else Age.OLDER if theirs < ours else Age.NEWER


# --- draft side -------------------------------------------------------------------------------------------------

# A mirror is absent (never opened), open, or closed (remembered, so that a close wins over a late commit).
_OPEN: dict[Age, Fate] = {Age.OLDER: Fate.STALE, Age.SAME: Fate.DUPLICATE, Age.NEWER: Fate.APPLY}
_OPEN_AFTER_CLOSE: dict[Age, Fate] = {Age.OLDER: Fate.STALE, Age.SAME: Fate.STALE, Age.NEWER: Fate.APPLY}
_CLOSE: dict[Age, Fate] = {Age.OLDER: Fate.STALE, Age.SAME: Fate.APPLY, Age.NEWER: Fate.APPLY}
_COMMIT: dict[tuple[Age, Age], Fate] = {
    # (epoch, base_len)
    (Age.OLDER, Age.OLDER): Fate.STALE,
    (Age.OLDER, Age.SAME): Fate.STALE,
    (Age.OLDER, Age.NEWER): Fate.STALE,
    (Age.SAME, Age.OLDER): Fate.DUPLICATE,
    (Age.SAME, Age.SAME): Fate.APPLY,
    (Age.SAME, Age.NEWER): Fate.GAP,
    (Age.NEWER, Age.OLDER): Fate.GAP,  # the open of that epoch never arrived
    (Age.NEWER, Age.SAME): Fate.GAP,
    (Age.NEWER, Age.NEWER): Fate.GAP,
}


class MirrorState:
    """What the draft side knows of one sequence: epoch, length, whether it is closed. Owned by one mirror.

    The methods judge a message and move the state on iff the answer is APPLY.
    """

    __slots__ = ("closed", "epoch", "length")

    def __init__(self) -> None:
        self.epoch = 0  # below every issued epoch: absent
        self.length = 0
        self.closed = False

    def open(self, epoch: int, length: int) -> Fate:
        """Open, or open anew, at ``length`` tokens."""
        fate = (_OPEN_AFTER_CLOSE if self.closed else _OPEN)[_age(epoch, self.epoch)]
        if fate is Fate.APPLY:
            self.epoch, self.length, self.closed = epoch, length, False
        return fate

    def commit(self, stamp: Stamp, num_tokens: int) -> Fate:
        """``num_tokens`` were committed after ``stamp.base_len``. A GAP asks for a new open."""
        if self.closed and stamp.epoch <= self.epoch:
            return Fate.STALE
        if self.epoch == 0:
            return (
                Fate.GAP
            )  # absent; without this line a commit under epoch 0 would meet an epoch that is the same
        fate = _COMMIT[_age(stamp.epoch, self.epoch), _age(stamp.base_len, self.length)]
        if fate is Fate.APPLY:
            self.length += num_tokens
        return fate

    def close(self, epoch: int) -> Fate:
        """The sequence is over up to ``epoch``."""
        fate = Fate.DUPLICATE if self.closed and epoch == self.epoch else _CLOSE[_age(epoch, self.epoch)]
        if fate is Fate.APPLY:
            self.epoch, self.closed = epoch, True
        return fate


# --- verify side ------------------------------------------------------------------------------------------------

_PROPOSAL: dict[tuple[Age, Age], Fate] = {
    # (epoch, base_len)
    (Age.OLDER, Age.OLDER): Fate.STALE,
    (Age.OLDER, Age.SAME): Fate.STALE,
    (Age.OLDER, Age.NEWER): Fate.STALE,
    (Age.SAME, Age.OLDER): Fate.STALE,
    (Age.SAME, Age.SAME): Fate.APPLY,
    (Age.SAME, Age.NEWER): Fate.GAP,
    (Age.NEWER, Age.OLDER): Fate.MISMATCH,
    (Age.NEWER, Age.SAME): Fate.MISMATCH,
    (Age.NEWER, Age.NEWER): Fate.MISMATCH,
}


class Base(Enum):
    """Where the base length of a proposal that was drafted ahead stands."""

    OLDER = "older"
    LAST = "last"  # the length before the last verdict: what it assumed is decided
    LIVE = "live"
    NEWER = "newer"


_AHEAD: dict[tuple[Age, Base], Fate] = {
    # (epoch, base_len). APPLY at the last length only where the assumed outcome is the actual one, else MISSED
    (Age.OLDER, Base.OLDER): Fate.STALE,
    (Age.OLDER, Base.LAST): Fate.STALE,
    (Age.OLDER, Base.LIVE): Fate.STALE,
    (Age.OLDER, Base.NEWER): Fate.STALE,
    (Age.SAME, Base.OLDER): Fate.STALE,
    (Age.SAME, Base.LAST): Fate.APPLY,
    (Age.SAME, Base.LIVE): Fate.AHEAD,
    (Age.SAME, Base.NEWER): Fate.GAP,
    (Age.NEWER, Base.OLDER): Fate.MISMATCH,
    (Age.NEWER, Base.LAST): Fate.MISMATCH,
    (Age.NEWER, Base.LIVE): Fate.MISMATCH,
    (Age.NEWER, Base.NEWER): Fate.MISMATCH,
}


class ProposalGate:
    """What the verify side has asked of a drafter for one sequence, and which answers it may use.

    ``epoch`` is the last one issued, ``base_len`` the live length, ``k`` the most tokens asked for at that length,
    ``credit`` how many outcomes of the round at that length may be drafted ahead.
    """

    __slots__ = ("_answered", "_assumed", "_committed", "_last_k", "base_len", "credit", "epoch", "k")

    def __init__(self) -> None:
        self.epoch = 0
        self.base_len = 0
        self.k = 0
        self.credit = 0
        self._answered = False
        self._assumed: set[tuple[int, ...]] = set()
        self._committed: tuple[int, ...] = ()  # by the last verdict under this epoch
        self._last_k = 0

    @property
    def awaiting(self) -> bool:
        """Whether a proposal was asked for at the live length and has not come."""
        return self.k > 0 and not self._answered

    def opened(self, base_len: int, k: int, credit: int = 0) -> int:
        """The sequence is opened (again) at ``base_len``; gives the new epoch."""
        self.epoch += 1
        self.moved(base_len, k, (), credit)
        return self.epoch

    def moved(self, base_len: int, k: int, committed: Sequence[int] = (), credit: int = 0) -> bool:
        """Tokens were committed: the live length is ``base_len``, up to ``k`` guesses are asked for.

        True: a block that was drafted ahead, and kept, assumed just this. It is the answer, there will be no other.
        """
        self._committed = tuple(committed)
        hit = k > 0 and self._committed in self._assumed
        self._last_k = self.k
        self.base_len, self.k, self.credit, self._answered = base_len, k, credit, hit
        self._assumed.clear()
        return hit

    def judge(
        self, stamp: Stamp, token_ids: "list[int]", vocab_size: int, assumed_ids: Sequence[int] = ()
    ) -> Fate:
        """What becomes of a proposal; APPLY also marks the question as answered, AHEAD takes a credit.

        ``token_ids`` may be longer than ``k`` where they were drafted ahead, under the ``k`` before it: cut them.
        """
        if self.epoch == 0:
            return Fate.MISMATCH  # nothing was ever asked
        if assumed_ids:
            fate = self._judge_ahead(stamp, tuple(assumed_ids))
            most = max(self.k, self._last_k)
        else:
            fate = _PROPOSAL[_age(stamp.epoch, self.epoch), _age(stamp.base_len, self.base_len)]
            most = self.k
            if fate is Fate.APPLY and self._answered:
                fate = Fate.DUPLICATE
        if fate not in {Fate.APPLY, Fate.AHEAD}:
            return fate
        if len(token_ids) > most or not all(0 <= token < vocab_size for token in (*token_ids, *assumed_ids)):
            return Fate.MISMATCH
        if fate is Fate.AHEAD:
            self._assumed.add(tuple(assumed_ids))
        else:
            self._answered = True
        return fate

    def _judge_ahead(self, stamp: Stamp, assumed: tuple[int, ...]) -> Fate:
        fate = _AHEAD[_age(stamp.epoch, self.epoch), self._base(stamp.base_len)]
        if fate is Fate.APPLY:
            if assumed != self._committed or not self.k:
                return Fate.MISSED
            return Fate.DUPLICATE if self._answered else Fate.APPLY
        if fate is Fate.AHEAD:
            if assumed in self._assumed:
                return Fate.DUPLICATE
            if len(self._assumed) >= self.credit:
                return Fate.MISMATCH  # more than was asked for
        return fate

    def _base(self, base_len: int) -> Base:
        if base_len == self.base_len:
            return Base.LIVE
        if base_len > self.base_len:
            return Base.NEWER
        last = bool(self._committed) and base_len == self.base_len - len(self._committed)
        return Base.LAST if last else Base.OLDER
