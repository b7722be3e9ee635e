"""How much prompt a step may hold beside running streams: chunked prefill that does not make them stutter."""

MAX_STRETCH = 2.0
"""A step with prompt tokens in it may take so many times a step without (inter-token gap of running streams)."""
_FIRST_GUESS = 16
_BREATH = 10
"""Every so many steps one goes without prompt tokens: only that tells what such a step costs now, on a machine that has slowed down."""
_KEEP = 0.8  # of the running mean, per observation


class PrefillBudget:
    """Learns what a step costs without prompt tokens and what each prompt token adds; thread of the engine."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._decode_step_s: float | None = None
        self._token_s: float | None = None
        self._steps_since = 0  # with prompt tokens beside streams, since one without

    def tokens(self, *, decodes: bool) -> int:
        """Prompt tokens that the next step may hold, 0 now and then; ``decodes``: streams are running beside it."""
        if not decodes:
            return self._most
        if self._steps_since >= _BREATH:
            return 0
        if self._decode_step_s is None or self._token_s is None:
            return min(_FIRST_GUESS, self._most)
        fitting = (MAX_STRETCH - 1) * self._decode_step_s / self._token_s
        # Never none for long: behind thousands of tokens one more may cost half a step, and the prompt has to end.
        return max(1, min(round(fitting), self._most))

    def observe(self, step_s: float, prompt_tokens: int, *, decodes: bool) -> None:
        """A step took ``step_s`` with so many prompt tokens in it."""
        self._steps_since = self._steps_since + 1 if prompt_tokens and decodes else 0
        if not prompt_tokens:
            self._decode_step_s = _mean(self._decode_step_s, step_s)
        elif self._decode_step_s is None or not decodes:
            # Alone, the prompt pays for the weights as well: an upper bound, good enough to start from.
            if self._token_s is None:
                self._token_s = step_s / prompt_tokens
        else:
            added_s = max(step_s - self._decode_step_s, 0.05 * step_s)
            self._token_s = _mean(self._token_s, added_s / prompt_tokens)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else _KEEP * mean + (1 - _KEEP) * value
