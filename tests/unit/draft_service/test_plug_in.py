"""Drafters by import path: what is wrong is refused at start, in words."""

import pytest

from draft_service.drafters import build_drafters
from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.testing.tiny_models import write_tiny_tokenizer
from paceline.tokenizer import Tokenizer

MODULE = """
class Good:
    version, max_context, slow = "good-1", 0, False
    def __init__(self, name, entry, config, tokenizer):
        self.name, self.options = name, entry.options
    def open(self, handle): ...
    def propose(self, batch): return [[] for _ in batch]
    def close(self, handle): ...

class Bare:
    def __init__(self, *arguments): ...

class Nameless(Good):
    def __init__(self, *arguments): self.name = "other"

class Odd(Good):
    version, max_context, slow = 3, -1, "no"

def broken(*arguments): raise RuntimeError("no luck")

number = 7
"""


@pytest.fixture
def build(tmp_path, monkeypatch):
    (tmp_path / "some_plug_in.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "bad_plug_in.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)

    def run(*overrides):
        return build_drafters(load_config(None, overrides), tokenizer)

    return run


def test_a_plug_in_is_a_drafter_like_any_other(build):
    """It gets its options, stands beside the built-in ones, and can be a member of a cascade."""
    drafters = build(
        "draft.drafters.mine={kind='some_plug_in:Good', options={depth=3, word='x', on=true}}",
        "draft.drafters.ngram.kind=ngram",
        "draft.drafters.both={kind='cascade', members=['mine', 'ngram']}",
    )
    assert list(drafters) == ["mine", "ngram", "both"]
    assert drafters["mine"].options == {"depth": 3, "word": "x", "on": True}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nowhere.at_all:Drafter", "cannot import nowhere.at_all: ModuleNotFoundError"),
        ("bad_plug_in:Drafter", "cannot import bad_plug_in: ZeroDivisionError"),
        ("some_plug_in:Missing", "has no function or class Missing"),
        ("some_plug_in:number", "has no function or class number"),
        ("some_plug_in:broken", "broken failed: RuntimeError: no luck"),
        ("some_plug_in:Bare", "no method propose"),
        ("some_plug_in:Nameless", "name is 'other', not 'mine'"),
        ("some_plug_in:Odd", "version is 3, not a text; max_context is -1"),
    ],
)
def test_what_is_no_drafter_is_refused(build, kind, words):
    """The setting, and what is wrong with it."""
    with pytest.raises(ConfigError) as caught:
        build(f"draft.drafters.mine.kind='{kind}'")
    assert words in str(caught.value)
    assert "draft.drafters.mine.kind" in str(caught.value)


@pytest.mark.parametrize("kind", ["", "oracle", "a.b", "a.b:", ":c", "a b:c", "a:b:c", "../x:y"])
def test_a_kind_is_a_known_word_or_an_import_path(kind):
    """Anything else is refused before anything is imported."""
    with pytest.raises(ConfigError, match=r"package\.module:constructor"):
        load_config(None, [f'draft.drafters.x.kind="{kind}"'])


@pytest.mark.parametrize("members", ["['gone']", "['both']", "[]"])
def test_a_cascade_needs_members_that_are_there(build, members):
    """A name that is no drafter, itself, or none at all."""
    with pytest.raises(ConfigError, match=r"draft\.drafters\.both"):
        build(f"draft.drafters.both={{kind='cascade', members={members}}}", "draft.drafters.ngram.kind=ngram")
