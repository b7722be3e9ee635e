"""Thousands of random events on the real engine, scheduler, slots and prefix cache, with a model that remembers.

The model is a hash of what lies in the KV slot: the next token follows from every position that attention would read.
So a row that two sequences share, a stale tail, a prefix of somebody else or a rollback by one token too few shows up as
a wrong token, and the right output of every request is known in advance from its prompt alone. Events are keyed by a
seed; ``PACELINE_SCHEDULER_EVENTS`` asks for more than the usual 10,000.
"""

import os
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from engine_world import Clock, World, manual_clock

from paceline.config import VerifyConfig
from paceline.engine import Segment, SlotKV
from paceline.engine.kv import KVShape
from paceline.engine.packing import check_segments
from paceline.types import ModelInfo, Plan, SamplingParams
from verify_service.sequence import DecodeSpec

VOCAB = 32
STOP = 7
POISON = 31  # a prompt that holds it makes every step fail that runs it
CONTEXT = 96
SLOTS = 5
EVENTS = int(os.environ.get("PACELINE_SCHEDULER_EVENTS", "10000"))
SEEDS = 10


def mix(state: int, token: int) -> int:
    return (state * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 61)


def drawn(state: int) -> int:
    """The token that follows; never the poisonous one."""
    return (state >> 17) % (VOCAB - 1)


def follow(tokens: Sequence[int], count: int) -> list[int]:
    """The next ``count`` tokens, whatever stops the text."""
    state, found = 0, []
    for token in tokens:
        state = mix(state, token)
    for _ in range(count):
        found.append(drawn(state))
        state = mix(state, found[-1])
    return found


def answer(spec: DecodeSpec) -> list[int]:
    """All tokens behind the prompt that the request has to end with."""
    known = [*spec.prompt_ids, *spec.committed_ids]
    most = min(spec.max_tokens - len(spec.committed_ids), CONTEXT - len(known))
    tokens = follow(known, most)
    end = next((i + 1 for i, token in enumerate(tokens) if token in spec.stop_ids), most)
    return tokens[:end]


class RememberingRunner:
    """Stores each token in its KV row, and reads all rows of a sequence for the next one."""

    def __init__(self, clock: Clock) -> None:
        self.kv = SlotKV(
            KVShape(layers=1, kv_heads=1, key_size=1, value_size=1),
            num_slots=SLOTS,
            capacity=CONTEXT,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        self.kv.keys.fill_(-1.0)
        self.device = torch.device("cpu")
        self.eos_token_ids = (STOP,)
        self.info = ModelInfo(
            name="hash",
            fingerprint="",
            tokenizer_fingerprint="",
            vocab_size=VOCAB,
            max_context=CONTEXT,
            dtype="float64",
            device="cpu",
            runner="hash",
            runner_reason="",
            numerics="deterministic",
        )
        self.fail_once = False
        self._clock = clock
        self._storage = self.kv.keys.numpy()[0, :, 0]

    def held(self, slot: int) -> list[int]:
        first = self.kv.row(slot, 0)
        return self._storage[first : first + self.kv.length(slot)].astype(int).tolist()

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        check_segments(segments, self.kv)
        self._clock.now += 2e-2 + 2e-3 * sum(len(segment.token_ids) for segment in segments)
        logits = torch.zeros(sum(segment.num_logits for segment in segments), VOCAB)
        at = 0
        for segment in segments:
            self.kv.clear_tail(segment.slot, segment.end)
            first = self.kv.row(segment.slot, segment.start)
            self._storage[first : first + len(segment.token_ids)] = segment.token_ids
            state = 0
            for token in self.held(segment.slot):
                state = mix(state, token)
            for i, token in enumerate(segment.token_ids):
                state = mix(state, token)
                if i >= len(segment.token_ids) - segment.num_logits:
                    logits[at, drawn(state)] = 1.0
                    at += 1
        fail = self.fail_once and len(segments) > 1
        if fail or any(POISON in segment.token_ids for segment in segments):
            self.fail_once &= not fail
            raise RuntimeError("a step that fails after it has written")
        for segment in segments:
            self.kv.extend(segment.slot, len(segment.token_ids))
        return logits


def ask(world: World) -> DecodeSpec:
    rng = world.random
    tenant, prompt = world.beginning(CONTEXT - 2)
    prompt = (prompt + [rng.randrange(VOCAB - 1) for _ in range(rng.choice((1, 3, 20, 45, 70)))])[
        : CONTEXT - 2
    ]
    if rng.random() < 0.03:
        prompt[-1] = POISON
    committed = follow(prompt, rng.randrange(6)) if rng.random() < 0.2 else []
    return DecodeSpec(
        request_id="r",
        prompt_ids=tuple(prompt),
        committed_ids=tuple(committed[: CONTEXT - 1 - len(prompt)]),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=rng.choice((7, 12, 30, 90)),
        stop_ids=frozenset({STOP} if rng.random() < 0.5 else ()),
        plan=Plan.speculative(
            rng.choice(("d", "both", "suffix")), rng.randrange(1, 6), "", k_fixed=rng.random() < 0.7
        )
        if rng.random() < 0.7
        else Plan.plain(""),
        tenant=tenant,
        priority=rng.choice((0, 0, 0, 0, 1, 5)),
        deadline=world.clock.now + rng.uniform(0.0, 6.0) if rng.random() < 0.15 else float("inf"),
    )


class RememberingWorld(World):
    """Looks into the slots as well, and lets a step fail now and then."""

    runner: RememberingRunner

    def turn(self) -> None:
        self.runner.fail_once |= self.random.random() < 0.02
        super().turn()

    def check(self) -> None:
        super().check()
        for sequence in self.scheduler._running.values():
            assert sequence.slot is not None
            held = self.runner.held(sequence.slot)
            assert held == sequence.tokens[: len(held)], "a slot holds its own tokens"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_events(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Admit, cancel, draft well and badly, lose links, fail steps, preempt, expire: balanced throughout, nothing lost."""
    clock = manual_clock(monkeypatch)
    depth: Literal["adaptive", "fixed"] = "adaptive" if seed % 4 == 0 else "fixed"
    config = VerifyConfig(max_queue=12, prefill_chunk=24, draft_wait_s=0.1, depth=depth)
    world = RememberingWorld(seed, clock, RememberingRunner(clock), config, ask=ask, answer=answer)
    world.may_fail = lambda spec: POISON in spec.prompt_ids
    world.link()
    actions: list[tuple[Callable[[], None], int]] = [
        (world.turn, 50),
        (world.admit, 12),
        (world.answer_questions, 35),
        (world.answer_late, 6),
        (world.cancel, 2),
        (world.link, 1),
    ]
    kinds, weights = zip(*actions, strict=True)
    for action in world.random.choices(kinds, weights, k=EVENTS // SEEDS):
        world.happen(action)
    world.settle()
    kinds_of_news = ["finished", "cancelled", "preempted", "tokens reused"]
    for kind in kinds_of_news + ["accepted", "rolled back"] * (depth == "fixed"):
        assert world.counts[kind], f"the events reach {kind}: {world.counts}"
