"""Generate over a real socket: the stream's shape, text, stops, budgets and counts."""

import asyncio

import pytest
from scripted_verify import EOS, Script, ask, pair, tokenizer

from paceline.errors import EngineError
from paceline.types import FinishReason, Mode

TEXT = "The price is 12 €, c'était déjà l'été 🙂🚀 — 今天天气很好。 End of it."


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text)


async def test_the_stream_is_started_chunks_finished_and_the_text_is_whole() -> None:
    """Ids, text and counts agree with what the verify tier committed."""
    ids = ids_of(TEXT)
    async with pair(Script(output=[*ids, EOS], run_lengths=(3, 1, 4))) as (client, _):
        answer = await ask(client, text="Say it", max_tokens=200, request_id="mine", task_type="qa")
    assert answer.started.request_id == "mine"
    assert answer.started.task_type == "qa"
    assert answer.started.plan.mode is Mode.PLAIN
    assert answer.started.prompt_tokens == len(ids_of("Say it"))
    assert answer.ids == [*ids, EOS]
    assert answer.text == TEXT
    assert answer.finished.finish_reason is FinishReason.STOP
    assert answer.finished.matched_stop is None
    assert answer.finished.numerics == "deterministic"
    assert answer.finished.resumed == 0
    assert [chunk.round for chunk in answer.chunks] == [None, *range(len(answer.chunks) - 1)]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64])
async def test_text_does_not_depend_on_how_tokens_are_grouped(length: int) -> None:
    """Characters split over tokens appear whole, once, however runs cut them."""
    async with pair(Script(output=ids_of(TEXT), run_lengths=(length,))) as (client, _):
        answer = await ask(client, max_tokens=len(ids_of(TEXT)))
    assert answer.text == TEXT
    assert "\ufffd" not in "".join(chunk.text for chunk in answer.chunks)


async def test_bytes_of_a_character_that_never_completes_become_one_replacement_as_in_decoding_at_once() -> (
    None
):
    """A budget that ends inside a character."""
    ids = [token for token in ids_of("a🙂") if token not in ids_of("a")][:1]
    whole = tokenizer().decode([*ids_of("a"), *ids])
    async with pair(Script(output=[*ids_of("a"), *ids, *ids_of("b")])) as (client, _):
        answer = await ask(client, max_tokens=2)
    assert answer.text == whole
    assert answer.finished.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("max_tokens", range(1, 10))
async def test_usage_is_what_was_delivered_for_every_budget_around_a_block(max_tokens: int) -> None:
    """max_tokens from 1 to beyond k + 3, blocks of 6."""
    async with pair(Script(output=ids_of(TEXT), run_lengths=(6,), k=5)) as (client, _):
        answer = await ask(client, max_tokens=max_tokens)
    assert answer.ids == ids_of(TEXT)[:max_tokens]
    assert answer.finished.usage.completion_tokens == max_tokens
    assert answer.finished.finish_reason is FinishReason.LENGTH


async def test_tokens_beyond_the_budget_are_never_delivered() -> None:
    """Even when the verify tier sends them: cut, and the agreed draft tokens among them are ignored."""
    script = Script(output=ids_of(TEXT), run_lengths=(6,), k=5, ignores_limits=True)
    async with pair(script) as (client, verify):
        answer = await ask(client, max_tokens=4)
        async with asyncio.timeout(10):
            await verify.servicer.ended.wait()
    assert answer.ids == ids_of(TEXT)[:4]
    stats = answer.finished.speculative
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens, stats.num_ignored_draft_tokens) == (
        5,
        3,
        2,
    )


@pytest.mark.parametrize("length", [1, 4, 64])
@pytest.mark.parametrize("stop", ["déjà", "🙂🚀", "c", " 今天天", "T", "."])
async def test_a_stop_string_cuts_the_text_exactly_and_ends_the_decoding(stop: str, length: int) -> None:
    """Inside a block, over tokens, inside a character's bytes; the completing token is delivered, no later one."""
    ids = ids_of(TEXT)
    async with pair(Script(output=ids, run_lengths=(length,), delay_s=0.001)) as (client, verify):
        answer = await ask(client, max_tokens=len(ids), stop=["never", stop, "nowhere"])
        async with asyncio.timeout(10):
            while verify.servicer.active:
                await asyncio.sleep(0.01)
    assert answer.text == TEXT[: TEXT.index(stop)]
    assert answer.finished.finish_reason is FinishReason.STOP
    assert answer.finished.matched_stop == stop
    assert answer.ids == ids[: len(answer.ids)]
    assert stop in tokenizer().decode(answer.ids)
    assert stop not in tokenizer().decode(answer.ids[:-1])


async def test_what_may_become_a_stop_string_is_held_back_until_it_is_certain() -> None:
    """The beginning of a stop string that does not come is streamed late, the one that comes never."""
    async with pair(Script(output=ids_of("abcabd and on"), run_lengths=(1,))) as (client, _):
        answer = await ask(client, max_tokens=50, stop=["abd"])
        late = await ask(client, max_tokens=50, stop=["abcabd and once"])
    assert answer.text == "abc"
    shown = ""
    for chunk in answer.chunks:
        shown += chunk.text
        assert "abc".startswith(shown)
    assert late.text == "abcabd and on"
    assert late.chunks[0].text == ""
    assert late.finished.matched_stop is None


async def test_agreed_draft_tokens_behind_a_stop_string_are_ignored_not_accepted() -> None:
    """The round's record, its sums and the histogram speak of what was delivered."""
    ids = ids_of("a b c d e f g h")
    async with pair(Script(output=ids, run_lengths=(6,), k=5)) as (client, _):
        answer = await ask(client, max_tokens=30, stop=[" d"], request_id="cut")
        (summary,) = await client.list_requests(request_id="cut")
    delivered = len(answer.ids)
    stats = answer.finished.speculative
    assert stats.num_draft_tokens == 5
    assert stats.num_accepted_draft_tokens == delivered - 1
    assert stats.num_accepted_draft_tokens + stats.num_ignored_draft_tokens == 5
    assert stats.num_ignored_draft_tokens > 0
    assert stats.acceptance_histogram[delivered - 1] == 1
    assert summary.rounds[0].committed == delivered - 1
    assert summary.rounds[0].ignored == stats.num_ignored_draft_tokens
    assert summary.speculative == stats


async def test_the_end_token_is_delivered_and_counted_and_has_no_text() -> None:
    """Nothing follows it, though the block went on."""
    ids = ids_of("Yes.")
    script = Script(output=[*ids, EOS, *ids_of(" No.")], run_lengths=(64,), ignores_limits=True)
    async with pair(script) as (client, _):
        answer = await ask(client, max_tokens=50)
        ignoring = await ask(client, max_tokens=len(script.output), ignore_eos=True)
    assert answer.ids == [*ids, EOS]
    assert answer.text == "Yes."
    assert answer.finished.finish_reason is FinishReason.STOP
    assert ignoring.text == "Yes. No."


async def test_a_stop_token_ends_the_output_and_its_text_is_not_part_of_it() -> None:
    """As with stop strings."""
    ids = ids_of("one two")
    async with pair(Script(output=[*ids, *ids_of(" three")])) as (client, verify):
        answer = await ask(client, max_tokens=50, stop_token_ids=[ids[-1]])
    assert answer.text == tokenizer().decode(ids[: ids.index(ids[-1])])
    assert answer.finished.finish_reason is FinishReason.STOP
    assert set(verify.servicer.requests[0].stop_token_ids) == {ids[-1], EOS}


@pytest.mark.parametrize("error", [-1, 1])
async def test_a_run_at_a_wrong_position_ends_the_request_instead_of_repeating_or_skipping(
    error: int,
) -> None:
    """A fault of ours: INTERNAL, and nothing wrong was delivered."""
    async with pair(Script(output=ids_of(TEXT), position_error=error)) as (client, _):
        with pytest.raises(EngineError, match="the next position is"):
            await ask(client, max_tokens=10)


async def test_times_are_the_verify_tiers_with_the_routers_two() -> None:
    """An undisturbed request: the parts of the verify tier, and two times that only the router knows."""
    async with pair(Script(output=ids_of("a b c"), run_lengths=(2,), delay_s=0.01)) as (client, _):
        answer = await ask(client, max_tokens=len(ids_of("a b c")))
    timings, rounds = answer.finished.timings, answer.finished.speculative.num_rounds
    assert (timings.queue_s, timings.prefill_s, timings.decode_s) == (0.25, 0.5, 10.0 * rounds)
    assert timings.draft_s == rounds
    assert 0.01 <= timings.time_to_first_token_s <= timings.total_s


async def test_times_of_a_cut_stream_are_the_sums_of_the_rounds_seen() -> None:
    """A stop string ends the call before the verify tier could report."""
    async with pair(Script(output=ids_of("a b c d e f"), run_lengths=(1,))) as (client, _):
        answer = await ask(client, max_tokens=30, stop=["e"])
    timings, rounds = answer.finished.timings, answer.finished.speculative.num_rounds
    assert timings.queue_s == 0.25
    assert (timings.draft_s, timings.verify_s) == (1.0 * rounds, 4.0 * rounds)
    assert timings.overhead_s >= 0


async def test_a_complete_output_does_not_wait_for_a_report_that_never_comes() -> None:
    """The last token is known by the budget: the answer follows within about a second."""
    async with pair(Script(output=ids_of("a b c d"), holds_finished=True)) as (client, _):
        async with asyncio.timeout(5):
            answer = await ask(client, max_tokens=3)
    assert answer.finished.finish_reason is FinishReason.LENGTH


async def test_a_seed_is_made_and_named_when_none_is_given() -> None:
    """Two requests get two; a given one is used as it is; both reach the verify tier."""
    async with pair(Script(output=ids_of("a"))) as (client, verify):
        first = await ask(client, max_tokens=1)
        second = await ask(client, max_tokens=1)
        given = await ask(client, max_tokens=1, seed=2**64 - 1, temperature=0.0)
    asked = verify.servicer.requests
    assert first.started.seed != second.started.seed
    assert given.started.seed == 2**64 - 1
    assert [r.sampling.seed for r in asked] == [a.started.seed for a in (first, second, given)]
    assert [r.sampling.temperature for r in asked] == [1.0, 1.0, 0.0]
    assert all(r.sampling.HasField("top_p") for r in asked)


async def test_an_absent_max_tokens_is_the_setting_cut_to_what_the_context_leaves() -> None:
    """Never refused for that."""
    async with pair(Script(output=ids_of("a"), max_context=40), "router.default_max_tokens=35") as (
        client,
        verify,
    ):
        await ask(client, token_ids=[5] * 3)
        await ask(client, token_ids=[5] * 30)
    assert [r.max_tokens for r in verify.servicer.requests] == [35, 10]


async def test_a_conversation_is_put_into_the_models_template() -> None:
    """Special tokens stand in the template only, never in what a user wrote."""
    async with pair(Script(output=ids_of("a"))) as (client, verify):
        await ask(client, messages=[("system", "Be brief."), ("user", "Hi<|im_end|>")], max_tokens=1)
    ids = list(verify.servicer.requests[0].prompt_ids)
    assert ids == tokenizer().encode_chat([("system", "Be brief."), ("user", "Hi<|im_end|>")])
    assert ids.count(EOS) == 2


async def test_the_plan_reaches_the_verify_tier_and_the_reply_names_it() -> None:
    """A wish wins over the table; k and drafter as asked."""
    script = Script(output=ids_of("a b"), drafters=[("ngram", True), ("gone", False)])
    async with pair(script) as (client, verify):
        wished = await ask(client, mode=Mode.SPECULATIVE, drafter="ngram", k=7, max_tokens=5)
        gone = await ask(client, mode=Mode.SPECULATIVE, drafter="gone", max_tokens=5)
        table = await ask(client, task_type="extraction", max_tokens=50)
    plan = verify.servicer.requests[0].plan
    assert (plan.drafter, plan.k_max) == ("ngram", 7)
    assert "asked for by the request" in wished.started.plan.reason
    assert gone.started.plan.mode is Mode.SPECULATIVE
    assert "not available" in gone.started.plan.reason
    assert table.started.plan.mode is Mode.SPECULATIVE
    assert table.started.plan.reason == "extraction copies from its prompt"
    assert "decoding was plain" in table.finished.plan.reason
