"""Look-ups beside the target: who is asked here, what is found, what becomes of it."""

import json
from pathlib import Path

import pytest

from paceline.config import DraftConfig, load_config
from paceline.errors import ConfigError
from paceline.lookup import SuffixLookup, Weighed
from paceline.types import Plan, ProposalOutcome, SamplingParams
from verify_service.beside import Beside, build_beside
from verify_service.sequence import DecodeSpec, Sequence

FINGERPRINT = json.loads(Path("models/smollm2-backoff/backoff.json").read_text())["tokenizer_fingerprint"]
TEXT = [1, 2, 3, 4, 1, 2]


def sequence(drafter: str = "suffix", id_: int = 1, tenant: str = "a", prompt=(1,)) -> Sequence:
    plan = Plan.speculative(drafter, 4, "") if drafter else Plan.plain("")
    spec = DecodeSpec("r", tuple(prompt), (), SamplingParams(), 100, frozenset(), plan, tenant=tenant)
    return Sequence(id_, spec, lambda event: None, arrived=0.0)


def beside(**changes) -> Beside:
    lookup = SuffixLookup("suffix", pool_bytes=1 << 20, min_probability=0.0)
    drafters = {"suffix": ("suffix",), "cascade": ("suffix",)}
    return Beside({"suffix": lookup} | changes, drafters, {"suffix": lookup.version})


def test_what_is_found_is_the_next_rounds_block() -> None:
    """Guesses with their probabilities, made when a question would have been sent; gone with the next commit."""
    lookups, row = beside(), sequence(prompt=TEXT)
    found = lookups.look(row, 3)
    assert found is not None
    assert len(found) == 3
    block = lookups.take(row)
    assert block is not None
    assert block.beside
    assert block.token_ids == [3, 4, 1]
    assert block.survival == found
    assert block.outcome is ProposalOutcome.USED
    assert block.answered_at - block.asked_at == pytest.approx(block.residence_s)
    row.tokens.append(3)
    assert lookups.take(row) is None, "it was for another length"


def test_only_a_drafter_that_is_asked_nowhere_else_says_that_nothing_was_found() -> None:
    """A cascade's other members are asked then; a plain request and another drafter are none of its business."""
    lookups = beside()
    for row, says in ((sequence(), True), (sequence("cascade", 2), False)):
        assert lookups.look(row, 4) == ()
        block = lookups.take(row)
        assert (block is not None) is says
        assert block is None or block.outcome is ProposalOutcome.EMPTY
    for row in (sequence("", 3), sequence("model", 4)):
        assert lookups.look(row, 4) is None
        assert lookups.take(row) is None


def test_a_finished_text_serves_its_own_tenant() -> None:
    """What one request got is found by the next one of the same tenant, and by nobody else's."""
    lookups = beside()
    row = sequence(prompt=range(20))
    lookups.look(row, 4)
    lookups.close(row)
    while lookups.tidy():
        pass
    assert lookups.look(sequence(id_=2, prompt=(90, 14, 15)), 2) is not None
    assert lookups.take(sequence(id_=2, prompt=(90, 14, 15))).token_ids == [16, 17]
    assert lookups.look(sequence(id_=3, tenant="b", prompt=(90, 14, 15)), 2) == ()


class Broken:
    """A look-up that raises."""

    name, version = "suffix", "0"

    def __init__(self) -> None:
        self.is_open: set[int] = set()
        self.closed = 0

    def open(self, handle: int) -> None:
        self.is_open.add(handle)

    def guess(self, handle: int, token_ids, *, prompt_len: int, scope: str, k: int) -> Weighed:
        raise RuntimeError("broken")

    def close(self, handle: int) -> None:
        self.is_open.remove(handle)
        self.closed += 1

    def tidy(self) -> bool:
        return False


def test_a_look_up_that_fails_costs_its_guesses_only(caplog: pytest.LogCaptureFixture) -> None:
    """The sequence goes on without, and the fault is said once; no look-up keeps its text."""
    other, broken, row = Broken(), Broken(), sequence(prompt=TEXT)
    other.guess = lambda *_, **__: Weighed([], [])  # type: ignore[method-assign]
    lookups = Beside({"other": other, "suffix": broken}, {"suffix": ("other", "suffix")}, {})
    for _ in range(3):
        assert lookups.look(row, 4) == ()
        row.tokens.append(7)
        assert (other.is_open, broken.is_open) == (set(), set())
    lookups.close(row)
    assert (other.closed, broken.closed) == (1, 1)
    assert caplog.text.count("a look-up failed") == 1


def test_a_look_up_that_cannot_be_opened_leaves_none_open(caplog: pytest.LogCaptureFixture) -> None:
    """Those before it are closed."""
    other, broken, row = Broken(), Broken(), sequence(prompt=TEXT)
    broken.open = lambda handle: [][handle]  # type: ignore[method-assign]
    lookups = Beside({"other": other, "suffix": broken}, {"suffix": ("other", "suffix")}, {})
    assert lookups.look(row, 4) == ()
    assert (other.is_open, other.closed, broken.closed) == (set(), 1, 0)


def test_a_guess_outside_the_vocabulary_ends_the_block() -> None:
    """The target could not read it; what stands before it is a guess like any other."""
    lookup = SuffixLookup("suffix", pool_bytes=1 << 20, min_probability=0.0)
    lookups = Beside({"suffix": lookup}, {"suffix": ("suffix",)}, {}, vocab_size=4)
    row = sequence(prompt=TEXT)
    assert len(lookups.look(row, 3) or ()) == 1
    block = lookups.take(row)
    assert block is not None
    assert block.token_ids == [3]


def test_settings_say_what_is_looked_up_where() -> None:
    """Look-ups are beside the target unless placed in the draft tier; a cascade of nothing else is asked nowhere else."""
    config = load_config(None, [])
    assert config.draft.beside() == {
        "ngram": ("ngram",),
        "suffix": ("suffix",),
        "backoff": ("backoff",),
        "cascade": ("suffix", "backoff"),
    }
    lookups = build_beside(config.draft, FINGERPRINT)
    assert set(lookups.alone) == {"ngram", "suffix", "backoff"}, "the cascade has a model too"
    with pytest.raises(ConfigError, match="tokenizer"):
        build_beside(config.draft, "another")
    ghost = load_config(
        None, ["draft.drafters={c={kind='cascade', members=['gone', 'n']}, n={kind='ngram'}}"]
    )
    with pytest.raises(ConfigError, match=r"draft\.drafters\.c\.members: \['gone'\]"):
        build_beside(ghost.draft, FINGERPRINT)
    whole = load_config(None, ["draft.drafters={c={kind='cascade', members=['n']}, n={kind='ngram'}}"]).draft
    assert set(build_beside(whole, FINGERPRINT).alone) == {"c", "n"}
    away = load_config(
        None, ["draft.drafters={c={kind='cascade', members=['n']}, n={kind='ngram', place='draft'}}"]
    )
    assert away.draft.beside() == {}
    together = load_config(
        None, ["draft.drafters={c={kind='cascade', members=['n'], place='draft'}, n={kind='ngram'}}"]
    )
    assert together.draft.beside() == {"n": ("n",)}
    with pytest.raises(ConfigError, match="place"):
        load_config(None, ["draft.drafters.r={kind='random', place='verify'}"])
    assert DraftConfig().beside()["cascade"] == ("suffix",)
