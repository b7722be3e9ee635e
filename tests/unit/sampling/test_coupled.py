"""The coupled law: a slow scalar reference, independence of the batch, ties, broken logits."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import EngineError
from paceline.sampling import (
    BadLogitsError,
    Domain,
    TokenRow,
    choose,
    contenders,
    follow,
    gumbel,
    native_contenders,
    one_row,
    processed_logprobs,
    processors,
    scan,
    top2_gap,
)
from paceline.sampling.noise import exponential, mix64
from paceline.sampling.processors import kept_ids
from paceline.sampling.together import draw_together
from paceline.types import SamplingParams

GOLDEN = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1


def reference_gumbel(seed: int, position: int, token: int) -> float:
    """The noise of one token in plain Python integers, written down from the documentation."""
    key = 0
    for word in (seed, int(Domain.COUPLED), position):
        key = mix64(((key ^ word) + GOLDEN) & MASK64)
    bits = mix64((key + (token + 1) * GOLDEN) & MASK64) & ((1 << 63) - 1)
    return -math.log(exponential(bits))


def reference_choice(logits: torch.Tensor, row: TokenRow) -> int:
    """argmax(log p + g) over the whole vocabulary, token by token."""
    log_probs = processed_logprobs(logits[None], [row])[0].tolist()
    if row.params.greedy:
        return log_probs.index(0.0)
    scores = [
        log_prob + reference_gumbel(row.params.seed, row.position, token)
        for token, log_prob in enumerate(log_probs)
    ]
    return max(range(len(scores)), key=lambda token: (scores[token], -token))


PARAMS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.05},
    {"temperature": 50.0},
    {"temperature": 1e-9},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {
        "temperature": 1.1,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 4.0, 9: -100.0},
    },
    {"temperature": 0.7, "top_p": 0.95, "presence_penalty": -0.5, "frequency_penalty": 0.2},
]


def sharp_logits(rows: int, vocab_size: int, seed: int, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("options", PARAMS, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_choose_equals_the_slow_reference(options, scale):
    """The bounded search finds the argmax of log p + g over the whole vocabulary, for every processor."""
    logits = sharp_logits(12, 301, seed=5, scale=scale)
    rows = [
        TokenRow(SamplingParams(seed=index * 977, **options), 100 + index, [1, 2, 3, 7], [3, 9, 9])
        for index in range(12)
    ]
    assert choose(logits, rows) == [reference_choice(logits[i], row) for i, row in enumerate(rows)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, MASK64),
    position=st.integers(0, 2**31),
    temperature=st.floats(1e-3, 100.0),
    scale=st.floats(0.0, 40.0),
    data_seed=st.integers(0, 10_000),
)
def test_choose_equals_the_slow_reference_at_any_key_and_sharpness(
    seed, position, temperature, scale, data_seed
):
    """No seed, position, temperature or sharpness makes the float32 bound lose the winner."""
    logits = sharp_logits(1, 67, data_seed, scale)
    row = TokenRow(SamplingParams(seed=seed, temperature=temperature), position)
    assert choose(logits, [row]) == [reference_choice(logits[0], row)]


def as_on_a_device(monkeypatch):
    """The torch passes, for tensors that the host could read itself."""
    for module in (scan, contenders):
        monkeypatch.setattr(module, "on_host", lambda tensor: False)


def likeliest_of(logits, rows, indices):
    """What ``_draw_together`` is given beside the logits of these rows."""
    firsts = [contenders.Rank(float(logits[index].max()), int(logits[index].argmax())) for index in indices]
    return firsts, [rows[index] for index in indices], Domain.COUPLED


class CountPasses(TorchDispatchMode):
    """Counts what torch computes; views cost nothing."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.number += name not in {"select", "unsqueeze", "slice", "detach", "view", "alias", "t", "expand"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", PARAMS, ids=str)
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
def test_the_device_s_passes_choose_the_host_s_tokens(options, scale, monkeypatch):
    """The torch passes, written for other devices and run here on the CPU, give the tokens of the numpy passes."""
    logits = sharp_logits(6, 20_011, seed=6, scale=scale)
    rows = [
        TokenRow(SamplingParams(seed=index, **options), 40, [1, 2, 3, 7], [3, 9, 9]) for index in range(6)
    ]
    on_host = choose(logits, rows)
    log_probs = processed_logprobs(logits, rows)
    as_on_a_device(monkeypatch)
    assert choose(logits, rows) == on_host
    assert [choose(logits[i : i + 1], rows[i : i + 1])[0] for i in range(6)] == on_host
    assert torch.equal(processed_logprobs(logits, rows), log_probs)


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.02}]
)
def test_rows_on_a_device_are_drawn_together(options, monkeypatch):
    """32 rows make no more passes than one: each pass that is waited for costs more than it computes."""
    logits = sharp_logits(32, 20_011, seed=8, scale=1.0)
    rows = [TokenRow(SamplingParams(temperature=0.8, seed=4, **options), index) for index in range(32)]
    as_on_a_device(monkeypatch)
    alone = [
        index
        for index in range(32)
        if draw_together([logits[index]], *likeliest_of(logits, rows, [index])) == {}
    ]
    assert len(alone) <= 3  # where rounding might decide, or too many come near
    passes = []
    for count in (1, 32):
        with CountPasses() as counted:
            choose(logits[:count], rows[:count])
        passes.append(counted.number)
    # Whoever loses to the nucleus is drawn again among those before the loser: a few turns more.
    assert passes[1] <= 4 * passes[0] + 40 * len(alone)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("options", PARAMS, ids=str)
def test_cuda_chooses_the_host_s_tokens(options):
    """Equal logits on CUDA and CPU: equal tokens."""
    logits = sharp_logits(6, 20_011, seed=6)
    rows = [
        TokenRow(SamplingParams(seed=index, **options), 40, [1, 2, 3, 7], [3, 9, 9]) for index in range(6)
    ]
    assert choose(logits.cuda(), rows) == choose(logits, rows)


def test_choose_is_argmax_of_logprobs_plus_gumbel():
    """The public pieces fit together: choose = argmax(processed_logprobs + gumbel)."""
    logits = sharp_logits(40, 2048, seed=3, scale=1.0)
    rows = [
        TokenRow(SamplingParams(seed=11, temperature=0.9, top_p=0.97), position) for position in range(40)
    ]
    log_probs = processed_logprobs(logits, rows)
    noise = torch.stack([gumbel(11, position, Domain.COUPLED, 2048, "cpu") for position in range(40)])
    assert choose(logits, rows) == (log_probs + noise).argmax(-1).tolist()


def test_a_row_does_not_depend_on_the_batch():
    """Each row of a mixed batch gets the token and, bit by bit, the log-probabilities it gets alone."""
    logits = sharp_logits(2 * len(PARAMS), 5003, seed=1)
    rows = [
        TokenRow(SamplingParams(seed=seed, **options), 17, [4, 5, 6], [6, 8])
        for seed, options in product((1, 2), PARAMS)
    ]
    together = choose(logits, rows)
    log_probs = processed_logprobs(logits, rows)
    for index, row in enumerate(rows):
        assert choose(logits[index : index + 1], [row]) == [together[index]]
        alone = processed_logprobs(logits[index : index + 1].clone(), [row])[0]
        assert torch.equal(alone, log_probs[index])
    backwards = choose(logits.flip(0), rows[::-1])
    assert backwards == together[::-1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e38, 1e300])
@pytest.mark.parametrize("options", [{}, {"top_k": 80}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_extreme_temperatures_are_limits_not_accidents(temperature, options):
    """Towards 0 the draw is the argmax, or a fair one among exact ties; towards infinity every token kept is fair."""
    logits = sharp_logits(100, 300, seed=7).expand(100, -1)
    rows = [TokenRow(SamplingParams(seed=s, temperature=temperature, **options), 0) for s in range(100)]
    drawn = choose(logits, rows)
    assert drawn == [reference_choice(logits[i], row) for i, row in enumerate(rows)]
    if temperature < 1:
        assert drawn == logits.argmax(-1).tolist()
        tied = torch.zeros(100, 300).index_fill(1, torch.tensor([4, 250]), 9.0)
        assert set(choose(tied, rows)) == ({4} if "top_p" in options else {4, 250})
    else:
        assert len(set(drawn)) > 50 or options.get("top_k")


def test_same_seed_same_token_and_other_seeds_other_tokens():
    """At T = 1.5 the draw repeats under its seed and differs between seeds and between positions."""
    logits = sharp_logits(1, 1000, seed=2, scale=1.0).expand(200, -1)
    by_seed = [TokenRow(SamplingParams(seed=seed, temperature=1.5), 5) for seed in range(200)]
    by_position = [TokenRow(SamplingParams(seed=9, temperature=1.5), position) for position in range(200)]
    assert choose(logits, by_seed) == choose(logits, by_seed)
    # 200 draws from about 600 effective tokens: fewer than 100 distinct ones would be a broken key.
    assert len(set(choose(logits, by_seed))) > 100
    assert len(set(choose(logits, by_position))) > 100


def test_top_k_of_one_is_greedy_at_any_temperature():
    """top_k = 1 leaves the largest logit only."""
    logits = sharp_logits(50, 300, seed=8)
    rows = [TokenRow(SamplingParams(temperature=1.5, top_k=1, seed=seed), seed) for seed in range(50)]
    assert choose(logits, rows) == logits.argmax(-1).tolist()


def test_ties_go_to_the_lowest_id():
    """Equal largest logits: greedy takes the first, as torch.argmax documents."""
    logits = torch.zeros(2, 1000)
    logits[0, [900, 17, 400]] = 3.0
    greedy = TokenRow(SamplingParams(temperature=0.0), 0)
    assert choose(logits, [greedy, greedy]) == [17, 0]


def test_an_excluded_token_is_never_drawn():
    """Logits of -inf have probability 0, also when almost everything is excluded."""
    logits = torch.full((300, 50), -math.inf)
    logits[:, [7, 31]] = torch.tensor([0.0, -30.0])
    rows = [TokenRow(SamplingParams(temperature=2.0, seed=seed), 0) for seed in range(300)]
    assert set(choose(logits, rows)) <= {7, 31}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_that_names_the_rows(bad, temperature):
    """NaN and +inf raise an EngineError with the rows; so does a row without any possible token."""
    logits = sharp_logits(4, 100, seed=1)
    logits[1, 50] = bad
    logits[3] = -math.inf
    rows = [TokenRow(SamplingParams(temperature=temperature), 0)] * 4
    for function in (choose, processed_logprobs):
        with pytest.raises(BadLogitsError, match=r"rows \[1, 3\]") as caught:
            function(logits, rows)
        assert caught.value.rows == (1, 3)
        assert isinstance(caught.value, EngineError)


needs_compiler = pytest.mark.skipif(native_contenders() is None, reason="no C++ compiler at hand")


def without_compiler(monkeypatch):
    """Draws as on a machine that has none."""
    for module in (one_row, processors):
        monkeypatch.setattr(module, "can_pass", lambda _: False)
    monkeypatch.setattr(one_row, "has_compiled", lambda: False)


CUTS = [
    {},
    {"top_p": 0.95},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.999, "min_p": 0.5},
    {"min_p": 0.02},
    {"top_k": 1},
    {"top_k": 200},
    {"top_p": 0.8, "top_k": 50},
    {"top_p": 0.9, "repetition_penalty": 1.3},
]


@needs_compiler
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("temperature", [1e-40, 1e-9, 0.05, 0.8, 1.3, 50.0, 1e35])
def test_compiled_passes_draw_what_numpy_draws(temperature, cut, monkeypatch):
    """Whatever excludes tokens, with ties and impossible ones; what cannot be told for rounding is left to numpy."""
    vocab = 3000
    generator = torch.Generator().manual_seed(len(cut))
    logits = torch.randn(60, vocab, generator=generator) * torch.linspace(0.1, 6, 60)[:, None]
    logits[:, ::7] = -math.inf
    logits[20:] = logits[20:].round()
    logits[:40, 3] = 88.0 - 40 * (torch.arange(40) % 3)
    params = SamplingParams(temperature=temperature, seed=9, **cut)
    rows = [TokenRow(params, position, (1, 2), (3, 5)) for position in range(60)]
    compiled = choose(logits, rows)
    without_compiler(monkeypatch)
    assert choose(logits, rows) == compiled
    as_on_a_device(monkeypatch)
    assert choose(logits, rows) == compiled
    for row, token in zip(logits, compiled, strict=True):
        assert math.isfinite(row[token])


@needs_compiler
def test_a_nucleus_is_rarely_left_to_numpy(monkeypatch):
    """Only where a token lies within rounding of its edge; the winner is looked for among ever fewer tokens."""
    logits = torch.randn(200, 3000, generator=torch.Generator().manual_seed(1)) * 3
    rows = [TokenRow(SamplingParams(temperature=1.0, top_p=0.7), position) for position in range(200)]
    slow = []
    monkeypatch.setattr(one_row, "kept_ids", lambda *args: slow.append(args) or kept_ids(*args))
    choose(logits, rows)
    assert len(slow) <= 10


@needs_compiler
def test_masses_count_what_ranks_before_a_token():
    """By falling logit, the lower id first among equals."""
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, -math.inf, 1.0] * 30)
    weights = torch.exp((logits.double() - 2.0) / 0.7)
    for token in range(12):
        rank = contenders.Rank(float(logits[token]), token)
        before = (logits > logits[token]) | ((logits == logits[token]) & (torch.arange(180) < token))
        everything, heavier = contenders.masses(logits, 2.0, 0.7, rank)
        assert everything == pytest.approx(float(weights.sum()), rel=1e-5)
        assert heavier == pytest.approx(float(weights[before].sum()), rel=1e-5, abs=1e-30)


@needs_compiler
def test_more_contenders_than_fit_are_left_to_numpy(monkeypatch):
    """Noise and logits such that hundreds of tokens have one bound: the compiled pass says that it cannot tell."""
    logits = torch.zeros(600)
    assert contenders.draw_whole(logits, 0.0, 1.0, 5) is not None
    monkeypatch.setattr(contenders, "SLACK", 1e30)
    assert contenders.draw_whole(logits, 0.0, 1.0, 5) is None
    row = [TokenRow(SamplingParams(temperature=1.0, seed=1), 5)]
    found = choose(logits[None], row)
    without_compiler(monkeypatch)
    assert choose(logits[None], row) == found


@needs_compiler
@pytest.mark.parametrize("vocab", [300, 1000, 5003])
@pytest.mark.parametrize("k", [1, 2, 50, 255, 256, 257, 1024, 1025])
def test_the_compiled_pass_finds_the_largest_logits(vocab, k):
    """All that share the last place among them, and none that is impossible."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(vocab, generator=generator)
    for row in (logits, logits.round(), torch.where(logits > 1, logits, -math.inf), torch.zeros(vocab)):
        found = contenders.leaders(row, k)
        if k > vocab or (row == 0).sum() > 4096:
            assert found is None
            continue
        edge = row.sort(descending=True).values[k - 1]
        assert found.tolist() == ((row >= edge) & (row > -math.inf)).nonzero().squeeze(1).tolist()


@needs_compiler
def test_compiled_draws_that_are_wrong_are_not_used(monkeypatch):
    """A compiler may make wrong code; what it made is asked a few questions before it is used."""
    library = native_contenders()

    class Wrong:
        def __getattr__(self, name):
            return getattr(library, name)

        def drawn_of(self, *args):
            return library.drawn_of(*args) ^ (self.wrong == "draws" and args[5] % 7 == 0)

        def leaders_of(self, *args):
            return library.leaders_of(*args) - (self.wrong == "leaders")

        def masses_of(self, *args):
            library.masses_of(*args)
            if self.wrong == "masses":
                args[-1]._obj.value *= 1.001

        wrong = "draws"

    assert contenders._is_sound(library)
    for wrong in ("draws", "leaders", "masses"):
        Wrong.wrong = wrong
        assert not contenders._is_sound(Wrong())
    native_contenders.cache_clear()
    monkeypatch.setattr(contenders, "_is_sound", lambda _: False)
    assert native_contenders() is None
    native_contenders.cache_clear()


def test_no_rows_no_tokens():
    """An empty batch is fine."""
    assert choose(torch.empty(0, 10), []) == []
    assert follow(torch.empty(0, 10), [], []) == []


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_following_drafts_gives_what_choosing_gives_up_to_the_first_difference(data):
    """Several drafts in one batch, right for a while: the same tokens, and none behind the first that differs."""
    params = SamplingParams(seed=5, **data.draw(st.sampled_from(PARAMS)))
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    count = sum(lengths) + len(lengths)
    logits = torch.randn(count, 30, generator=torch.Generator().manual_seed(count)) * 3
    rows = [TokenRow(params, position) for position in range(count)]
    chosen, drafts, expected = choose(logits, rows), [], []
    for length in lengths:
        own, chosen = chosen[: length + 1], chosen[length + 1 :]
        right = data.draw(st.integers(0, length))
        drafts.append(own[:right] + [(token + 1) % 30 for token in own[right:length]])
        expected.append(own[: right + 1])
    assert follow(logits, rows, drafts) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_following_a_draft_names_broken_rows_that_it_would_not_have_drawn(temperature):
    """A model that fails is told of, whatever was drafted."""
    logits = torch.zeros(3, 10)
    logits[2, 4] = math.nan
    rows = [TokenRow(SamplingParams(temperature=temperature), position) for position in range(3)]
    wrong = (choose(logits[:1], rows[:1])[0] + 1) % 10
    with pytest.raises(BadLogitsError, match=r"rows \[2\]"):
        follow(logits, rows, [[wrong, 0]])


def test_top2_gap():
    """Largest less second largest; 0 for a tie."""
    gaps = top2_gap(torch.tensor([[1.0, 4.0, 2.5], [7.0, 7.0, 1.0]]))
    assert gaps.tolist() == [1.5, 0.0]
