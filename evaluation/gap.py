"""How close the two best choices were at a position: what to look at when two runs differ."""

from collections.abc import Sequence
from functools import cache

from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.sampling import Domain, TokenRow, gumbel, processed_logprobs, top2_gap
from paceline.types import SamplingParams


@cache
def _load(model: ModelConfig) -> Runner:
    return load_runner(model, kv_slots=1, max_context=8192)


def choice_gap(
    model: ModelConfig, prompt_ids: Sequence[int], output: Sequence[int], sampling: SamplingParams
) -> float:
    """Top-2 gap of what decides the token behind prompt and output: logits, or log-probabilities plus noise."""
    runner = _load(model)
    ids = [*prompt_ids, *output]
    slot = runner.kv.acquire()
    assert slot is not None, "the only user of this runner"
    try:
        logits = runner.forward([Segment(slot, 0, ids, 1)])
    finally:
        runner.kv.release(slot)
    if sampling.temperature == 0.0:
        return float(top2_gap(logits)[0])
    scores = processed_logprobs(logits, [TokenRow(sampling, len(ids), prompt_ids, output)])
    noise = gumbel(sampling.seed, len(ids), Domain.COUPLED, logits.shape[-1], logits.device)
    return float(top2_gap(scores + noise)[0])
