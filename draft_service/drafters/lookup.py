"""A look-up (``paceline.lookup``) as a drafter of the draft tier."""

from collections.abc import Sequence

from draft_service.drafters.base import DraftRequest
from paceline.lookup import Lookup, Weighed


class LookupDrafter:
    """Guesses from text alone: prompt lookup, suffix look-up."""

    slow = False
    max_context = 0

    def __init__(self, lookup: Lookup) -> None:
        self.name = lookup.name
        self.version = lookup.version
        self._lookup = lookup

    def open(self, handle: int) -> None:
        """Start an empty text."""
        self._lookup.open(handle)

    def propose(self, batch: Sequence[DraftRequest]) -> list[list[int] | None]:
        """Look up the suffix of each text."""
        return [weighed.token_ids for weighed in self.weigh(batch)]

    def weigh(self, batch: Sequence[DraftRequest]) -> list[Weighed]:
        """The same with the probability of each guess."""
        return [
            self._lookup.guess(
                request.handle,
                request.token_ids,
                prompt_len=request.prompt_len,
                scope=request.scope,
                k=request.k,
            )
            for request in batch
        ]

    def close(self, handle: int) -> None:
        """The text is over."""
        self._lookup.close(handle)

    def tidy(self) -> bool:
        """See Tidying."""
        return self._lookup.tidy()
