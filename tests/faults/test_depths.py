"""Depths chosen by the controller, in the whole system: they change no token, and every decision replays."""

import asyncio
from pathlib import Path

from stack import Stack, running_stack, stack_config

from paceline.types import DepthReason, Mode, RoundRecord
from verify_service.steering import replay

PROMPTS = ["The riders take turns at the front", "def add(left, right):", "one two one two one two one"]


async def rounds_of(stack: Stack) -> list[RoundRecord]:
    (request,) = await stack.client.list_requests(limit=1)
    return list(request.rounds)


async def test_chosen_depths_change_no_token_and_replay(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Alone and together, greedy and sampled, good and bad drafters: the plain tokens; the log decides the same again."""
    log = tmp_path / "log"
    config = stack_config(*pair, [f'verify.depth_log="{log}"'])
    requests = [
        {"text": prompt, "max_tokens": 50, "seed": 7, "temperature": temperature}
        for prompt in PROMPTS
        for temperature in (0.0, 0.8)
    ]
    async with running_stack(config) as stack:
        plain = [(await stack.generate(**request)).token_ids for request in requests]
        chosen = []
        for drafter in ("self", "random", "model", "ngram"):
            answers = await asyncio.gather(
                *(stack.generate(**request, mode=Mode.SPECULATIVE, drafter=drafter) for request in requests)
            )
            assert [answer.token_ids for answer in answers] == plain
            chosen.append(answers)
        bad = [answer.finished.speculative for answer in chosen[1]]
        assert sum(stats.num_draft_tokens for stats in bad) < 4 * sum(stats.num_rounds for stats in bad) / 2
        alone = await stack.generate(**requests[0], mode=Mode.SPECULATIVE, drafter="random")
        assert alone.token_ids == plain[0]
        told = await rounds_of(stack)
        assert {record.depth_reason for record in told} - {DepthReason.ALL, DepthReason.UNSAID}
        assert [record.step for record in told] == sorted({record.step for record in told})
        assert all(record.drafted <= record.asked for record in told)
        forced = await stack.generate(**requests[0], mode=Mode.SPECULATIVE, drafter="random", k=3)
        assert forced.token_ids == plain[0]
        told = await rounds_of(stack)
        assert all(record.asked == 3 for record in told[:-4])
        assert {record.depth_reason for record in told[:-4]} == {DepthReason.FIXED}
    (path,) = log.iterdir()
    count, wrong = replay(path)
    assert count > 100
    assert wrong == []
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:200]).replace('"facts": [1', '"facts": [2', 3).replace("0.0", "0.1"))
    assert replay(path)[1], "other facts are found out"


async def test_fixed_depths_by_setting(pair: tuple[Path, Path]) -> None:
    """verify.depth = fixed: every round asks for the plan's k."""
    async with running_stack(stack_config(*pair, ['verify.depth="fixed"'])) as stack:
        await stack.generate(
            text=PROMPTS[0], max_tokens=30, temperature=0.0, mode=Mode.SPECULATIVE, drafter="random"
        )
        told = await rounds_of(stack)
        assert {record.asked for record in told[:-4]} == {4}
