"""The laws ratio and block over real sockets: the distribution of what is served, and what the reply says.

At temperature 1 with top_k=3 an output of four tokens is one of 81; each has its exact probability from the target's own
logits. 300 requests a case with different seeds, chi-square with rare outputs pooled: false-alarm odds 1e-4 a case.
"""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from scipy import stats as statistics
from stack import Stack

from paceline.config import ModelConfig
from paceline.engine import Segment, load_runner
from paceline.errors import InvalidRequestError
from paceline.sampling import TokenRow, processed_logprobs
from paceline.types import Law, Mode, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 30, 77, 30, 9, 9]
LENGTH = 4
# The bias leaves three tokens that stand in the prompt, so that prompt lookup has something to guess.
SHAPE = {
    "temperature": 1.0,
    "top_k": 3,
    "frequency_penalty": 0.7,
    "logit_bias": dict.fromkeys((9, 30, 77), 30.0),
}
NUM = 300
LAWS = [Law.RATIO, Law.BLOCK]


@pytest.fixture(scope="module")
def exact(pair: tuple[Path, Path]) -> dict[tuple[int, ...], float]:
    """The target's probability of every output, from its own logits."""
    runner = load_runner(
        ModelConfig(name=str(pair[0]), dtype="float32", device="cpu", threads=1), kv_slots=1, max_context=64
    )
    slot = runner.kv.acquire()
    assert slot is not None
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for output, mass in law.items():
            if output and output[-1] in runner.eos_token_ids:
                longer[output] = mass
                continue
            runner.kv.truncate(slot, 0)
            logits = runner.forward([Segment(slot, 0, [*PROMPT, *output], 1)])
            row = TokenRow(SamplingParams(**SHAPE), len(PROMPT) + len(output), PROMPT, output)
            probs = processed_logprobs(logits, [row])[0].exp().tolist()
            longer |= {(*output, token): mass * prob for token, prob in enumerate(probs) if prob > 0}
        law = longer
    return law


async def outputs(stack: Stack, seeds: range, **decoding) -> list:
    """One answer a seed, sixteen at a time."""
    gate = asyncio.Semaphore(16)

    async def one(seed: int):
        async with gate:
            return await stack.generate(token_ids=PROMPT, max_tokens=LENGTH, seed=seed, **SHAPE, **decoding)

    return await asyncio.gather(*map(one, seeds))


def pvalue(samples: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    num, counts = len(samples), Counter(samples)
    assert set(counts) <= set(law)
    often = [output for output, mass in law.items() if mass * num >= 5]
    rest = 1 - sum(law[output] for output in often)
    observed = [counts[output] for output in often] + [num - sum(counts[output] for output in often)]
    expected = [law[output] * num for output in often] + [rest * num]
    return float(statistics.chisquare(observed, expected).pvalue)


@pytest.mark.parametrize(
    ("law", "drafter"),
    [(Law.RATIO, "model"), (Law.BLOCK, "model"), (Law.RATIO, "ngram"), (Law.BLOCK, "ngram")],
)
async def test_what_is_served_has_the_target_s_distribution(
    stack: Stack, exact: dict[tuple[int, ...], float], law: Law, drafter: str
) -> None:
    """A drafter that samples, and ones that only guess (each guess counts as certain): the target's own law."""
    answers = await outputs(stack, range(NUM), drafter=drafter, k=2, law=law)
    assert pvalue([tuple(answer.token_ids) for answer in answers], exact) > 1e-4
    assert all(answer.finished.plan.law is law for answer in answers)
    drafted = sum(answer.finished.speculative.num_draft_tokens for answer in answers)
    accepted = sum(answer.finished.speculative.num_accepted_draft_tokens for answer in answers)
    assert drafted > NUM / 4
    assert 0 < accepted < drafted


@pytest.mark.parametrize("law", LAWS)
async def test_the_target_as_its_own_drafter_loses_nothing(stack: Stack, law: Law) -> None:
    """Equal distributions, cut to the same three tokens: every draft token stays."""
    answers = await outputs(stack, range(40), drafter="self", k=2, law=law)
    drafted = sum(answer.finished.speculative.num_draft_tokens for answer in answers)
    accepted = sum(
        answer.finished.speculative.num_accepted_draft_tokens
        + answer.finished.speculative.num_ignored_draft_tokens
        for answer in answers
    )
    assert accepted == drafted > 40


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("drafter", ["model", "ngram", "random", "self"])
async def test_at_temperature_0_every_law_gives_the_plain_tokens(
    stack: Stack, law: Law, drafter: str
) -> None:
    """Greedy decoding has nothing to sample; the reply says that the law was the coupled one."""
    plain = await stack.generate(text="def add(left, right):", max_tokens=32, temperature=0.0)
    answer = await stack.generate(
        text="def add(left, right):", max_tokens=32, temperature=0.0, drafter=drafter, k=4, law=law
    )
    assert answer.token_ids == plain.token_ids
    assert answer.finished.plan.law is Law.COUPLED
    assert "temperature 0" in answer.finished.plan.reason


async def test_laws_share_a_step_without_touching_each_other(stack: Stack) -> None:
    """Coupled requests beside sampled ones give plain decoding's tokens; sampled ones repeat with their seed."""
    text, shape = "The riders take turns", {"temperature": 0.9, "max_tokens": 40}
    plain = [await stack.generate(text=text, seed=seed, **shape) for seed in range(3)]
    mixed = await asyncio.gather(
        *(
            stack.generate(text=text, seed=seed, drafter="model", k=3, law=law, **shape)
            for law in Law
            for seed in range(3)
        )
    )
    assert [answer.token_ids for answer in mixed[:3]] == [answer.token_ids for answer in plain]
    for answer in mixed:
        stats = answer.finished.speculative
        assert len(answer.token_ids) <= 40
        assert 0 <= stats.num_accepted_draft_tokens <= stats.num_draft_tokens


async def test_stops_inside_a_sampled_block_end_it(stack: Stack) -> None:
    """Nothing follows a stop token, and max_tokens is kept to the token, under both laws."""
    for law in LAWS:
        free = await stack.generate(
            text="Ada", temperature=1.0, seed=5, max_tokens=24, drafter="self", k=4, law=law
        )
        stop = free.token_ids[10]
        cut = await stack.generate(
            text="Ada",
            temperature=1.0,
            seed=5,
            max_tokens=24,
            drafter="self",
            k=4,
            law=law,
            stop_token_ids=[stop],
        )
        assert cut.token_ids.index(stop) == len(cut.token_ids) - 1
        for most in range(1, 8):
            short = await stack.generate(
                text="Ada", temperature=1.0, max_tokens=most, drafter="model", k=4, law=law, ignore_eos=True
            )
            assert len(short.token_ids) == short.finished.usage.completion_tokens == most


async def test_a_law_is_a_wish_of_speculative_requests_only(stack: Stack) -> None:
    """Under plain and automatic decoding it is refused, by name."""
    with pytest.raises(InvalidRequestError, match="ACCEPTANCE_LAW_RATIO; only with mode"):
        await stack.generate(text="Ada", max_tokens=2, mode=Mode.PLAIN, law=Law.RATIO)
