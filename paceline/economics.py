"""What speculation gives and costs, as arithmetic: tokens a round, break-even, the best k. No clock, no state.

Two notions of acceptance, never to be mixed. *Acceptance* a is the chance that a draft token is accepted where all before
it were; chances to get so far multiply. The *accepted share* is accepted over drafted tokens: what counters give, smaller,
since what lies behind the first wrong token is drafted and lost. A round with k draft tokens gives
E = 1 + a + a^2 + ... + a^k = (1 - a^(k+1)) / (1 - a) tokens, the target's own one included (Leviathan, Kalman, Matias 2023).
"""

from collections.abc import Callable, Sequence

SECOND_GUESS = 0.6
"""Assumed until seen: where a guess is wrong, the drafter's next one at that position is right so often."""


def survival(acceptance: Sequence[float], k: int) -> list[float]:
    """Chance that the first j draft tokens are all accepted, j = 1 to ``k``; the last acceptance holds for all behind it."""
    found, alive = [], 1.0
    for position in range(k):
        alive *= acceptance[min(position, len(acceptance) - 1)]
        found.append(alive)
    return found


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens of a round with ``k`` draft tokens, the target's own one included."""
    if acceptance == 1.0:
        return k + 1.0
    return (1.0 - acceptance ** (k + 1)) / (1.0 - acceptance)


def accepted_share(acceptance: float, k: int) -> float:
    """Accepted over drafted tokens at that acceptance, in rounds of ``k`` draft tokens."""
    return (expected_tokens(acceptance, k) - 1.0) / k


def needed_tokens(round_s: float, plain_s: float) -> float:
    """Tokens that a round must give to be as fast as plain decoding: it took so many plain steps."""
    return round_s / plain_s


def break_even_share(round_s: float, plain_s: float, drafted: float) -> float:
    """The accepted share at which a round with ``drafted`` tokens is as fast as plain decoding, within 0 and 1."""
    return min(1.0, max(0.0, (needed_tokens(round_s, plain_s) - 1.0) / drafted))


def break_even_acceptance(round_s: float, plain_s: float, k: int) -> float | None:
    """The acceptance at which it is; None where even a round of which everything is accepted is slower."""
    needed = needed_tokens(round_s, plain_s)
    if needed > k + 1:
        return None
    return _solved(lambda acceptance: expected_tokens(acceptance, k), needed)


def best_k(tokens_a_second: Sequence[float]) -> int:
    """Given the speed with k = 0, 1, 2, ...: the fastest k, the smaller one of equals; 0 is plain decoding."""
    return max(range(len(tokens_a_second)), key=lambda k: (tokens_a_second[k], -k))


# --- ahead of the verdict (DESIGN section 5) --------------------------------------------------------------------


def expected_hit_rate(reached: Sequence[float], k: int, *, level: int, fan: int = 0) -> float:
    """Chance that the block drafted ahead is for the actual outcome. ``reached``: ``survival`` of k + 1 positions."""
    all_accepted = reached[k - 1]
    if level == 1:
        return reached[k]
    corrected = 1.0 - (1.0 - SECOND_GUESS) ** fan
    bonus = reached[k] / all_accepted if all_accepted else 0.0
    bonus += (1.0 - bonus) * (1.0 - (1.0 - SECOND_GUESS) ** (fan - 1))
    return all_accepted * bonus + (1.0 - all_accepted) * corrected


def waiting_round_s(step_s: float, rtt_s: float, draft_s: float) -> float:
    """A round in which everything waits for the verdict."""
    return step_s + rtt_s + draft_s


def ahead_round_s(
    step_s: float, rtt_s: float, draft_s: float, *, ahead_s: float, ahead_pass_s: float, hit_rate: float
) -> float:
    """A round with drafting ahead, which takes ``ahead_s`` of forwards of ``ahead_pass_s`` each.

    A hit pays the longer of step and drafting; after a miss the drafter is in the middle of a forward.
    """
    waiting_s = waiting_round_s(step_s, rtt_s, draft_s)
    hit_s = min(max(step_s, ahead_s + rtt_s), waiting_s)
    missed_s = waiting_s + (ahead_pass_s / 2 if ahead_s > step_s else 0.0)
    return hit_rate * hit_s + (1.0 - hit_rate) * missed_s


def _solved(rising: Callable[[float], float], wanted: float) -> float:
    """Where ``rising`` over [0, 1] has the wanted value; an end where it has it nowhere."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return high if high == 1.0 else low
