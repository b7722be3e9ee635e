"""The output tokens of one request by position: what another verify replica needs to go on without gap or repeat (I7)."""

from collections.abc import Sequence

from paceline.errors import EngineError


class JournalError(EngineError):
    """A verify replica sent tokens for a position that is not the next one."""


class Journal:
    """Committed output tokens, appended in order and never changed. Owned by one request."""

    __slots__ = ("_prompt_len", "_token_ids")

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._token_ids: list[int] = []

    def __len__(self) -> int:
        """Output tokens so far."""
        return len(self._token_ids)

    @property
    def next_position(self) -> int:
        """Absolute position of the next token."""
        return self._prompt_len + len(self._token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens; do not change them."""
        return self._token_ids

    def append(self, position: int, token_ids: Sequence[int]) -> None:
        """Write down a run that begins at ``position``. Raises JournalError, and stays as it was, unless it is next."""
        if not token_ids:
            raise JournalError(f"an empty run at position {position}")
        if position != self.next_position:
            what = "repeats tokens" if position < self.next_position else "leaves a gap"
            raise JournalError(
                f"a run at position {position} {what}: the next position is {self.next_position}"
            )
        self._token_ids.extend(token_ids)
