"""What one tenant got must not show in what is drafted for another, through the public API."""

import pytest
from stack import running_stack, stack_config

from paceline.testing.tiny_models import tiny_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("place", ["draft", "verify"])
async def test_a_tenant_profits_from_its_own_outputs_only(pair, place):
    """The same request again is guessed nearly whole for its own tenant, and like the first time for another one."""
    config = stack_config(*pair, [f"draft.drafters.suffix.place={place}"])
    async with running_stack(config) as stack:

        async def accepted(tenant):
            # Hot sampling: the text hardly repeats itself, so what is accepted must come from somewhere else.
            answer = await stack.generate(
                text="once", temperature=1.5, seed=7, max_tokens=60, drafter="suffix", k=8, tenant=tenant
            )
            return answer.token_ids, answer.finished.speculative.num_accepted_draft_tokens

        first = await accepted("a")
        again = await accepted("a")
        other = await accepted("b")
        nameless = await accepted("")
        assert first[0] == again[0] == other[0] == nameless[0]
        assert again[1] > first[1] + 15
        assert other[1] < first[1] + 10
        assert nameless[1] < first[1] + 10
