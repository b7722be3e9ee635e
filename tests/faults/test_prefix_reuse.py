"""Prefix reuse through the whole system: the same tokens warm and cold, the same hits with and without speculation."""

import pytest
from stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

SYSTEM = (
    "The riders take turns at the front of the line, where the wind is strongest, and then fall back to rest. "
    * 2
)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}])
async def test_warm_and_cold_give_the_same_tokens_and_hits(stack: Stack, sampling: dict) -> None:
    """A conversation over three turns: each turn finds the earlier ones, plain and speculative alike."""
    answers = {}
    for way, extra in (("plain", {}), ("spec", {"drafter": "model", "k": 4})):
        tenant = f"{way} at {sampling['temperature']}"
        messages = [("system", SYSTEM)]
        for turn in range(3):
            messages.append(("user", f"Go on, {turn}."))
            request = {"messages": list(messages), "max_tokens": 30, **sampling, **extra}
            warm = await stack.generate(**request, tenant=tenant)
            cold = await stack.generate(**request, tenant=f"{tenant}, turn {turn}")
            assert warm.token_ids == cold.token_ids
            assert cold.finished.usage.cached_prompt_tokens == 0
            usage = warm.finished.usage
            assert usage.cached_prompt_tokens < usage.prompt_tokens
            answers.setdefault(turn, []).append((warm.token_ids, usage.cached_prompt_tokens))
            messages.append(("assistant", warm.text))
    for turn, (plain, spec) in answers.items():
        assert plain == spec
        assert (plain[1] > 50) == (turn > 0)


async def test_tenants_do_not_share(stack: Stack) -> None:
    """The same prompt for another tenant is run from its first token."""
    first = await stack.generate(text=SYSTEM, max_tokens=2, temperature=0.0, tenant="x")
    again = await stack.generate(text=SYSTEM, max_tokens=2, temperature=0.0, tenant="x")
    other = await stack.generate(text=SYSTEM, max_tokens=2, temperature=0.0, tenant="y")
    assert first.finished.usage.cached_prompt_tokens == 0
    assert again.finished.usage.cached_prompt_tokens == again.finished.usage.prompt_tokens - 1
    assert other.finished.usage.cached_prompt_tokens == 0
    assert first.token_ids == again.token_ids == other.token_ids
