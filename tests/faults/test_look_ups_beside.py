"""Look-ups beside the target, through the public API: same tokens, no draft tier needed, one story in the trace."""

import asyncio
from pathlib import Path

import pytest
from stack import running_stack, stack_config

from paceline.telemetry import names
from paceline.testing.collector import OtlpCollector
from paceline.testing.tiny_models import tiny_pair
from paceline.types import DepthReason, Law
from verify_service.steering import replay

BESIDE = [f"draft.drafters.{name}.place=auto" for name in ("ngram", "suffix")]
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11}]
PROMPTS = ["aa bb cc aa bb cc aa bb", "def add(left, right):", "🙂🚀 今天"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pair(tmp_path_factory.mktemp("pair"))


async def test_the_same_tokens_whoever_is_asked(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Plain, each look-up, and the cascade with its model: k named or decided by cost, alone or beside others; it replays."""
    logs = tmp_path / "depths"
    config = stack_config(*pair, [*BESIDE, f'verify.depth_log="{logs}"'])
    async with running_stack(config) as stack:
        for sampling in SAMPLINGS:
            plain = [await stack.generate(text=text, max_tokens=48, **sampling) for text in PROMPTS]
            for drafter in ("ngram", "suffix", "cascade"):
                for k in ({}, {"k": 1}, {"k": 8}):
                    answers = await asyncio.gather(
                        *(
                            stack.generate(text=text, max_tokens=48, drafter=drafter, **k, **sampling)
                            for text in PROMPTS
                        )
                    )
                    assert [a.token_ids for a in answers] == [a.token_ids for a in plain], (drafter, k)
        (last,) = await stack.client.list_requests(limit=1)
        found = [record for record in last.rounds if record.beside]
        assert found
        assert all(record.network_s == 0.0 for record in found)
        assert {record.depth_reason for record in found} <= {DepthReason.LOOKED_UP, DepthReason.NOT_FOUND}
    (log,) = logs.iterdir()
    decided, wrong = replay(log)
    assert decided > 100
    assert wrong == []


async def test_without_a_draft_tier_look_ups_go_on(pair: tuple[Path, Path]) -> None:
    """The draft tier is stopped: the cascade still guesses what it looks up, ngram and suffix are as available as before."""
    async with running_stack(stack_config(*pair, BESIDE)) as stack:
        plain = await stack.generate(text=PROMPTS[0], max_tokens=60, temperature=0.0)
        await stack.draft.stop(0)
        # The tiny model hardly repeats itself, but what it said once can be found the second time.
        await stack.generate(text=PROMPTS[0], max_tokens=60, temperature=0.0, drafter="suffix", k=4)
        for drafter in ("ngram", "suffix", "cascade"):
            answer = await stack.generate(
                text=PROMPTS[0], max_tokens=60, temperature=0.0, drafter=drafter, k=4
            )
            assert answer.token_ids == plain.token_ids
            stats = answer.finished.speculative
            assert stats.num_draft_tokens > 0
            assert stats.num_accepted_draft_tokens > 20 or drafter == "ngram"
        info = await stack.client.server_info()
        assert {d.name for d in info.drafters if d.available} >= {"ngram", "suffix"}


@pytest.mark.parametrize("law", [Law.RATIO, Law.BLOCK])
async def test_sampled_laws_take_what_is_looked_up_as_certain(pair: tuple[Path, Path], law: Law) -> None:
    """Accepted or replaced, never an error; the same seed gives the same text again."""
    async with running_stack(stack_config(*pair, BESIDE)) as stack:
        ask = {
            "text": PROMPTS[0],
            "max_tokens": 40,
            "temperature": 0.7,
            "seed": 5,
            "drafter": "ngram",
            "k": 4,
        }
        first, again = [await stack.generate(law=law, **ask) for _ in range(2)]
        assert first.token_ids == again.token_ids
        assert first.finished.speculative.num_draft_tokens > 0


async def test_a_round_that_was_looked_up_has_its_draft_span(pair: tuple[Path, Path]) -> None:
    """From the verify tier, under the round, within it."""
    async with (
        OtlpCollector() as collector,
        running_stack(
            stack_config(*pair, [*BESIDE, f'telemetry.otlp_endpoint="{collector.endpoint}"'])
        ) as stack,
    ):
        answer = await stack.generate(text=PROMPTS[0], max_tokens=30, temperature=0.0, drafter="ngram", k=4)
        trace_id = answer.started.trace_id
        await collector.wait_for(
            lambda spans: any(s["trace_id"] == trace_id and s["name"] == names.SPAN_DECODE for s in spans)
        )
        spans = collector.trace(trace_id)
    rounds = {s["span_id"]: s for s in spans if s["name"] == names.SPAN_ROUND}
    drafts = [s for s in spans if s["name"] == names.SPAN_DRAFT]
    assert len(drafts) == len(rounds)
    for span in drafts:
        parent = rounds[span["parent_id"]]
        assert span["service"] == names.SERVICE_VERIFY
        assert parent["start"] <= span["start"] <= span["end"] <= parent["end"]
        assert parent["attributes"][names.ROUND_BESIDE] is True
