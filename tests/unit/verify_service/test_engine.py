"""The engine thread on a tiny model: faults inside a step, memory that always comes back."""

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import ModelConfig, VerifyConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.errors import DeadlineError, EngineError, PeerLostError
from paceline.testing.tiny_models import tiny_model_dir
from paceline.types import FinishReason, Plan, SamplingParams
from verify_service import steering
from verify_service.engine import Engine
from verify_service.sequence import DecodeSpec, Event, Failed, Finished, Run
from verify_service.steering import Steering

torch.set_num_threads(1)
POISON = 99


class Poisoned:
    """A runner that fails whenever a step holds the poisonous token."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.failures = 0

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        logits = self._runner.forward(segments)  # KV is written already when it fails
        if any(POISON in segment.token_ids for segment in segments):
            self.failures += 1
            raise RuntimeError("poison")
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    path = tiny_model_dir(tmp_path_factory.mktemp("model"))
    return load_runner(ModelConfig(name=str(path), dtype="float32"), kv_slots=8, max_context=256)


def spec(prompt: Sequence[int], max_tokens: int = 20, deadline: float = math.inf) -> DecodeSpec:
    return DecodeSpec(
        "r",
        tuple(prompt),
        (),
        SamplingParams(temperature=0.0),
        max_tokens,
        frozenset(),
        Plan.plain("test"),
        deadline=deadline,
    )


async def decode(
    engine: Engine, prompt: Sequence[int], max_tokens: int = 20, deadline: float = math.inf
) -> tuple[list[int], Event]:
    events: asyncio.Queue[Event] = asyncio.Queue()
    engine.submit(spec(prompt, max_tokens, deadline), events.put_nowait)
    ids: list[int] = []
    while True:
        event = await events.get()
        if isinstance(event, Run):
            ids += event.token_ids
        elif isinstance(event, Finished | Failed):
            return ids, event


async def test_a_failing_step_ends_only_the_culprit(runner: Runner) -> None:
    """The others of the same batch get the tokens they get alone, and all slots come back."""
    poisoned: Any = Poisoned(runner)
    engine = Engine(poisoned, VerifyConfig(), asyncio.get_running_loop())
    engine.start()
    try:
        alone, _ = await decode(engine, [5, 6, 7])
        (together, end), (_, failed) = await asyncio.gather(
            decode(engine, [5, 6, 7]), decode(engine, [5, POISON, 7])
        )
        assert poisoned.failures >= 1
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, EngineError)
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.LENGTH
        assert together == alone
        async with asyncio.timeout(5):
            while engine.state().num_running:
                await asyncio.sleep(0.01)
        assert engine.state().kv_slots_free == 8
    finally:
        await asyncio.to_thread(engine.stop)


class Slow:
    """A runner whose steps take 0.3 s."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        time.sleep(0.3)
        return self._runner.forward(segments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


async def test_idle_time_is_no_stall(runner: Runner) -> None:
    """The first request after an idle spell does not turn health NOT_SERVING."""
    slow: Any = Slow(runner)
    engine = Engine(slow, VerifyConfig(), asyncio.get_running_loop())
    engine.start()
    try:
        await asyncio.sleep(2.5)
        request = asyncio.create_task(decode(engine, [5, 6, 7], 3))
        worst = 0.0
        while not request.done():
            worst = max(worst, engine.stalled_s())
            await asyncio.sleep(0.02)
        assert 0.0 < worst < 2.4  # a step takes 0.3 s, and the machine adds something
        assert engine.stalled_s() == 0.0
    finally:
        await asyncio.to_thread(engine.stop)


class Watched:
    """A runner that remembers which prompts it began."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.began: set[tuple[int, ...]] = set()

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        self.began.update(tuple(segment.token_ids) for segment in segments if not segment.start)
        return self._runner.forward(segments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


async def test_what_nobody_waits_for_is_dropped_before_its_forward(runner: Runner) -> None:
    """A deadline that passes in the queue, or before the first step: one typed answer, and not one row is run."""
    watched: Any = Watched(runner)
    engine = Engine(watched, VerifyConfig(), asyncio.get_running_loop())
    engine.start()
    try:
        running = [asyncio.create_task(decode(engine, [5, i], 200)) for i in range(8)]
        await asyncio.sleep(0)
        queued = await decode(engine, [5, 411], deadline=time.monotonic() + 0.02)
        late = await decode(engine, [5, 412], deadline=time.monotonic() - 1.0)
        for ids, end in (queued, late):
            assert ids == []
            assert isinstance(end, Failed)
            assert isinstance(end.error, DeadlineError)
        assert watched.began == {(5, i) for i in range(8)}
        assert all(isinstance(end, Finished) for _, end in await asyncio.gather(*running))
    finally:
        await asyncio.to_thread(engine.stop)
    assert runner.kv.is_idle()


async def test_a_deadline_ends_what_runs(runner: Runner) -> None:
    """In the middle of its output: what came is right, the slot is free again."""
    slow: Any = Slow(runner)
    engine = Engine(slow, VerifyConfig(), asyncio.get_running_loop())
    engine.start()
    try:
        ids, end = await decode(engine, [5, 6, 7], deadline=time.monotonic() + 1.3)
        assert isinstance(end, Failed)
        assert isinstance(end.error, DeadlineError)
        assert 0 < len(ids) < 20
        assert engine.state().kv_slots_free == 8
    finally:
        await asyncio.to_thread(engine.stop)


async def test_stopping_answers_everyone(runner: Runner) -> None:
    """Each request ends in exactly one answer (I5): those in flight get a typed, retryable error."""
    engine = Engine(runner, VerifyConfig(), asyncio.get_running_loop())
    engine.start()
    waiting = [asyncio.create_task(decode(engine, [5, i], 200)) for i in range(12)]
    await asyncio.sleep(0.1)
    await asyncio.to_thread(engine.stop)
    ends = [end for _, end in await asyncio.gather(*waiting)]
    assert any(isinstance(end, Failed) for end in ends)
    assert all(isinstance(end.error, PeerLostError) for end in ends if isinstance(end, Failed))
    assert runner.kv.is_idle()


async def test_a_command_that_fails_does_not_stop_the_engine(runner: Runner) -> None:
    """Whatever a peer made us do, the thread lives on."""
    engine = Engine(runner, VerifyConfig(), asyncio.get_running_loop())
    engine.start()
    try:
        engine.proposed("nobody", [None], 0.0)  # type: ignore[list-item]
        ids, _ = await decode(engine, [5, 6, 7])
        assert len(ids) == 20
    finally:
        await asyncio.to_thread(engine.stop)


async def test_an_error_of_our_own_ends_what_is_in_flight_and_nothing_else(runner: Runner) -> None:
    """A turn that raises is told to everyone in flight; the thread goes on and the next request is normal."""
    engine = Engine(runner, VerifyConfig(), asyncio.get_running_loop())
    engine.start()
    try:
        original, steps = engine._scheduler.stepped, []

        def broken(work: Any, ended: float, step_s: float) -> None:
            steps.append(1)
            if len(steps) == 5:
                raise ZeroDivisionError
            original(work, ended, step_s)

        engine._scheduler.stepped = broken  # type: ignore[method-assign]
        _, end = await asyncio.wait_for(decode(engine, [5, 6, 7]), 10)
        assert isinstance(end, Failed)
        assert isinstance(end.error, EngineError)
        ids, _ = await asyncio.wait_for(decode(engine, [5, 6, 7]), 10)
        assert len(ids) == 20
        assert engine.state().kv_slots_free == 8
    finally:
        await asyncio.to_thread(engine.stop)


@pytest.mark.parametrize("buffering", [1, -1])
async def test_a_full_disk_ends_the_log_of_depths_and_nothing_else(
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    buffering: int,
) -> None:
    """Whether a line cannot be written or what was kept of it at the end: requests are answered, it is said once."""
    full = Path("/dev/full").open("w", buffering=buffering, encoding="ascii")  # noqa: ASYNC230, SIM115  # closed by what is tested
    monkeypatch.setattr(steering, "_open_log", lambda *_: full)
    engine = Engine(runner, VerifyConfig(depth_log="somewhere"), asyncio.get_running_loop())
    engine.start()
    try:
        for _ in range(3):
            _, end = await decode(engine, [5, 6, 7])
            assert isinstance(end, Finished), end
    finally:
        await asyncio.to_thread(engine.stop)
    assert caplog.text.count("the log of depths has ended") == 1
    assert full.closed


def test_a_log_of_depths_that_cannot_begin_is_no_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full already at the start: the controller is there, and what is missing is said."""
    full = Path("/dev/full").open("w", buffering=1, encoding="ascii")  # noqa: SIM115
    monkeypatch.setattr(Path, "open", lambda *_, **__: full)
    Steering(None, log_dir=str(tmp_path)).close()
    assert "no log of depths" in caplog.text
