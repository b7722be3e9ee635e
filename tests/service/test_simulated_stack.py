"""Simulated devices under the real system."""

import pytest
from stack import running_stack

from cluster.simulated import simulated
from paceline.config import load_config
from paceline.errors import ConfigError

PATIENT = ["verify.draft_wait_s=5.0", "verify.draft_wait_least_s=5.0"]
PORTS = ["draft.server.port=0", "verify.server.port=0", "router.server.port=0", "router.holdout=0"]


async def test_a_simulated_stack_speculates_and_says_the_same():
    """Plain and speculative text are equal, and every task is planned speculatively."""
    config = load_config(None, [*simulated("8b+1b"), *PORTS, "simulation.time_scale=0.05", *PATIENT])
    request = {"text": "Why do riders take turns?", "max_tokens": 60, "temperature": 0.7, "seed": 4}
    async with running_stack(config) as stack:
        plain = await stack.generate(**request)
        drafted = await stack.generate(**request, mode=None)
        assert drafted.token_ids == plain.token_ids
        assert drafted.started.plan.drafter == "simulated"
        fixed = await stack.generate(
            **request, drafter="simulated", k=4
        )  # how deep a plan drafts is a matter of times
        assert fixed.token_ids == plain.token_ids
        stats = fixed.finished.speculative
        assert 0 < stats.num_accepted_draft_tokens <= stats.num_draft_tokens
        assert (await stack.client.server_info()).model.runner == "simulated"


async def test_a_distance_between_the_tiers_shows_as_network_time():
    """10 ms of round trip, in every round with a block."""
    settings = ["simulation.time_scale=0.05", "simulation.rtt_ms=10", *PATIENT, 'verify.draft_level="0"']
    config = load_config(None, [*simulated("27b+block"), *PORTS, *settings])
    async with running_stack(config) as stack:
        await stack.generate(text="x", max_tokens=20, seed=1, drafter="simulated", k=4)
        (request,) = await stack.client.list_requests(limit=1)
        rounds = [record for record in request.rounds if record.drafted]
        assert rounds
        assert all(record.network_s >= 0.0099 for record in rounds)


def test_an_unknown_pair_is_refused():
    """With the pairs that there are."""
    with pytest.raises(ConfigError, match=r"70b\+1b"):
        simulated("1b+8b")
