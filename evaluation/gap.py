"""How close the two best choices were at a position: what to look at when two runs differ."""

from functools import cache

from evaluation.workload import Prompt
from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.model_store import resolve_model_dir
from paceline.sampling import Domain, TokenRow, gumbel, processed_logprobs, top2_gap
from paceline.tokenizer import Tokenizer
from paceline.types import SamplingParams


@cache
def _load(model: str) -> tuple[Runner, Tokenizer]:
    runner = load_runner(ModelConfig(name=model), kv_slots=1, max_context=2048)
    return runner, Tokenizer.load(resolve_model_dir(model))


def choice_gap(model: str, prompt: Prompt, output: tuple[int, ...], temperature: float) -> float:
    """Top-2 gap of what decides the token behind prompt and output: logits, or log-probabilities plus noise."""
    runner, tokenizer = _load(model)
    prompt_ids = tokenizer.encode_chat([("user", prompt.text)])
    ids = [*prompt_ids, *output]
    slot = runner.kv.acquire()
    assert slot is not None, "the only user of this runner"
    try:
        logits = runner.forward([Segment(slot, 0, ids, 1)])
    finally:
        runner.kv.release(slot)
    if temperature == 0.0:
        return float(top2_gap(logits)[0])
    params = SamplingParams(temperature=temperature, seed=int(prompt.id))
    scores = processed_logprobs(logits, [TokenRow(params, len(ids), prompt_ids, output)])
    noise = gumbel(params.seed, len(ids), Domain.COUPLED, logits.shape[-1], logits.device)
    return float(top2_gap(scores + noise)[0])
