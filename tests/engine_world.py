"""The verify tier's engine without its thread, driven by random events on a manual clock, and judged after each.

``World`` holds what was asked and what the right answer is; the driver of a test decides which events happen. Whatever model
stands behind it, the tokens of a request follow from its ``DecodeSpec`` alone.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import verify_service.engine
import verify_service.step
from paceline.config import VerifyConfig
from paceline.errors import CapacityError, DeadlineError, EngineError
from paceline.link import Lookahead, Stamp
from paceline.lookup import SuffixLookup
from verify_service import sequence as engine_sequence
from verify_service.beside import Beside
from verify_service.engine import Engine
from verify_service.link_port import Offer, Proposal, Refusal
from verify_service.sequence import Admitted, DecodeSpec, Event, Failed, Finished, Run, State

TENANTS = ("", "a", "b")


class Clock:
    """Moves on a little whenever it is read, so that nothing stands still."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1e-5
        return self.now


def manual_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which an engine made from now on lives."""
    clock = Clock()
    for module in (verify_service.engine, verify_service.step):
        monkeypatch.setattr(module, "time", clock)
    return clock


class Asked(SimpleNamespace):
    """A question on the link: stamp, k, and the tokens it builds on."""


class Port:
    """A link to a drafter whose answers the driver decides."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.mirrors: dict[int, list[int]] = {}
        self.questions: list[Asked] = []

    def open(self, sequence: engine_sequence.Sequence, epoch: int, k: int, lookahead: Lookahead) -> None:
        self.mirrors[sequence.id] = list(sequence.tokens)
        self._ask(Stamp(sequence.id, epoch, len(sequence.tokens)), k)

    def commit(
        self, stamp: Stamp, token_ids: list[int], k: int, round_index: int, lookahead: Lookahead
    ) -> None:
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

    def __init__(
        self,
        seed: int,
        clock: Clock,
        runner: Any,
        config: VerifyConfig,
        *,
        ask: "Callable[[World], DecodeSpec]",
        answer: Callable[[DecodeSpec], list[int]],
    ) -> None:
        """``ask`` makes up a request; ``answer`` gives all tokens that it has to end with, those committed left out."""
        self.random = random.Random(seed)
        self.clock = clock
        self.runner = runner
        self.may_fail: Callable[[DecodeSpec], bool] = lambda spec: False
        loop: Any = SimpleNamespace(call_soon_threadsafe=lambda run, events: run(events))
        suffix = SuffixLookup("suffix", pool_bytes=1 << 20, min_probability=0.0)
        beside = Beside({"suffix": suffix}, {"suffix": ("suffix",), "both": ("suffix",)}, {"suffix": "1"})
        self.engine = Engine(runner, config, loop, beside=beside)
        self.scheduler = self.engine._scheduler
        self.ports: dict[str, Port] = {}
        self.events: dict[int, list[Event]] = {}
        self.live: dict[int, engine_sequence.Sequence] = {}
        self.given_up: set[int] = set()
        self.specs: dict[int, DecodeSpec] = {}
        self.right: dict[int, list[int]] = {}
        self.counts: Counter[str] = Counter()
        self.late: list[tuple[str, Proposal]] = []
        self.texts: list[tuple[str, list[int]]] = []
        self.of_tenant: dict[str, list[engine_sequence.Sequence]] = {tenant: [] for tenant in TENANTS}
        self._ask, self._answer = ask, answer
        self._watch_admission()

    # --- what the driver does -----------------------------------------------------------------------------------

    def admit(self) -> None:
        spec = self._ask(self)
        events: list[Event] = []
        try:
            sequence = self.engine.submit(spec, events.append)
        except CapacityError:
            self.counts["refused"] += 1
            assert not events
            return
        self.events[sequence.id] = events
        self.live[sequence.id] = sequence
        self.of_tenant[spec.tenant].append(sequence)
        self.specs[sequence.id] = spec
        self.right[sequence.id] = self._answer(spec)

    def beginning(self, most: int) -> tuple[str, list[int]]:
        """A tenant, and the beginning of a prompt: often where another text of it ended, or how that began."""
        rng, tenant = self.random, self.random.choice(TENANTS)
        if not self.texts or rng.random() < 0.3:
            return tenant, []
        own, old = rng.choice(self.texts)
        return own if rng.random() < 0.8 else tenant, old[: min(most, rng.choice((20, 50, len(old))))]

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
            offer = Offer("1", max_context=self.random.choice((0, 0, 40)), max_level=2, shared=False)
            self.engine.link_up(self.ports[endpoint], {"d": offer, "both": offer})

    def answer_questions(self) -> None:
        """Each question gets a good, bad, short, malformed, stale, doubled or late answer, or none, or a refusal."""
        rng = self.random
        for endpoint, port in self.ports.items():
            questions, port.questions = port.questions, []
            for asked in questions:
                spec = self.specs[asked.stamp.sequence_id]
                known = len(spec.prompt_ids) + len(spec.committed_ids)
                right = self.right[asked.stamp.sequence_id][len(asked.tokens) - known :][: asked.k]
                vocab = self.runner.info.vocab_size - 1
                right += [rng.randrange(vocab) for _ in range(asked.k - len(right))]  # behind the end
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
                    "half": right[: asked.k // 2] + [(t + 1) % vocab for t in right[asked.k // 2 :]],
                    "wrong": [(t + 1) % vocab for t in right],
                    "empty": [],
                    "bad": rng.choice(([vocab + 1], [-1], right * 7)),
                }.get(kind, right)
                proposal = Proposal(asked.stamp, tokens, 0.0)
                if kind == "late":
                    self.late.append((endpoint, proposal))
                else:
                    self.engine.proposed(endpoint, [proposal] * (2 if kind == "twice" else 1), self.clock.now)
                if rng.random() < 0.5:
                    ahead = self._drafted_ahead(asked, right)
                    self.engine.proposed(endpoint, ahead, self.clock.now)
                    self.late += [(endpoint, one) for one in ahead if rng.random() < 0.3]

    def _drafted_ahead(self, asked: Asked, right: list[int]) -> list[Proposal]:
        """Outcomes of the round that was asked for, right ones and wrong ones, with any block behind them."""
        rng, vocab = self.random, self.runner.info.vocab_size - 1
        outcomes = [tuple(right[: rng.randint(1, len(right))]) for _ in range(3) if right]
        outcomes += [(*right[: rng.randint(0, len(right))], rng.randrange(vocab)) for _ in range(3)]
        blocks = [[rng.randrange(vocab) for _ in range(rng.randint(0, asked.k))] for _ in outcomes]
        return [
            Proposal(asked.stamp, block, 0.0, assumed_ids=outcome)
            for outcome, block in zip(outcomes, blocks, strict=True)
        ]

    def answer_late(self) -> None:
        late, self.late = self.late, []
        self.random.shuffle(late)
        for endpoint, proposal in late:
            self.engine.proposed(endpoint, [proposal], self.clock.now)

    def turn(self) -> None:
        """What the engine's thread does once."""
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
            assert kv.length(sequence.slot) < len(sequence.tokens) + (sequence.state is State.PREFILL)
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
        right = self.right[number]
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
                assert self.may_fail(spec)
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

    # --- the driver ---------------------------------------------------------------------------------------------

    def happen(self, action: Callable[[], None]) -> None:
        """One event, and what must hold after it."""
        action()
        self.check()

    def settle(self) -> None:
        """Turns until everything has come to its end; then all memory is free, in both tiers."""
        for _ in range(5000):
            if not self.live:
                break
            self.happen(self.turn)
        assert not self.live, "nothing is lost"
        assert self.scheduler.slots.is_idle()
        self.scheduler.slots.clear()
        assert self.runner.kv.is_idle()
        assert not any(port.mirrors for port in self.ports.values()), "no mirror outlives its sequence"
        self.counts["preempted"] = self.scheduler.num_preempted
        self.counts["tokens reused"] = self.scheduler.slots.tokens_reused
