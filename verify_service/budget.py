"""How much prompt a step may hold beside running streams: chunked prefill that does not make them stutter."""

MAX_STRETCH = 2.0
"""A step with prompt tokens in it may take so many times a step without (inter-token gap of running streams)."""
_FIRST_GUESS = 16
_KEEP = 0.8  # of the running mean, per observation


class PrefillBudget:
    """Learns what a step costs without prompt tokens and what each prompt token adds; thread of the engine."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._decode_step_s: float | None = None
        self._token_s: float | None = None

    def tokens(self, *, decodes: bool) -> int:
        """Prompt tokens that the next step may hold; ``decodes``: streams are running beside it."""
        if not decodes:
            return self._most
        if self._decode_step_s is None or self._token_s is None:
            return min(_FIRST_GUESS, self._most)
        fitting = (MAX_STRETCH - 1) * self._decode_step_s / self._token_s
        # Never none: the streams pay for the weights anyway, and behind thousands of tokens one more may cost half a step.
        return max(1, min(int(fitting), self._most))

    def observe(self, step_s: float, prompt_tokens: int, *, decodes: bool) -> None:
        """A step took ``step_s`` with so many prompt tokens in it."""
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
