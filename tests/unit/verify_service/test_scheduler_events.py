"""Thousands of random events on the real engine, scheduler, slots and prefix cache, with a model that remembers.

The model is a hash of what lies in the KV slot: the next token follows from every position that attention would read.
So a row that two sequences share, a stale tail, a prefix of somebody else or a rollback by one token too few shows up as
a wrong token, and the right output of every request is known in advance from its prompt alone. Events are keyed by a
seed; ``PACELINE_SCHEDULER_EVENTS`` asks for more than the usual 10,000.
"""

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import verify_service.engine
import verify_service.step
from paceline.config import VerifyConfig
from paceline.engine import Segment, SlotKV
from paceline.engine.kv import KVShape
from paceline.engine.packing import check_segments
from paceline.errors import CapacityError, DeadlineError, EngineError
from paceline.link import Stamp
from paceline.types import ModelInfo, Plan, SamplingParams
from verify_service import sequence as engine_sequence
from verify_service.drafts import Proposal, Refusal
from verify_service.engine import Engine
from verify_service.sequence import Admitted, DecodeSpec, Event, Failed, Finished, Run, State

VOCAB = 32
STOP = 7
POISON = 31  # a prompt that holds it makes every step fail that runs it
CONTEXT = 96
SLOTS = 5
TENANTS = ("", "a", "b")
EVENTS = int(os.environ.get("PACELINE_SCHEDULER_EVENTS", "10000"))
SEEDS = 10


class Clock:
    """Moves on a little whenever it is read, so that nothing stands still."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now


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


class Asked(SimpleNamespace):
    """A question on the link: stamp, k, and the tokens it builds on."""


class Port:
    """A link to a drafter whose answers the driver decides."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.mirrors: dict[int, list[int]] = {}
        self.questions: list[Asked] = []

    def open(self, sequence: engine_sequence.Sequence, epoch: int, k: int) -> None:
        self.mirrors[sequence.id] = list(sequence.tokens)
        self._ask(Stamp(sequence.id, epoch, len(sequence.tokens)), k)

    def commit(self, stamp: Stamp, token_ids: list[int], k: int, round_index: int) -> None:
        mirror = self.mirrors[stamp.sequence_id]
        assert len(mirror) == stamp.base_len, "no commit is left out"
        mirror += token_ids
        self._ask(Stamp(stamp.sequence_id, stamp.epoch, len(mirror)), k)

    def close(self, sequence_id: int, epoch: int) -> None:
        assert self.mirrors.pop(sequence_id, None) is not None, "only what is open is closed"

    def flush(self) -> None:
        pass

    def _ask(self, stamp: Stamp, k: int) -> None:
        if k:
            tokens = list(self.mirrors[stamp.sequence_id])
            self.questions.append(Asked(stamp=stamp, k=k, tokens=tokens))


class World:
    """The engine without its thread, everything that was asked of it, and what it said."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.random = random.Random(seed)
        self.clock = clock
        self.runner = RememberingRunner(clock)
        loop: Any = SimpleNamespace(call_soon_threadsafe=lambda run, events: run(events))
        runner: Any = self.runner
        self.engine = Engine(runner, VerifyConfig(max_queue=12, prefill_chunk=24, draft_wait_s=0.1), loop)
        self.scheduler = self.engine._scheduler
        self.ports: dict[str, Port] = {}
        self.events: dict[int, list[Event]] = {}
        self.live: dict[int, engine_sequence.Sequence] = {}
        self.given_up: set[int] = set()
        self.specs: dict[int, DecodeSpec] = {}
        self.counts: Counter[str] = Counter()
        self.late: list[tuple[str, Proposal]] = []
        self.texts: list[tuple[str, list[int]]] = []
        self.of_tenant: dict[str, list[engine_sequence.Sequence]] = {tenant: [] for tenant in TENANTS}
        self._watch_admission()

    # --- what the driver does -----------------------------------------------------------------------------------

    def admit(self) -> None:
        rng = self.random
        prompt = [rng.randrange(VOCAB - 1) for _ in range(rng.choice((1, 3, 20, 45, 70)))]
        tenant = rng.choice(TENANTS)
        if self.texts and rng.random() < 0.7:  # goes on where another one ended, or shares its beginning
            own, old = rng.choice(self.texts)
            tenant = own if rng.random() < 0.8 else tenant
            prompt = (old[: rng.choice((20, 50, len(old)))] + prompt)[: CONTEXT - 2]
        if rng.random() < 0.03:
            prompt[-1] = POISON
        committed = follow(prompt, rng.randrange(6)) if rng.random() < 0.2 else []
        spec = DecodeSpec(
            request_id="r",
            prompt_ids=tuple(prompt),
            committed_ids=tuple(committed[: max(0, CONTEXT - 1 - len(prompt))]),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=rng.choice((7, 12, 30, 90)),
            stop_ids=frozenset({STOP} if rng.random() < 0.5 else ()),
            plan=Plan.speculative("d", rng.randrange(1, 6), "") if rng.random() < 0.7 else Plan.plain(""),
            tenant=tenant,
            priority=rng.choice((0, 0, 0, 0, 1, 5)),
            deadline=self.clock.now + rng.uniform(0.0, 6.0) if rng.random() < 0.15 else float("inf"),
        )
        events: list[Event] = []
        try:
            sequence = self.engine.submit(spec, events.append)
        except CapacityError:
            self.counts["refused"] += 1
            assert not events
            return
        self.events[sequence.id] = events
        self.live[sequence.id] = sequence
        self.of_tenant[tenant].append(sequence)
        self.specs[sequence.id] = spec

    def cancel(self) -> None:
        if self.live:
            number = self.random.choice(list(self.live))
            self.given_up.add(number)
            self.engine.cancel(self.live[number])

    def link(self) -> None:
        endpoint = self.random.choice(("x", "y"))
        if endpoint in self.ports and self.random.random() < 0.7:
            del self.ports[endpoint]
            self.engine.link_down(endpoint)
        else:
            self.ports[endpoint] = Port(endpoint)
            self.engine.link_up(self.ports[endpoint], {"d": "1"}, {"d": self.random.choice((0, 0, 40))})

    def answer_questions(self) -> None:
        """Each question gets a good, bad, short, malformed, stale, doubled or late answer, or none, or a refusal."""
        rng = self.random
        for endpoint, port in self.ports.items():
            questions, port.questions = port.questions, []
            for asked in questions:
                right = follow(asked.tokens, asked.k)
                kind = rng.choice(
                    (
                        "right",
                        "right",
                        "right",
                        "half",
                        "half",
                        "wrong",
                        "wrong",
                        "empty",
                        "none",
                        "late",
                        "twice",
                        "bad",
                        "refuse",
                    )
                )
                if kind == "none":
                    continue
                if kind == "refuse":
                    stamp = asked.stamp
                    reason = rng.choice(list(Refusal))
                    self.engine.refused(endpoint, stamp.sequence_id, stamp.epoch, reason)
                    continue
                tokens = {
                    "half": right[: asked.k // 2] + [(t + 1) % (VOCAB - 1) for t in right[asked.k // 2 :]],
                    "wrong": [(t + 1) % (VOCAB - 1) for t in right],
                    "empty": [],
                    "bad": rng.choice(([VOCAB], [-1], right * 7)),
                }.get(kind, right)
                proposal = Proposal(asked.stamp, tokens, 0.0)
                if kind == "late":
                    self.late.append((endpoint, proposal))
                else:
                    self.engine.proposed(endpoint, [proposal] * (2 if kind == "twice" else 1), self.clock.now)

    def answer_late(self) -> None:
        late, self.late = self.late, []
        self.random.shuffle(late)
        for endpoint, proposal in late:
            self.engine.proposed(endpoint, [proposal], self.clock.now)

    def turn(self) -> None:
        """What the engine's thread does once."""
        if self.random.random() < 0.02:
            self.runner.fail_once = True
        self.engine._post(lambda: None)  # so that it never sleeps
        self.engine._turn()
        if not self.engine._work:
            self.clock.now += 0.02
        self.engine._drafts.flush()
        self.engine._deliver()

    # --- what must hold -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every event."""
        kv, slots = self.runner.kv, self.scheduler.slots
        assert kv.num_free + slots.num_kept + slots.num_in_use == kv.num_slots, "allocator balanced"
        running = list(self.scheduler._running.values())
        held = [sequence.slot for sequence in running]
        assert None not in held
        assert len(set(held)) == len(held), "no two sequences share a writable slot"
        assert len(held) == slots.num_in_use
        for sequence in running:
            assert sequence.slot is not None
            length = kv.length(sequence.slot)
            assert length < len(sequence.tokens) + (sequence.state is State.PREFILL)
            assert self.runner.held(sequence.slot) == sequence.tokens[:length], "a slot holds its own tokens"
        waiting = list(self.scheduler._waiting)
        for sequence in waiting:
            assert sequence.slot is None
            assert not any(sequence.id in port.mirrors for port in self.ports.values()), (
                "mirrors go with slots"
            )
        known = {sequence.id for sequence in (*running, *waiting)}
        assert len(known) == len(running) + len(waiting), "runs or waits, not both"
        for number, sequence in list(self.live.items()):
            ended = sequence.state is State.ENDED
            answers = self.answers(number)
            assert len(answers) == (ended and number not in self.given_up) or (
                number in self.given_up and len(answers) <= 1
            ), "one answer at the end, none before"
            if ended:
                self.judge(number, sequence, answers)
                del self.live[number]

    def answers(self, number: int) -> list[Event]:
        return [event for event in self.events[number] if isinstance(event, Finished | Failed)]

    def judge(self, number: int, sequence: engine_sequence.Sequence, answers: list[Event]) -> None:
        spec, events = self.specs[number], self.events[number]
        tokens = [token for event in events if isinstance(event, Run) for token in event.token_ids]
        right = answer(spec)
        assert tokens == right[: len(tokens)], "the tokens of plain decoding alone"
        position = len(spec.prompt_ids) + len(spec.committed_ids)
        for event in events:
            if isinstance(event, Run):
                assert event.position == position
                position += len(event.token_ids)
        assert sum(isinstance(event, Admitted) for event in events) <= 1
        self.texts = [*self.texts[-8:], (spec.tenant, sequence.tokens)]
        if not answers:
            self.counts["cancelled"] += 1
            return
        match answers[0]:
            case Finished():
                assert tokens == right
                self.counts["finished"] += 1
                self.counts["accepted"] += sequence.stats.num_accepted_draft_tokens
                self.counts["rolled back"] += (
                    sequence.stats.num_draft_tokens - sequence.stats.num_accepted_draft_tokens
                )
            case Failed(DeadlineError()):
                assert spec.deadline <= self.clock.now
                self.counts["expired"] += 1
                self.counts["expired before admission"] += not sequence.admitted
                assert sequence.admitted or not tokens
            case Failed(error):
                assert isinstance(error, EngineError)
                assert POISON in spec.prompt_ids
                self.counts["failed"] += 1

    def _watch_admission(self) -> None:
        """Admission: by priority; nobody is admitted twice while a line of equal priority waits in vain."""
        line, number = self.scheduler._waiting, itertools.count(1)
        last: dict[tuple[int, str], int] = {}  # line -> its last pop
        since: dict[tuple[int, str], int] = {}  # line -> the pop after which it began to wait
        latest = 0

        def refresh() -> None:
            ahead = {(s.spec.priority, s.spec.tenant) for s in line}
            for key in [key for key in since if key not in ahead]:
                del since[key]
            for key in ahead:
                since.setdefault(key, latest)

        def pop() -> engine_sequence.Sequence:
            nonlocal latest
            ahead = dict(since)
            sequence = originals["pop"]()
            mine = sequence.spec.priority, sequence.spec.tenant
            assert mine[0] == max(priority for priority, _ in ahead), "the highest priority first"
            previous = last.get(mine, 0)
            for other, began in ahead.items():
                if other[0] == mine[0] and other != mine and began < previous:
                    assert last.get(other, 0) > previous, "tenants in turn"
            latest = last[mine] = next(number)
            return sequence

        def add(sequence: engine_sequence.Sequence, *, in_front: bool = False) -> None:
            originals["add"](sequence, in_front=in_front)
            refresh()

        def remove(sequence: engine_sequence.Sequence) -> None:
            originals["remove"](sequence)
            refresh()

        originals: dict[str, Any] = {name: getattr(line, name) for name in ("pop", "add", "remove")}
        line.pop, line.add, line.remove = pop, add, remove  # type: ignore[method-assign]

        def admit() -> list[engine_sequence.Sequence]:
            admitted = admit_all()
            for sequence in admitted:
                warm, own = sequence.num_cached, self.of_tenant[sequence.spec.tenant]
                assert not warm or any(
                    other.tokens[:warm] == sequence.tokens[:warm]
                    for other in own
                    if other is not sequence or sequence.admitted
                ), "a prefix comes from the same tenant"
            waiting = list(line)
            if waiting:
                assert self.scheduler.slots.num_available == 0, "a free slot keeps nobody waiting"
                lowest = min(s.spec.priority for s in self.scheduler._running.values())
                assert max(s.spec.priority for s in waiting) <= lowest, "who waits is above nobody who runs"
            return admitted

        admit_all = self.scheduler.admit
        self.scheduler.admit = admit  # type: ignore[method-assign]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (verify_service.engine, verify_service.step):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_events(clock: Clock, seed: int) -> None:
    """Admit, cancel, draft well and badly, lose links, fail steps, preempt, expire: balanced throughout, nothing lost."""
    world = World(seed, clock)
    world.link()
    actions: list[tuple[Callable[[], None], int]] = [
        (world.turn, 50),
        (world.admit, 12),
        (world.answer_questions, 35),
        (world.answer_late, 6),
        (world.cancel, 2),
        (world.link, 1),
    ]
    for action in world.random.choices(
        [action for action, _ in actions], [weight for _, weight in actions], k=EVENTS // SEEDS
    ):
        action()
        world.check()
    for _ in range(3000):  # everything comes to its end
        if not world.live:
            break
        world.turn()
        world.check()
    assert not world.live, "nothing is lost"
    assert world.scheduler.slots.is_idle()
    world.scheduler.slots.clear()
    assert world.runner.kv.is_idle()
    assert not any(port.mirrors for port in world.ports.values()), "no mirror outlives its sequence"
    world.counts["preempted"] = world.scheduler.num_preempted
    world.counts["tokens reused"] = world.scheduler.slots.tokens_reused
    for kind in ("finished", "cancelled", "accepted", "rolled back", "preempted", "tokens reused"):
        assert world.counts[kind], f"the events reach {kind}: {world.counts}"
