"""A draft replica that is a call away: the verify tier's link without a network, on virtual time.

``Drafts`` writes into it as into any ``LinkPort``; ``answer`` then does what the draft tier's threads do between two messages:
closes first, each drafter once for all who ask it, housekeeping last.
"""

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from draft_service.asking import Asking
from draft_service.drafters import Drafter, DraftRequest
from paceline.errors import CapacityError
from paceline.link import Lookahead, Stamp
from paceline.types import SamplingParams
from verify_service.drafts import Drafts
from verify_service.link_port import Proposal, Refusal
from verify_service.sequence import Sequence as Decoding

ENDPOINT = "replay"
_LINK_S = 5e-4  # a round trip on one machine: the floor of what asking costs


class VirtualClock:
    """Seconds that pass as the replay says; while something is really worked on (``with``), as on the wall."""

    def __init__(self) -> None:
        self.now = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        """The time."""
        return self.now if self._since is None else self.now + time.perf_counter() - self._since

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.now, self._since = self(), None


@dataclass(slots=True)
class _Mirror:
    """One sequence as the drafters know it."""

    handle: int
    epoch: int
    drafter: str
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    scope: str


class DirectLink:
    """A draft replica that is a call away. ``answer`` is what its worker threads do between two messages."""

    endpoint = ENDPOINT

    def __init__(self, drafters: Mapping[str, Drafter], vocab_size: int) -> None:
        self._asking = {name: Asking(drafter) for name, drafter in drafters.items()}
        self._vocab_size = vocab_size
        self._mirrors: dict[int, _Mirror] = {}
        self._questions: dict[int, int] = {}  # sequence -> k
        self._handles = 0

    # --- LinkPort ---------------------------------------------------------------------------------------------

    def open(self, sequence: Decoding, epoch: int, k: int, lookahead: Lookahead) -> None:
        """See LinkPort."""
        self._handles += 1
        spec = sequence.spec
        self._mirrors[sequence.id] = _Mirror(
            self._handles,
            epoch,
            spec.plan.drafter,
            [*sequence.tokens],
            len(spec.prompt_ids),
            spec.sampling,
            spec.tenant,
        )
        self._ask(sequence.id, k)

    def commit(
        self, stamp: Stamp, token_ids: list[int], k: int, round_index: int, lookahead: Lookahead
    ) -> None:
        """See LinkPort."""
        mirror = self._mirrors[stamp.sequence_id]
        assert (mirror.epoch, len(mirror.token_ids)) == (stamp.epoch, stamp.base_len), "nothing is lost here"
        mirror.token_ids += token_ids
        self._ask(stamp.sequence_id, k)

    def close(self, sequence_id: int, epoch: int) -> None:
        """See LinkPort."""
        mirror = self._mirrors.pop(sequence_id, None)
        self._questions.pop(sequence_id, None)
        if mirror is not None:
            self._asking[mirror.drafter].close(mirror.handle)

    def flush(self) -> None:
        """See LinkPort: ``answer`` sees it all."""

    # --- the drafters -----------------------------------------------------------------------------------------

    def answer(self, drafts: Drafts, clock: VirtualClock, waited: Set[int]) -> None:
        """Every open question, each drafter's together; then whatever waits for a quiet moment.

        Time goes on to the last answer to one of ``waited``: the other questions are asked in passing. Raises what drafters raise.
        """
        questions, self._questions = self._questions, {}
        began = latest = clock.now
        for name, asking in self._asking.items():
            ids = [one for one in questions if self._mirrors[one].drafter == name]
            if not ids:
                continue
            clock.now = began  # drafters work side by side
            with clock:
                batch = [(one, self._request(self._mirrors[one], questions[one])) for one in ids]
                answers = self._asked(asking, batch, drafts)
            draft_s = clock.now - began
            drafts.proposed(
                ENDPOINT,
                [
                    Proposal(Stamp(one, mirror.epoch, len(mirror.token_ids)), guesses, draft_s, (), draft_s)
                    for one, guesses in answers
                    if (mirror := self._mirrors.get(one)) is not None
                ],
                clock.now + _LINK_S,
            )
            if not waited.isdisjoint(ids):
                latest = max(latest, clock.now + _LINK_S)
        clock.now = latest
        for asking in self._asking.values():
            asking.tidy()

    def _ask(self, sequence_id: int, k: int) -> None:
        if k:
            self._questions[sequence_id] = k
        else:
            self._questions.pop(sequence_id, None)

    def _request(self, mirror: _Mirror, k: int) -> DraftRequest:
        return DraftRequest(
            mirror.handle,
            [*mirror.token_ids],
            mirror.prompt_len,
            mirror.sampling,
            k,
            self._vocab_size,
            scope=mirror.scope,
        )

    def _asked(
        self, asking: Asking, batch: Sequence[tuple[int, DraftRequest]], drafts: Drafts
    ) -> list[tuple[int, list[int]]]:
        """One batch; one by one where there is no room for all, so that only those without are refused."""
        try:
            guesses = asking.ask([request for _, request in batch])
        except CapacityError:
            if len(batch) > 1:
                return [answer for one in batch for answer in self._asked(asking, [one], drafts)]
            self._refuse(batch[0][0], drafts, Refusal.LATER)
            return []
        answers = []
        for (sequence_id, _), found in zip(batch, guesses, strict=True):
            if found is None:
                self._refuse(sequence_id, drafts, Refusal.FINAL)
            else:
                answers.append((sequence_id, found))
        return answers

    def _refuse(self, sequence_id: int, drafts: Drafts, reason: Refusal) -> None:
        drafts.refused(ENDPOINT, sequence_id, self._mirrors[sequence_id].epoch, reason)
