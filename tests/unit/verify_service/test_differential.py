"""Random requests through the whole engine against one token at a time: equal for each runner, whatever happens.

The expected tokens come from a loop of its own: one sequence, one row a forward, no scheduler, no prefix, no draft. The engine
gets the same requests with random sampling parameters, drafters that are right, wrong or mad, links that come and go,
prefixes of earlier texts, chunked prompts, preemption and tokens committed elsewhere. ``PACELINE_COMPARISONS`` asks for more
requests a runner than the usual few.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_world import World, manual_clock

from paceline.config import ModelConfig, VerifyConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.sampling import TokenRow, choose
from paceline.testing.tiny_models import tiny_model_dir
from paceline.types import Plan, SamplingParams
from verify_service.sequence import DecodeSpec

CONTEXT = 200  # over three attention buckets
VOCAB = 512
COMPARISONS = int(os.environ.get("PACELINE_COMPARISONS", "0"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), max_context=CONTEXT)


def sampling(world: World) -> SamplingParams:
    rng = world.random
    return SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.5, 1.0, 1.7)),
        top_k=rng.choice((0, 0, 5, 40)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 0.8)),
        frequency_penalty=rng.choice((0.0, 0.0, -0.5)),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-5, 5)} if rng.random() < 0.2 else {},
        seed=rng.randrange(1 << 64),
    )


class OneByOne:
    """Plain decoding as it would be written on a blackboard."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def tokens(self, spec: DecodeSpec, committed: tuple[int, ...], most: int) -> list[int]:
        slot = self._runner.kv.acquire()
        assert slot is not None
        tokens, prompt = [*spec.prompt_ids, *committed], len(spec.prompt_ids)
        logits = self._runner.forward([Segment(slot, 0, tokens, 1)])
        found: list[int] = []
        while True:
            row = TokenRow(spec.sampling, len(tokens), spec.prompt_ids, tokens[prompt:])
            found += choose(logits, [row])
            tokens.append(found[-1])
            if found[-1] in spec.stop_ids or len(found) == most:
                break
            logits = self._runner.forward([Segment(slot, len(tokens) - 1, tokens[-1:], 1)])
        self._runner.kv.release(slot)
        return found

    def answer(self, spec: DecodeSpec) -> list[int]:
        known = len(spec.prompt_ids) + len(spec.committed_ids)
        most = min(spec.max_tokens - len(spec.committed_ids), CONTEXT - known)
        return self.tokens(spec, spec.committed_ids, most)

    def ask(self, world: World) -> DecodeSpec:
        rng = world.random
        tenant, prompt = world.beginning(150)
        prompt += [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2, 9, 30)))]
        spec = DecodeSpec(
            request_id="r",
            prompt_ids=tuple(prompt),
            committed_ids=(),
            sampling=sampling(world),
            max_tokens=rng.choice((4, 20, 20, 40)),
            stop_ids=frozenset(rng.sample(range(VOCAB), 10) if rng.random() < 0.5 else ()),
            plan=Plan.speculative(
                rng.choice(("d", "both", "suffix")), rng.randrange(1, 9), "", k_fixed=rng.random() < 0.7
            )
            if rng.random() < 0.85
            else Plan.plain(""),
            tenant=tenant,
            priority=rng.choice((0, 0, 0, 3)),
        )
        if rng.random() > 0.15:
            return spec
        begun = tuple(self.tokens(spec, (), rng.randrange(1, spec.max_tokens)))
        if begun[-1] in spec.stop_ids:
            return spec
        return DecodeSpec(
            spec.request_id, spec.prompt_ids, begun, spec.sampling, spec.max_tokens, spec.stop_ids, spec.plan
        )


@pytest.mark.parametrize(("kind", "usual"), [("lean", 80), ("lean in torch", 12), ("reference", 12)])
def test_engine_equals_one_token_at_a_time(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: str, usual: int
) -> None:
    """Every request that finishes has the tokens of plain decoding alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if kind == "lean in torch":
        monkeypatch.setenv("PACELINE_NO_COMPILER", "1")
    settings = ModelConfig(
        name=str(model), dtype="float32", runner="reference" if kind == "reference" else "lean"
    )
    runner = load_runner(settings, kv_slots=4, max_context=CONTEXT)
    alone = OneByOne(load_runner(settings, kv_slots=1, max_context=CONTEXT))
    assert runner.info.numerics == "deterministic"
    config = VerifyConfig(max_queue=4, prefill_chunk=17, draft_wait_s=0.05, draft_level="2", depth="fixed")
    world = World(1, manual_clock(monkeypatch), runner, config, ask=alone.ask, answer=alone.answer)
    world.link()
    actions: list[tuple[Callable[[], None], int]] = [
        (world.turn, 50),
        (world.admit, 10),
        (world.answer_questions, 45),
        (world.answer_late, 4),
        (world.cancel, 1),
        (world.link, 1),
    ]
    kinds, weights = zip(*actions, strict=True)
    while world.counts["finished"] < (COMPARISONS or usual):
        world.happen(world.random.choices(kinds, weights)[0])
    world.settle()
    torch.set_num_threads(threads)
    print(kind, dict(world.counts))
    for what in ("accepted", "rolled back", "preempted", "tokens reused")[: 4 if usual > 20 else 2]:
        assert world.counts[what], f"the events reach {what}: {world.counts}"
