"""FAULTS.md, "Stops, budgets, counts" and "Numbers that lie", asked of the whole system."""

import asyncio
import itertools

import pytest
from stack import Answer, Stack

from paceline.client import RequestSummary
from paceline.types import FinishReason, ProposalOutcome

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The riders take turns at the front of the line"
DRAFTERS = ["ngram", "suffix", "model", "cascade", "random", "self"]


async def summary(stack: Stack, answer: Answer) -> RequestSummary:
    (found,) = await stack.client.list_requests(request_id=answer.started.request_id)
    return found


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_nothing_follows_an_end_token_inside_an_accepted_block(stack: Stack, drafter: str) -> None:
    """Whichever token of the output is made the end: it is the last one, and the reason is stop."""
    plain = await stack.generate(text=PROMPT, max_tokens=30, temperature=0.0)
    for end in range(1, 16, 2):
        stop = plain.token_ids[end]
        answer = await stack.generate(
            text=PROMPT, max_tokens=30, temperature=0.0, stop_token_ids=[stop], drafter=drafter, k=6
        )
        assert answer.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
        assert answer.finished.finish_reason is FinishReason.STOP


async def test_agreed_tokens_behind_the_end_are_ignored_not_accepted(stack: Stack) -> None:
    """The target as its own drafter agrees behind the end as well: counted apart."""
    plain = await stack.generate(text=PROMPT, max_tokens=30, temperature=0.0)
    end = next(i for i in range(2, 6) if plain.token_ids[i] not in plain.token_ids[:i])
    answer = await stack.generate(
        text=PROMPT,
        max_tokens=30,
        temperature=0.0,
        stop_token_ids=[plain.token_ids[end]],
        drafter="self",
        k=8,
    )
    stats = answer.finished.speculative
    assert stats.num_draft_tokens == 8
    assert (stats.num_accepted_draft_tokens, stats.num_ignored_draft_tokens) == (end, 8 - end)


@pytest.mark.parametrize("extra", [{}, {"drafter": "self", "k": 6}, {"drafter": "random", "k": 6}])
async def test_stop_strings_cut_exactly(stack: Stack, extra: dict) -> None:
    """Any substring of the output as stop string, inside a block or across tokens: text up to it, never more."""
    plain = await stack.generate(text=PROMPT, max_tokens=40, temperature=0.0)
    for start, length in itertools.product(range(3, len(plain.text) - 8, 7), (1, 3, 6)):
        stop = plain.text[start : start + length]
        if "\ufffd" in stop:
            continue
        answer = await stack.generate(text=PROMPT, max_tokens=40, temperature=0.0, stop=[stop], **extra)
        assert answer.text == plain.text[: plain.text.index(stop)]
        assert answer.finished.finish_reason is FinishReason.STOP
        assert answer.finished.matched_stop == stop
        assert answer.finished.usage.completion_tokens == len(answer.token_ids)
        assert answer.token_ids == plain.token_ids[: len(answer.token_ids)]
        check_counts(answer)


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_max_tokens_is_exact(stack: Stack, drafter: str) -> None:
    """From 1 to k + 3: delivered = usage = asked for, reason length."""
    k = 5
    plain = await stack.generate(text=PROMPT, max_tokens=k + 3, temperature=0.0)
    for most in range(1, k + 4):
        answer = await stack.generate(text=PROMPT, max_tokens=most, temperature=0.0, drafter=drafter, k=k)
        assert answer.token_ids == plain.token_ids[:most]
        assert answer.finished.usage.completion_tokens == most
        assert answer.finished.finish_reason is FinishReason.LENGTH
        check_counts(answer)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("left", [1, 2, 4, 5, 6, 7])
async def test_the_end_of_the_context_is_respected_while_drafting(
    stack: Stack, drafter: str, left: int
) -> None:
    """Prompts of max_len - 1, -k, -k-1 and around: exactly the tokens that fit, equal to plain."""
    context = (await stack.client.server_info()).model.max_context
    prompt = [5 + i % 400 for i in range(context - left)]
    plain = await stack.generate(token_ids=prompt, temperature=0.0)
    answer = await stack.generate(token_ids=prompt, temperature=0.0, drafter=drafter, k=5)
    assert answer.token_ids == plain.token_ids
    assert len(plain.token_ids) == left
    assert answer.finished.finish_reason is FinishReason.LENGTH


async def test_chunks_add_up(stack: Stack) -> None:
    """Positions without gap, concatenated text is the whole, multi-byte characters unbroken."""
    plain = await stack.generate(text="🙂🚀 今天天气", max_tokens=80, temperature=1.2, seed=4)
    spec = await stack.generate(
        text="🙂🚀 今天天气", max_tokens=80, temperature=1.2, seed=4, drafter="self", k=7
    )
    assert spec.text == plain.text
    for answer in (plain, spec):
        at = 0
        for chunk in answer.chunks:
            if chunk.token_ids:
                assert chunk.position == at
            at += len(chunk.token_ids)
        assert at == answer.finished.usage.completion_tokens


@pytest.mark.parametrize("drafter", DRAFTERS)
async def test_sums_are_the_sums_of_the_rounds(stack: Stack, drafter: str) -> None:
    """Drafted = sum of k, accepted <= drafted, ratios of sums, histogram and survival consistent."""
    answer = await stack.generate(text=PROMPT, max_tokens=60, temperature=0.7, seed=2, drafter=drafter, k=4)
    stats = answer.finished.speculative
    rounds = (await summary(stack, answer)).rounds
    assert len(rounds) == stats.num_rounds
    assert stats.num_draft_tokens == sum(r.drafted for r in rounds)
    assert stats.num_accepted_draft_tokens == sum(r.accepted for r in rounds)
    assert 1 + sum(r.committed for r in rounds) == answer.finished.usage.completion_tokens
    assert sum(stats.acceptance_histogram) == stats.num_spec_steps == sum(r.drafted > 0 for r in rounds)
    assert [r.index for r in rounds] == list(range(len(rounds)))
    for r in rounds:
        assert 0 <= r.accepted + r.ignored <= r.drafted <= 4
        assert r.committed == r.accepted + 1 or r.ignored or r is rounds[-1]
        assert (r.drafted > 0) == (r.outcome is ProposalOutcome.USED)
    survival = [sum(r.accepted > j for r in rounds) for j in range(4)]
    assert survival == sorted(survival, reverse=True)
    if stats.num_draft_tokens:
        assert stats.draft_acceptance_rate == pytest.approx(
            stats.num_accepted_draft_tokens / stats.num_draft_tokens
        )
    check_counts(answer)


async def test_the_first_position_is_not_accepted_for_nothing(stack: Stack) -> None:
    """A random drafter's first guesses fail."""
    answer = await stack.generate(text=PROMPT, max_tokens=60, temperature=0.0, drafter="random", k=4)
    histogram = answer.finished.speculative.acceptance_histogram
    assert histogram[0] > 0.9 * sum(histogram)


async def test_ratios_without_data_are_absent(stack: Stack) -> None:
    """A plain request has no acceptance: not NaN, not 0."""
    stats = (await stack.generate(text=PROMPT, max_tokens=5, temperature=0.0)).finished.speculative
    assert stats.draft_acceptance_rate is None
    assert stats.mean_acceptance_length is None
    assert stats.num_spec_steps == stats.num_draft_tokens == 0


@pytest.mark.parametrize("extra", [{}, {"drafter": "model", "k": 4}])
async def test_the_parts_of_the_rounds_make_up_the_decode_time(stack: Stack, extra: dict) -> None:
    """draft + network + wait + verify is at least 95 % of decode time, no part is negative."""
    answer = await stack.generate(text=PROMPT, max_tokens=60, temperature=0.0, **extra)
    timings = answer.finished.timings
    parts = timings.draft_s + timings.network_s + timings.wait_s + timings.verify_s
    assert parts >= 0.95 * timings.decode_s
    assert abs(timings.overhead_s) <= 0.05 * timings.decode_s
    for r in (await summary(stack, answer)).rounds:
        assert min(r.draft_s, r.network_s, r.wait_s, r.verify_s, r.forward_s, r.accept_s) >= 0
    assert 0 < timings.time_to_first_token_s < timings.total_s


async def test_32_streams_with_mixed_plans(stack: Stack) -> None:
    """Each equals what it is alone."""

    def request(i: int) -> dict:
        extra = {"drafter": DRAFTERS[i % len(DRAFTERS)], "k": 1 + i % 6} if i % 5 else {}
        return {"text": f"{i} {PROMPT}", "max_tokens": 24, "temperature": 0.9, "seed": i, **extra}

    together = await asyncio.gather(*(stack.generate(**request(i)) for i in range(32)))
    for i in range(0, 32, 3):
        alone = await stack.generate(**request(i) | {"drafter": "random", "k": 2})
        assert together[i].token_ids == alone.token_ids


def check_counts(answer: Answer) -> None:
    """What holds for every reply: a round commits what was accepted and one token more, but for one cut by the end."""
    stats = answer.finished.speculative
    accepted, steps = stats.num_accepted_draft_tokens, stats.num_spec_steps
    assert 0 <= accepted + stats.num_ignored_draft_tokens <= stats.num_draft_tokens
    assert answer.finished.usage.completion_tokens == len(answer.token_ids)
    assert sum(stats.acceptance_histogram) == steps
    assert sum(length * rounds for length, rounds in enumerate(stats.acceptance_histogram)) == accepted
    if stats.mean_acceptance_length is None:
        assert steps == stats.num_draft_tokens == 0
    else:
        assert accepted + steps - 1 <= round(stats.mean_acceptance_length * steps) <= accepted + steps
