"""Blocks that were drawn are verified whole, whatever the controller thinks of them now that they are here."""

import pytest

from paceline.types import DepthReason, DraftDistribution, Law, Plan, ProposalOutcome, SamplingParams
from verify_service import controller, steering
from verify_service.block import Block
from verify_service.facts import RowFact, StepFacts
from verify_service.scheduler import Work
from verify_service.sequence import DecodeSpec, Sequence


def work(law: Law, sequence_id: int) -> Work:
    spec = DecodeSpec(
        request_id="r",
        prompt_ids=(1, 2, 3),
        committed_ids=(),
        sampling=SamplingParams(),
        max_tokens=20,
        stop_ids=frozenset(),
        plan=Plan.speculative("d", 4, "test", law),
    )
    return Work(Sequence(sequence_id, spec, lambda event: None, arrived=0.0), 1, is_prefill=False)


@pytest.mark.parametrize("law", [Law.RATIO, Law.BLOCK])
def test_the_controller_cuts_guesses_but_not_draws(law, monkeypatch):
    """A step that cannot pay for its blocks: those without distributions go, the drawn one stays as it is."""
    seen = []

    def nothing_pays(model, state, ready, *rest):
        seen.extend(ready)
        return {block.id: (block.length if block.fixed else 0, DepthReason.COST) for block in ready}

    monkeypatch.setattr(controller, "trim", nothing_pays)
    drawn = Block([7], ProposalOutcome.USED, "d", distributions=(DraftDistribution((7,), (1.0,)),))
    guessed = Block([7, 8], ProposalOutcome.USED, "d")
    blocks = steering.Steering(None, policy=controller).cut(
        [work(law, 1), work(Law.COUPLED, 2)], [drawn, guessed], 0.0
    )
    assert [block.fixed for block in seen] == [True, False]
    assert blocks[0] is drawn
    assert blocks[1].token_ids == []


@pytest.mark.parametrize("policy", [controller, None], ids=["in Python", "as it serves"])
def test_a_sequence_that_is_cancelled_is_forgotten(policy):
    """Whatever decides: what is known of it goes, what is known of others stays."""
    one = steering.Steering(None, policy=policy)
    rows = tuple(RowFact(id_, "d", 4, 9, False, 0, -1, 0, 0, None, None, False) for id_ in (1, 2))
    facts = StepFacts(0, rows, 2, 2, 0, 256.0, 0.01, 0.0, 2e-4, 0.0, 2, 0)
    one._state, _ = one._policy.decide(one._model, one._state, facts)
    assert one._state.num_idle([1, 2]) == 0
    one.forget(work(Law.COUPLED, 2).sequence)
    one.forget(work(Law.COUPLED, 7).sequence)
    assert (one._state.num_idle([1]), one._state.num_idle([1, 2])) == (0, 1)
    assert one.now_s(2, 3) > 0
