"""Whether compiled code decides as Python does: asked once, when it is loaded.

Compilers have made wrong code of loops like these, and nobody would see it: a wrong depth changes no token, it costs time. A few steps that
pass through nearly all of the code take some milliseconds.
"""

import random
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.types import AcceptancePrior, DepthReason
from verify_service import controller
from verify_service.belief import DrafterTrack, Look, Track
from verify_service.costs import table_of
from verify_service.facts import Decision, Ready, Remembered, RowFact, State, StepFacts
from verify_service.prices import Model

_STEPS, _SEQUENCES = 16, 12
_TABLE = table_of(
    [(1, 1, 0.006), (1, 5, 0.0062), (1, 17, 0.01), (8, 8, 0.009), (8, 40, 0.011), (8, 72, 0.028)],
    row_key_s=1e-9,
    sequence_key_s=2e-7,
)


class Checked(Protocol):
    """The compiled policy."""

    def decide(self, model: Model, state: Any, facts: StepFacts, /) -> tuple[Remembered, dict[int, Decision]]:
        """See ``controller.decide``."""

    def trim(
        self,
        model: Model,
        state: Any,
        ready: Sequence[Ready],
        num_sequences: int,
        prompt_rows: int,
        num_plain: int,
        /,
    ) -> dict[int, tuple[int, DepthReason | None]]:
        """See ``controller.trim``."""


def decides_as_python(policy: Checked) -> bool:
    """Whether a fixed sequence of steps gets the same decisions, cuts and state, to the last bit."""
    rng = random.Random(6)
    model, own = Model(_TABLE), _begun()
    state: Any = own
    for step in range(_STEPS):
        facts = some_facts(rng, step, _SEQUENCES)
        own, decisions = controller.decide(model, own, facts)
        state, found = policy.decide(model, state, facts)
        if isinstance(state, State) or list(found.items()) != list(decisions.items()):
            return False
        ready = some_ready(rng, facts)
        question = len(facts.rows), 30 * (step % 5 == 0), int(step % 3 == 0)
        if policy.trim(model, state, ready, *question) != controller.trim(model, own, ready, *question):
            return False
    return repr(state.plain()) == repr(own)


def _begun() -> State:
    """What many rounds lead to: sequences about to be suspended or to change, one suspended, look-ups that lose, one outside the steps."""
    names = ("d", "d", "d", "d", "d", "e")
    tracks = {id_: Track(name) for id_, name in enumerate(names)}
    tracks[0].zero_rounds = tracks[2].zero_rounds = 7
    tracks[1].better, tracks[3].suspended = 110.0, True
    tracks[5].judged, tracks[5].worth_s, tracks[4].every, tracks[4].judged = 31, -1.0, 4, 5
    tracks[99] = Track("e", rows=2.0, tokens=2.5)
    drafters = {"e": DrafterTrack(), "d": DrafterTrack(accepted=30.0, rejected=9.0, exposed_s=1e-4)}
    return State(tracks, drafters)


def some_facts(rng: random.Random, step: int, sequences: int) -> StepFacts:
    """What a step of so many sequences may report, and a little more than that."""
    # Suspended ones only in some steps: their guard holds all others back. In others nobody is asked: look-ups are all there is.
    alone, begun = step % 4 == 3, step % 4 == 0
    ids = [id_ for id_ in range(sequences) if (id_ == 5 if alone else begun or id_ not in (2, 3))]
    rows = tuple(_some_row(rng, id_) for id_ in ids if rng.random() < 0.9)
    num_rows = len(rows) + sum(row.drafted for row in rows)
    prompt_rows = rng.choice((0, 0, 0, 20))
    return StepFacts(
        step, rows, len(rows), num_rows + prompt_rows, prompt_rows, rng.uniform(1.0, 900.0), rng.choice((0.0, 0.01, 0.02)),
        rng.choice((0.0, 1e-3)), rng.choice((-1.0, 2e-4, 3e-4, 2e-3)), rng.uniform(0.0, 2e-3),
        len(rows) + rng.randrange(3), int(rng.random() < 0.2),
    )  # fmt: skip


def _some_row(rng: random.Random, id_: int) -> RowFact:
    # Each sequence has its own luck and its own ways: else nobody would ever be suspended, quiet or sure.
    k_max, luck = 1 + id_ * 7 % 12, (0.1, 0.97, 0.5, 0.85)[id_ % 4]
    asked = k_max if rng.random() < 0.6 else 0
    proposed = rng.choice((k_max, k_max, k_max // 2, 0, -1)) if asked else -1
    found = None
    if id_ in (0, 4, 5, 10) and rng.random() < 0.8:
        found = tuple(luck ** (1 + at) for at in range(rng.randrange(4)))
    drafted = max(proposed, 0)
    if found is not None and not drafted:
        drafted = rng.randrange(3)
    agreed = 0
    while agreed < drafted and rng.random() < luck:
        agreed += 1
    look = None
    if not asked and rng.random() < 0.5:
        length = rng.randrange(4)
        look = Look(length, length, min(length, int(rng.random() < luck)), rng.choice((0, 5, 300)), 0.002)
    prior = (None, AcceptancePrior(0.7, 8.0), AcceptancePrior(0.4, 40.0, (0.7, 0.4, 0.1)))[id_ % 3]
    return RowFact(
        id_, ("d", "d", "d", "d", "d", "e", "ö", "")[id_ % 8], k_max, rng.choice((100, 100, 100, 2, 0)), rng.random() < 0.05, asked, proposed,
        drafted, agreed, look, prior, rng.random() < 0.03, found, id_ == 5, found is not None and rng.random() < 0.8, rng.choice((0, 700)),
    )  # fmt: skip


def some_ready(rng: random.Random, facts: StepFacts) -> list[Ready]:
    """The blocks of a next step."""
    found = []
    for row in facts.rows:
        if row.drafter and rng.random() < 0.7:
            length = rng.randrange(1, row.k_max + 1)
            survival = tuple(rng.random() ** (1 + at) for at in range(length)) if row.id % 4 == 0 else None
            found.append(Ready(row.id, length, rng.random() < 0.1, survival))
    return found
