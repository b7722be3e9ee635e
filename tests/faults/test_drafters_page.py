"""docs/drafters.md is true: its example is taken from the page, put on the path, configured as shown, and served."""

import re
import tomllib
from pathlib import Path

import pytest
from stack import load_config_with, running_stack, stack_config

from paceline.config import DrafterConfig
from paceline.testing.tiny_models import tiny_pair
from paceline.tokenizer import Tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def pair(tmp_path_factory):
    return tiny_pair(tmp_path_factory.mktemp("pair"))


async def test_the_example_serves(pair, tmp_path, monkeypatch):
    """One file, one entry: the drafter guesses, the output is the plain one, and the reply names drafter, version, law."""
    (code,) = blocks("python")
    entry = tomllib.loads(blocks("toml")[-1])["draft"]["drafters"]["phrase"]
    assert re.search(r"^# (\w+)\.py", code).group(1) == entry["kind"].partition(":")[0]
    (tmp_path / "my_drafters.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    # The tiny target says nothing sensible: the phrase is what it says, so that there is something to finish.
    async with running_stack(stack_config(*pair)) as stack:
        plain = await stack.generate(text="once", max_tokens=40, temperature=0.0)
    tokenizer = Tokenizer.load(pair[0])
    said = [plain.token_ids[at : at + length] for length in (5, 4, 3, 2) for at in range(40 - length)]
    phrase = next(text for ids in said if tokenizer.encode(text := tokenizer.decode(ids)) == ids)
    drafter = DrafterConfig.model_validate(entry | {"options": {"phrase": phrase}})
    config = stack_config(*pair)
    config = load_config_with(config, draft={"drafters": config.draft.drafters | {"phrase": drafter}})
    async with running_stack(config) as stack:
        answer = await stack.generate(text="once", max_tokens=40, temperature=0.0, drafter="phrase", k=4)
        assert answer.token_ids == plain.token_ids
        plan = answer.finished.plan
        assert (plan.drafter, plan.drafter_version, plan.law.value) == ("phrase", "phrase-1", "coupled")
        assert answer.started.plan.drafter_version == plan.drafter_version
        assert answer.finished.speculative.num_draft_tokens > 0
        offered = {d.name: d.version for d in (await stack.client.server_info()).drafters}
        assert offered["phrase"] == "phrase-1"
        cascade = await stack.generate(text="once", max_tokens=40, temperature=0.0, drafter="cascade", k=4)
        assert cascade.finished.plan.drafter_version.startswith("cascade-1-")


def test_the_settings_on_the_page_are_valid():
    """Every entry shown can be written so."""
    for block in blocks("toml"):
        for entry in tomllib.loads(block)["draft"]["drafters"].values():
            DrafterConfig.model_validate(entry)
