"""The back-off table: what training counted is what look-ups find; a directory that is none is refused in words."""

import json
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.config import DrafterConfig
from paceline.errors import ConfigError
from paceline.lookup import build_lookup
from paceline.lookup.backoff import SETTINGS, WEIGHTS, BackoffLookup, BackoffTable, check_of, hash_of
from paceline.lookup.native import native_library
from training import backoff
from training.answers import Answer

ORDER = 3


def answer(ids: list[int], prompt_len: int = 1) -> Answer:
    """An answer whose target was sure of each token but for a tenth, which it gave to the token after it."""
    rest = ids[prompt_len:]
    top = np.array([[token, token + 1] for token in rest])
    return Answer("qa", "s", 0.0, np.array(ids), prompt_len, top, np.log(np.array([[0.9, 0.1]] * len(rest))))


def made(directory: Path, *answers: Answer) -> BackoffTable:
    counts = [defaultdict(lambda: defaultdict(float)) for _ in range(ORDER)]
    for one in answers:
        backoff.count(one, counts, top=2)
    about = {"order": ORDER, "tokenizer_fingerprint": "f"}
    backoff.write(directory, backoff.table(counts, least=0.0), about)
    return BackoffTable(directory)


def test_the_longest_known_context_decides(tmp_path: Path) -> None:
    """After 2 usually 3 comes, after 9 2 always 5; an unknown context backs off, an unknown token has no guess."""
    table = made(tmp_path, *[answer([1, 2, 3])] * 5, *[answer([9, 2, 5])] * 3)
    assert table.next([2])[0] == 3
    assert table.next([1, 2])[0] == 3
    assert table.next([9, 2])[0] == 5
    token, chance, length = table.next([7, 7, 2])
    assert (token, length) == (3, 1)
    assert 0.5 < chance < 0.7
    assert table.next([42]) is None
    assert table.next([]) is None


def test_what_a_longer_context_says_anew_is_all_that_is_kept(tmp_path: Path) -> None:
    """A context that says what the shorter one says takes no room."""
    counts = [defaultdict(lambda: defaultdict(float)) for _ in range(ORDER)]
    for one in [answer([1, 2, 3, 4, 5, 6])] * 4:
        backoff.count(one, counts, top=1)
    entries = backoff.table(counts, least=0.0)
    assert all(len(context) == 1 for context in entries)


def test_every_counted_context_is_found_again(tmp_path: Path) -> None:
    """Thousands of random contexts through the hash table: each says what the dictionary said."""
    rng = np.random.default_rng(3)
    texts = [answer(rng.integers(0, 300, 60).tolist()) for _ in range(80)]
    counts = [defaultdict(lambda: defaultdict(float)) for _ in range(ORDER)]
    for one in texts:
        backoff.count(one, counts, top=2)
    entries = backoff.table(counts, least=0.0)
    backoff.write(tmp_path, entries, {"order": ORDER, "tokenizer_fingerprint": "f"})
    table = BackoffTable(tmp_path)
    assert len(entries) > 3000
    for context, (token, chance) in entries.items():
        found = table.next(list(context))
        assert found is not None
        assert found[0] == token
        assert found[1] == pytest.approx(chance, abs=1 / 255)


def test_guesses_follow_each_other_and_get_unlikely(tmp_path: Path) -> None:
    """A chain of guesses, each from the ones before; it ends at the bar, and what fails is trusted less."""
    table = made(tmp_path, *[answer([1, 2, 3, 4, 5, 6, 7, 8])] * 20)
    lookup = BackoffLookup("backoff", table, version="1", min_probability=0.5)
    lookup.open(1)
    text = [1, 2]
    weighed = lookup.guess(1, text, prompt_len=1, scope="", k=4)
    assert weighed.token_ids == [3, 4, 5, 6]
    assert weighed.probabilities == sorted(weighed.probabilities, reverse=True)
    for _ in range(12):
        text = [*text, 99, 2]
        after = lookup.guess(1, text, prompt_len=1, scope="", k=4)
    assert after.token_ids == [], "the table was wrong here again and again"


@pytest.mark.skipif(native_library() is None, reason="no C++ compiler at hand")
@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("bar", [0.0, 0.05, 0.4])
def test_compiled_and_python_guess_the_same_to_the_last_bit(tmp_path: Path, order: int, bar: float) -> None:
    """Thousands of questions about several texts at once, guessed right, wrong, not at all: tokens and probabilities are equal."""
    rng = random.Random(5)
    table = made(tmp_path, *[answer([rng.randrange(12) for _ in range(40)]) for _ in range(12)])
    table.order = order
    lookups = [
        BackoffLookup("backoff", table, version="1", min_probability=bar, native=native)
        for native in (True, False)
    ]
    texts: dict[int, list[int]] = {handle: [rng.randrange(12) for _ in range(handle)] for handle in range(6)}
    for lookup in lookups:
        for handle in texts:
            lookup.open(handle)
    guessed = 0
    for _ in range(2000):
        handle, k = rng.randrange(6), rng.choice([1, 4, 64])
        one, two = (lookup.guess(handle, texts[handle], prompt_len=0, scope="", k=k) for lookup in lookups)
        assert one == two
        guessed += len(one.token_ids)
        texts[handle] += one.token_ids[: rng.randint(0, 3)] or [rng.randrange(14)]
    assert guessed > 500 or bar > 0.3


def test_a_chance_of_nothing_is_no_trouble(tmp_path: Path) -> None:
    """A table may hold a guess that is right once in a thousand times: 0 in 255ths."""
    (tmp_path / SETTINGS).write_text(json.dumps(SETTINGS_OF))
    checks, tokens = np.zeros(FULL, U4), np.full(FULL, 7, U4)
    key = hash_of([5])
    checks[key % FULL] = check_of(key)
    save_file(arrays(checks=checks, tokens=tokens, chances=np.zeros(FULL, np.uint8)), tmp_path / WEIGHTS)
    for native in (True, False):
        lookup = BackoffLookup("b", BackoffTable(tmp_path), version="1", min_probability=0.0, native=native)
        lookup.open(1)
        assert lookup.guess(1, [5], prompt_len=0, scope="", k=1).probabilities == [0.0]


def test_a_directory_that_is_no_table_is_refused(tmp_path: Path) -> None:
    """Missing, broken or of another shape: one error that names the directory."""
    with pytest.raises(ConfigError, match=str(tmp_path)):
        BackoffTable(tmp_path)
    (tmp_path / SETTINGS).write_text(json.dumps({"order": 3}))
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no back-off table"):
        BackoffTable(tmp_path)


U4, FULL = np.uint32, 16
SETTINGS_OF = {"order": 3, "tokenizer_fingerprint": "f", "version": "v"}


def arrays(**changes: np.ndarray) -> dict[str, np.ndarray]:
    checks = np.arange(FULL, dtype=U4)  # its first slot is empty
    return {
        "checks": checks,
        "tokens": np.full(FULL, 7, U4),
        "chances": np.full(FULL, 255, np.uint8),
    } | changes


@pytest.mark.parametrize(
    ("settings", "weights", "says"),
    [
        (SETTINGS_OF, arrays(checks=np.full(FULL, 7, U4)), "never end"),
        (SETTINGS_OF, {n: np.resize(a, 8192) for n, a in arrays(checks=np.r_[0, np.full(8191, 7)]).items()}, "too long"),
        (SETTINGS_OF, {name: array[:0] for name, array in arrays().items()}, "power of two"),
        (SETTINGS_OF, {name: array[:12] for name, array in arrays().items()}, "power of two"),
        (SETTINGS_OF, arrays(tokens=np.zeros(8, U4)), "power of two"),
        (SETTINGS_OF, {name: array.reshape(4, 4) for name, array in arrays().items()}, "2 dimensions"),
        (SETTINGS_OF, arrays(checks=np.full(FULL, np.nan, np.float32)), "float32"),
        (SETTINGS_OF, arrays(tokens=np.full(FULL, -1, np.int64)), "tokens holds numbers"),
        (SETTINGS_OF, {"checks": np.zeros(FULL, U4)}, "tokens"),
        (SETTINGS_OF, arrays(tokens=np.full(FULL, 100, U4)), "token 100, the target's vocabulary has 100"),
        ([1], arrays(), "JSON object"),
        (SETTINGS_OF | {"order": "3"}, arrays(), "order = '3'"),
        (SETTINGS_OF | {"order": 0}, arrays(), "order = 0"),
        (SETTINGS_OF | {"order": 9}, arrays(), "order = 9"),
        (SETTINGS_OF | {"order": True}, arrays(), "order = True"),
        (SETTINGS_OF | {"tokenizer_fingerprint": 5}, arrays(), "tokenizer_fingerprint = 5"),
        ({"order": 3, "tokenizer_fingerprint": "f"}, arrays(), "version = None"),
    ],
)  # fmt: skip
def test_a_table_that_a_look_up_would_stumble_over_is_refused(
    tmp_path: Path, settings: object, weights: dict[str, np.ndarray], says: str
) -> None:
    """When it is loaded, by the setting's name: not in the middle of a request, nor by never coming back."""
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    save_file(weights, tmp_path / WEIGHTS)
    entry = DrafterConfig(kind="backoff", table=str(tmp_path))
    with pytest.raises(ConfigError, match=r"draft\.drafters\.mine\.table: .*") as raised:
        build_lookup("mine", entry, "f", 100)
    assert says in str(raised.value)


def test_a_table_within_the_vocabulary_is_taken(tmp_path: Path) -> None:
    """What empty slots hold does not matter; without a known vocabulary any token may be guessed."""
    (tmp_path / SETTINGS).write_text(json.dumps(SETTINGS_OF))
    save_file(arrays(tokens=np.array([4_000_000_000] + [99] * 15, U4)), tmp_path / WEIGHTS)
    entry = DrafterConfig(kind="backoff", table=str(tmp_path))
    for vocab_size in (100, None):
        lookup = build_lookup("mine", entry, "f", vocab_size)
        lookup.open(1)
        assert lookup.guess(1, [1, 2, 3, 4], prompt_len=2, scope="", k=4).token_ids == []


def test_the_committed_table_fits_its_target() -> None:
    """It loads, has the size its card says, and finds something for common contexts of the default target."""
    directory = Path(__file__).parents[3] / "models" / "smollm2-backoff"
    table = BackoffTable(directory)
    assert str(table.settings["contexts"]) in (directory / "README.md").read_text()
    assert (directory / WEIGHTS).stat().st_size < 12e6
    found = [table.next([token]) for token in range(20, 2000)]
    assert sum(one is not None for one in found) > 1000
    assert all(one is None or 0 <= one[0] < 49_152 for one in found)
