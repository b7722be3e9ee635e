"""Faults of the link at every level of drafting ahead: no error, no token changed, used again when it is well again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from stack import Answer, Stack, running_stack, stack_config

from paceline.testing.faulty_link import FaultyLink, Mischief, faulty_link, untouched
from paceline.types import ProposalOutcome, RoundRecord

REQUEST = {"text": "The riders take turns at the front of the line", "temperature": 0.8, "seed": 5}
BACK_S = 5.0
IMPATIENT = ["verify.draft_wait_s=0.2", "verify.draft_wait_least_s=0.03"]


@asynccontextmanager
async def stack_on_a_wire(pair: tuple[Path, Path], level: int) -> AsyncIterator[tuple[Stack, FaultyLink]]:
    """A stack whose tiers are joined by a wire that can be spoilt."""
    relays: list[FaultyLink] = []

    @asynccontextmanager
    async def wire(endpoint: str) -> AsyncIterator[str]:
        async with faulty_link(endpoint) as (address, relay):
            relays.append(relay)
            yield address

    config = stack_config(*pair, [*IMPATIENT, f'verify.draft_level="{level}"', "verify.draft_fan=2"])
    async with running_stack(config, wire=wire) as stack:
        yield stack, relays[0]


async def drafted(stack: Stack, max_tokens: int) -> tuple[Answer, list[RoundRecord]]:
    answer = await stack.generate(**REQUEST, max_tokens=max_tokens, drafter="self", k=3)
    (told,) = await stack.client.list_requests(limit=1)
    return answer, list(told.rounds)


async def until_used(stack: Stack) -> None:
    """Well again: a drafter that is always right is used within 5 s (and as much for a slow machine)."""
    async with asyncio.timeout(2 * BACK_S):
        while not (await drafted(stack, 24))[0].finished.speculative.num_accepted_draft_tokens:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_whatever_happens_to_messages_no_token_changes(pair: tuple[Path, Path], level: int) -> None:
    """Dropped, doubled, reordered, repeated, malformed, of another epoch, both ways."""
    async with stack_on_a_wire(pair, level) as (stack, wire):
        plain = await stack.generate(**REQUEST, max_tokens=120)
        for share in (0.1, 0.5):
            wire.spoil = mischief = Mischief(seed=level, share=share)
            async with asyncio.timeout(60):  # a link that is left alone for a while carries nothing to spoil
                while not mischief.num_spoilt:
                    answers = await asyncio.gather(*(drafted(stack, 120) for _ in range(3)))
                    for answer, rounds in answers:
                        assert answer.token_ids == plain.token_ids
                        assert all(record.accepted <= record.drafted <= 3 for record in rounds)
        wire.spoil = untouched
        await until_used(stack)
        state = await stack.client.server_info()
        assert state.running == 0


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_late_and_hung_drafters_change_no_token(pair: tuple[Path, Path], level: int) -> None:
    """200 ms late, then silent: of a request's rounds at most a few wait in vain, and never the same link twice in a row."""
    async with stack_on_a_wire(pair, level) as (stack, wire):
        plain = await stack.generate(**REQUEST, max_tokens=400)
        await until_used(stack)
        wire.delay_s = 0.2
        answer, rounds = await drafted(stack, 400)
        assert answer.token_ids == plain.token_ids
        outcomes = [record.outcome for record in rounds]
        assert outcomes.count(ProposalOutcome.UNAVAILABLE) > outcomes.count(ProposalOutcome.LATE)
        wire.delay_s = 0.0
        await until_used(stack)

        running = asyncio.create_task(drafted(stack, 400))
        await asyncio.sleep(0.05)
        wire.hang()
        answer, rounds = await running
        assert answer.token_ids == plain.token_ids
        answer, rounds = await drafted(stack, 60)
        assert answer.token_ids == plain.token_ids[:60]
        assert sum(record.outcome is ProposalOutcome.LATE for record in rounds) <= 1
        wire.go_on()
        await until_used(stack)
