"""How often the actual outcome of a round is among those drafted ahead, by law, temperature, level and F. No devices.

A target distribution and a blurred copy of it (the drafter's) for every position; both draw as the real law does. Under
the coupled law the drafter ranks the target's likely tokens by log q + g, with the noise g that the target will use. Under
the ratio law a guess is kept with min(1, p / q), the correction is drawn from what p has above q, and the drafter, which
does not know p, can only rank by q.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from paceline.sampling import Domain, gumbel
from paceline.types import SamplingParams

VOCAB = 2000
ZIPF = 1.2
BLURS = {"close": 0.7, "far": 1.4}
"""Standard deviation of what is added to the target's logits."""
TEMPERATURES = (0.0, 0.7, 1.0)


def hit_rates(*, positions: int, k: int = 4, seed: int = 5) -> dict[str, dict[str, float]]:
    """By setting: acceptance per position and the hit rates, of rounds of ``k`` guesses."""
    found = {}
    for blur, spread in BLURS.items():
        for temperature in TEMPERATURES:
            for law in ("coupled", "ratio") if temperature else ("coupled",):
                name = f"{blur}, T={temperature:g}, {law if temperature else 'greedy'}"
                found[name] = _rates(positions // k, k, spread, temperature, law, seed)
    return found


At = Callable[[int, int, bool], tuple[int, list[int]]]
"""(base, j, is it the bonus): the token committed j behind base, and the drafter's four likeliest, the first its guess."""


def rounds_of(played: Sequence[tuple[At, int]], k: int) -> dict[str, float]:
    """Rounds of ``k`` guesses from every base of every text: acceptance per position and hit rates."""
    agreed = tested = rounds = 0
    hits = {"1": 0, "2, F=1": 0, "2, F=3": 0}
    for at, bases in played:
        for base in range(bases):
            # Along a round the drafter's guesses are the context, so a row for each position is all that is needed.
            accepted, exact, within = k, False, dict.fromkeys((1, 3), False)
            for j in range(k + 1):
                target, ranked = at(base, j, j == k)
                if j < k:
                    tested += 1
                    if ranked[0] == target:
                        agreed += 1
                        continue
                    accepted = j
                    within = {fan: target in ranked[1 : fan + 1] for fan in within}
                    break
                exact = ranked[0] == target
                within = {fan: target in ranked[:fan] for fan in within}
            hits["1"] += accepted == k and exact
            hits["2, F=1"] += within[1]
            hits["2, F=3"] += within[3]
            rounds += 1
    rates = {name: round(count / max(rounds, 1), 3) for name, count in hits.items()}
    return {"acceptance": round(agreed / max(tested, 1), 3), **rates, "rounds": rounds}


def _rates(rounds: int, k: int, spread: float, temperature: float, law: str, seed: int) -> dict[str, float]:
    def at(base: int, j: int, bonus: bool) -> tuple[int, list[int]]:
        return _position(base * (k + 1) + j, spread, temperature, law, seed, bonus=bonus)

    return rounds_of([(at, rounds)], k)


def _position(
    position: int, spread: float, temperature: float, law: str, seed: int, *, bonus: bool
) -> tuple[int, list[int]]:
    """The token that is committed and the drafter's four likeliest, the first being its guess."""
    dice = np.random.default_rng((seed, position))
    logits = -ZIPF * np.log(np.arange(1, VOCAB + 1)) * math.sqrt(2) + 0.8 * dice.standard_normal(VOCAB)
    blurred = logits + spread * dice.standard_normal(VOCAB)
    if law == "coupled":
        params = SamplingParams(temperature=temperature, seed=seed)
        return coupled_rank(logits, params, position)[0], coupled_rank(blurred, params, position)
    return ratio_play(softmax(logits / temperature), softmax(blurred / temperature), dice, bonus=bonus)


def coupled_rank(logits: "np.ndarray", params: SamplingParams, position: int) -> list[int]:
    """The four best by log p + noise; at temperature 0 without noise."""
    if params.temperature == 0:
        return _top(logits)
    noise = gumbel(params.seed, position, Domain.COUPLED, len(logits)).numpy()
    return _top(logits / params.temperature + noise)


def ratio_play(
    target_probs: "np.ndarray", draft_probs: "np.ndarray", dice: np.random.Generator, *, bonus: bool
) -> tuple[int, list[int]]:
    """One position under the ratio law; the drafter, which does not know p, can only rank by q."""
    if bonus:
        return int(dice.choice(len(target_probs), p=target_probs)), _top(draft_probs)
    guess = int(dice.choice(len(draft_probs), p=draft_probs))
    ranked = [guess, *[token for token in _top(draft_probs) if token != guess]][:4]
    if dice.random() * draft_probs[guess] < target_probs[guess]:
        return guess, ranked
    above = np.maximum(target_probs - draft_probs, 0.0)
    return int(dice.choice(len(above), p=above / above.sum())), ranked


def softmax(scores: "np.ndarray") -> "np.ndarray":
    """In float64, so that the sum is 1."""
    weights = np.exp(scores.astype(np.float64) - scores.max())
    return weights / weights.sum()


def _top(scores: "np.ndarray") -> list[int]:
    four = np.argpartition(scores, -4)[-4:]
    return [int(token) for token in four[np.argsort(-scores[four])]]
