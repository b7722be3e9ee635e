"""FAULTS.md, "Same output": what other servers got wrong about tokens, asked of the whole system."""

import asyncio

import pytest
from stack import Stack

from paceline.types import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ["The riders take turns at the front", "def add(left, right):", '{"name": "Ada"', "🙂🚀 今天"]
SAMPLED = {"temperature": 0.8, "seed": 11}
GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, {"temperature": 1.5, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_a_bad_drafter_changes_nothing(stack: Stack, prompt: str, sampling: dict) -> None:
    """Acceptance near 0: every round rolls back, and the tokens are those of plain decoding."""
    plain = await stack.generate(text=prompt, max_tokens=40, **sampling)
    bad = await stack.generate(text=prompt, max_tokens=40, drafter="random", k=5, **sampling)
    assert bad.token_ids == plain.token_ids
    assert bad.text == plain.text
    stats = bad.finished.speculative
    assert stats.num_draft_tokens > 100
    assert stats.num_accepted_draft_tokens < 0.1 * stats.num_draft_tokens


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
async def test_the_target_as_its_own_drafter_is_always_right(stack: Stack, sampling: dict) -> None:
    """Self-draft acceptance is 1.0, sampled too: drafter and target share the noise."""
    plain = await stack.generate(text=PROMPTS[0], max_tokens=41, **sampling)
    own = await stack.generate(text=PROMPTS[0], max_tokens=41, drafter="self", k=4, **sampling)
    assert own.token_ids == plain.token_ids
    stats = own.finished.speculative
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 0
    assert stats.num_rounds == 8  # the prefill's token, then 8 x 5


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "model", "cascade", "random", "self"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
async def test_no_block_length_changes_the_output(stack: Stack, drafter: str, sampling: dict) -> None:
    """k in {1, 2, 4, 8, 16}: the same tokens."""
    plain = await stack.generate(text=PROMPTS[1], max_tokens=48, **sampling)
    for k in (1, 2, 4, 8, 16):
        answer = await stack.generate(text=PROMPTS[1], max_tokens=48, drafter=drafter, k=k, **sampling)
        assert answer.token_ids == plain.token_ids, f"k={k}"


async def test_a_useful_drafter_is_used(stack: Stack) -> None:
    """The draft model of the pair agrees often, so rounds commit more than one token."""
    answer = await stack.generate(text=PROMPTS[0], max_tokens=60, drafter="model", k=4, temperature=0.0)
    stats = answer.finished.speculative
    assert stats.draft_acceptance_rate is not None
    assert 0.2 < stats.draft_acceptance_rate < 1.0
    assert stats.mean_acceptance_length is not None
    assert stats.mean_acceptance_length > 1.5


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
async def test_company_in_the_batch_changes_nothing(stack: Stack, sampling: dict) -> None:
    """Alone, in a batch of 16 with mixed plans, and beside a long prefill."""
    request = {"text": PROMPTS[0], "max_tokens": 40, "drafter": "model", "k": 4, **sampling}
    alone = await stack.generate(**request)
    others = [
        stack.generate(
            text=f"{i} {PROMPTS[i % 4]}",
            max_tokens=40,
            temperature=1.0,
            seed=i,
            **(
                {"drafter": ("random", "ngram", "model", "suffix", "cascade")[i % 5], "k": i % 7 + 1}
                if i % 4
                else {}
            ),
        )
        for i in range(15)
    ]
    batched, *_ = await asyncio.gather(stack.generate(**request), *others)
    assert batched.token_ids == alone.token_ids
    prefill = stack.generate(token_ids=[5 + i % 400 for i in range(900)], max_tokens=2)
    beside, _ = await asyncio.gather(stack.generate(**request), prefill)
    assert beside.token_ids == alone.token_ids


async def test_one_token_prompt(stack: Stack) -> None:
    """The shortest prompt works, plain and speculative."""
    plain = await stack.generate(token_ids=[70], max_tokens=20, **GREEDY)
    spec = await stack.generate(token_ids=[70], max_tokens=20, drafter="model", k=4, **GREEDY)
    assert spec.started.prompt_tokens == 1
    assert spec.token_ids == plain.token_ids


async def test_empty_continuation(stack: Stack) -> None:
    """The very first token ends the output: one id, no text, finish reason stop."""
    first = (await stack.generate(text=PROMPTS[0], max_tokens=1, **GREEDY)).token_ids[0]
    for extra in ({}, {"drafter": "model", "k": 4}):
        answer = await stack.generate(
            text=PROMPTS[0], max_tokens=20, stop_token_ids=[first], **GREEDY, **extra
        )
        assert answer.token_ids == [first]
        assert answer.finished.finish_reason is FinishReason.STOP
        assert answer.finished.speculative.num_rounds == 0


@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.7},
        {"logit_bias": {70: 5.0, 71: -100.0}},
        {"top_k": 3, "temperature": 0.9, "seed": 5},
        {"min_p": 0.1, "temperature": 0.9, "seed": 5},
    ],
)
@pytest.mark.parametrize("drafter", ["random", "model"])
async def test_processors_see_committed_tokens_only(stack: Stack, penalty: dict, drafter: str) -> None:
    """Rejected drafts leave no trace in penalty counts; processors are not ignored either."""
    request = {"text": PROMPTS[0], "max_tokens": 40, "temperature": 0.0} | penalty
    plain = await stack.generate(**request)
    assert (await stack.generate(**request, drafter=drafter, k=4)).token_ids == plain.token_ids
    if "top_k" not in penalty and "min_p" not in penalty:
        without = await stack.generate(text=PROMPTS[0], max_tokens=40, temperature=0.0)
        assert plain.token_ids != without.token_ids


async def test_seeds_matter_and_are_reproducible(stack: Stack) -> None:
    """Distinct seeds, distinct outputs at T = 1.5; the same seed, the same; top_k = 1 is greedy."""
    outputs = {
        tuple(
            (
                await stack.generate(text=PROMPTS[0], max_tokens=16, temperature=1.5, seed=s, drafter="model")
            ).token_ids
        )
        for s in range(6)
    }
    assert len(outputs) == 6
    greedy = await stack.generate(text=PROMPTS[0], max_tokens=16, temperature=0.0)
    top1 = await stack.generate(text=PROMPTS[0], max_tokens=16, temperature=1.5, seed=9, top_k=1)
    assert top1.token_ids == greedy.token_ids


async def test_a_seed_that_the_server_picked_can_be_used_again(stack: Stack) -> None:
    """The reply names the seed in force."""
    first = await stack.generate(text=PROMPTS[0], max_tokens=16, temperature=1.5)
    again = await stack.generate(
        text=PROMPTS[0], max_tokens=16, temperature=1.5, seed=first.started.seed, drafter="model", k=3
    )
    assert again.token_ids == first.token_ids
