"""Committed tokens become text that may be shown: whole characters, cut exactly where the output ends.

The output ends with the first character that completes a stop string (of several that complete there, the longest
counts), with a stop token, or with the last token of the budget. None of this depends on how the tokens were grouped into
runs. A stop string and a stop token's text are not part of the output; the token that completed it is delivered and
counted all the same, because it was decoded.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.tokenizer import DecodeStream
from paceline.types import FinishReason


class StopScanner:
    """Finds the first of several stop strings in a stream of text (Aho and Corasick 1975), a character at a time.

    Text is passed on as soon as no stop string can begin in it.
    """

    __slots__ = ("_depth", "_found", "_held", "_link", "_next", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        # One node a prefix of a stop string; node 0 is the empty prefix.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]  # longest stop string that ends here
        for stop in stops:
            self._add(stop)
        self._link = self._links()  # longest proper suffix of a prefix that is a prefix itself
        self._state = 0
        self._held = ""  # what the state stands for: text that may be the beginning of a stop string

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended it, if one did."""
        if len(self._next) == 1:  # no stop string, nothing to look for
            return text, None
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            self._state = self._step(self._state, buffer[end - 1])
            stop = self._found[self._state]
            if stop is not None:
                self._state, self._held = 0, ""
                return buffer[: end - len(stop)], stop
        certain = len(buffer) - self._depth[self._state]
        self._held = buffer[certain:]
        return buffer[:certain], None

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self._next[node].get(character)
            if child is None:
                child = self._next[node][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(None)
            node = child
        self._found[node] = stop

    def _links(self) -> list[int]:
        self._link = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._link[child] = self._step(self._link[node], character)
                queue.append(child)
            if self._found[node] is None:
                self._found[node] = self._found[self._link[node]]
        return self._link

    def _step(self, node: int, character: str) -> int:
        while character not in self._next[node]:
            if node == 0:
                return 0
            node = self._link[node]
        return self._next[node][character]


@dataclass(frozen=True, slots=True)
class TextRun:
    """What a run of tokens adds to the output: its text and its first ``num_ids`` ids; ``end`` if it is the last."""

    text: str
    num_ids: int
    end: FinishReason | None = None
    matched_stop: str | None = None


class OutputText:
    """The output of one request, token by token. Owned by one request; after an ``end`` nothing may be pushed."""

    __slots__ = ("_budget", "_scanner", "_stop_token_ids", "_stream")

    def __init__(
        self, stream: DecodeStream, *, stops: Sequence[str], stop_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        self._stream = stream
        self._scanner = StopScanner(stops)
        self._stop_token_ids = stop_token_ids
        self._budget = max_tokens

    def push(self, token_ids: Sequence[int]) -> TextRun:
        """What ``token_ids`` add; ids behind the end are not part of the output."""
        pieces: list[str] = []
        for num_ids, token_id in enumerate(token_ids, start=1):
            self._budget -= 1
            is_stop = token_id in self._stop_token_ids
            if not is_stop:
                piece, stop = self._scanner.feed(self._stream.push(token_id))
                pieces.append(piece)
                if stop is not None:
                    return TextRun("".join(pieces), num_ids, FinishReason.STOP, stop)
            if is_stop or self._budget == 0:
                last = self.finish(FinishReason.STOP if is_stop else FinishReason.LENGTH)
                return TextRun("".join(pieces) + last.text, num_ids, last.end, last.matched_stop)
        return TextRun("".join(pieces), len(token_ids))

    def finish(self, reason: FinishReason) -> TextRun:
        """The text that was held back, when no token follows. Its last bytes may still complete a stop string."""
        text, stop = self._scanner.feed(self._stream.flush())
        if stop is not None:
            return TextRun(text, 0, FinishReason.STOP, stop)
        return TextRun(text + self._scanner.flush(), 0, reason)
