"""How much prompt a step may hold beside running streams: chunked prefill that does not make them stutter."""

from collections import deque
from statistics import median

MAX_STRETCH = 1.7
"""A step with prompt tokens in it may take so many times a step without (inter-token gap of running streams), ..."""
MOST_CROWD = 8.0
"""... and be stretched by more where more requests wait for their first token than are decoding, up to so many times as much: else a few
streams go on undisturbed while all others queue behind prompts that come in a few tokens at a time, at twice the cost each."""
_FIRST_GUESS = 16
_BREATH = 10
"""Every so many steps one goes without prompt tokens: only that tells what such a step costs now, on a machine that has slowed down."""
_LOOK_BACK = 9  # steps; a median, since a step that the machine interrupted says nothing of what fits


class PrefillBudget:
    """Learns what a step costs without prompt tokens and what each prompt token adds; thread of the engine."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._decode_steps_s: deque[float] = deque(maxlen=_LOOK_BACK)
        self._tokens_s: deque[float] = deque(maxlen=_LOOK_BACK)
        self._steps_since = 0  # with prompt tokens beside streams, since one without

    def tokens(self, *, decoding: int, waiting: int) -> int:
        """Prompt tokens that the next step may hold, 0 now and then: ``decoding`` streams run beside them, ``waiting`` have no token yet."""
        if not decoding:
            return self._most
        if self._steps_since >= _BREATH:
            return 0
        if not self._decode_steps_s or not self._tokens_s:
            return min(_FIRST_GUESS, self._most)
        crowd = min(max(waiting / decoding, 1.0), MOST_CROWD)
        fitting = crowd * (MAX_STRETCH - 1) * median(self._decode_steps_s) / median(self._tokens_s)
        # Never none for long: behind thousands of tokens one more may cost half a step, and the prompt has to end.
        return max(1, min(round(fitting), self._most))

    def observe(self, step_s: float, prompt_tokens: int, *, decodes: bool) -> None:
        """A step took ``step_s`` with so many prompt tokens in it."""
        self._steps_since = self._steps_since + 1 if prompt_tokens and decodes else 0
        if not prompt_tokens:
            self._decode_steps_s.append(step_s)
        elif not self._decode_steps_s or not decodes:
            # Alone, the prompt pays for the weights as well: an upper bound, good enough to start from.
            if not self._tokens_s:
                self._tokens_s.append(step_s / prompt_tokens)
        else:
            added_s = max(step_s - median(self._decode_steps_s), 0.05 * step_s)
            self._tokens_s.append(added_s / prompt_tokens)
