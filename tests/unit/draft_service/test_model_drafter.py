"""The model drafter against the plain decoding of its own model, and against itself without a memory."""

import random

import pytest
import torch

from draft_service.drafters import DraftRequest, build_drafters
from draft_service.drafters.base import Enumeration, skipped
from draft_service.drafters.model import load_model_drafter
from paceline.config import DraftConfig, DrafterConfig, ModelConfig, PacelineConfig
from paceline.engine import Segment, load_runner
from paceline.errors import CapacityError, ConfigError
from paceline.sampling import TokenRow, choose
from paceline.testing.tiny_models import tiny_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import SamplingParams

VOCAB = 512
CONTEXT = 300

PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0, seed=7),
    "cut": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    "penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
    ),
    "penalties sampled": SamplingParams(temperature=0.9, frequency_penalty=1.0, seed=3),
    "bias": SamplingParams(temperature=1.0, logit_bias={40: 3.0, 41: -100.0}, seed=4),
}


def model_config(directory):
    return ModelConfig(name=str(directory), dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny", seed=1)


def load(directory, *, kv_slots=8, max_context=CONTEXT, tokenizer=None, layers=0, prompt_tokens=0):
    return load_model_drafter(
        "self",
        model_config(directory),
        layers=layers,
        kv_slots=kv_slots,
        max_context=max_context,
        tokenizer=tokenizer or Tokenizer.load(directory),
        prompt_tokens=prompt_tokens,
    )


@pytest.fixture
def drafter(directory):
    return load(directory)


@pytest.fixture(scope="module")
def plain(directory):
    """Decodes plainly: one token a step, nothing drafted."""
    runner = load_runner(model_config(directory), kv_slots=1, max_context=1024)

    @torch.inference_mode()
    def decode(prompt, params, num_tokens):
        slot, output, unread = runner.kv.acquire(), [], prompt
        for _ in range(num_tokens):
            logits = runner.forward([Segment(slot, runner.kv.length(slot), unread, 1)])
            row = TokenRow(params, len(prompt) + len(output), prompt, output)
            unread = choose(logits, [row])
            output = output + unread
        runner.kv.release(slot)
        return output

    return decode


def prompt_of(length, seed=0):
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def request(handle, token_ids, prompt_len=None, *, params=PARAMS["greedy"], k=4, vocab_size=VOCAB):
    return DraftRequest(handle, token_ids, prompt_len or len(token_ids), params, k, vocab_size)


def through(drafter, batch):
    """Guesses for each request, however many steps its prompt takes; and the number of steps."""
    done, steps = {}, 0
    while len(done) < len(batch):
        waiting = [r for r in batch if r.handle not in done]
        for r, guesses in zip(waiting, drafter.propose(waiting), strict=True):
            if guesses is not None:
                done[r.handle] = guesses
        steps += 1
        assert steps < 100
    return [done[r.handle] for r in batch], steps


# ---- Only the end of a long prompt ----


def short_sighted(directory, prompt, output, params, num_guesses, *, read=20):
    """What the model says of the last ``read`` tokens of the prompt and what follows, with the noise of the whole."""
    runner = load_runner(model_config(directory), kv_slots=1, max_context=1024)
    slot, guesses = runner.kv.acquire(), []
    unread = [*prompt[-read:], *output]
    for _ in range(num_guesses):
        logits = runner.forward([Segment(slot, runner.kv.length(slot), unread, 1)])
        row = TokenRow(params, len(prompt) + len(output) + len(guesses), prompt, [*output, *guesses])
        unread = choose(logits, [row])
        guesses += unread
    return guesses


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("length", [5, 20, 21, 90, 200])
def test_of_a_long_prompt_only_the_end_is_read(directory, kind, length):
    """At once, later with more output, after wrong guesses, and opened anew: always the guesses of the same tokens."""
    params, prompt, output = PARAMS[kind], prompt_of(length, seed=3), prompt_of(12, seed=4)
    drafter = load(directory, prompt_tokens=20)
    drafter.open(1)
    for known in (1, 2, 7, 12):  # the guesses in between are hardly ever right
        expected = short_sighted(directory, prompt, output[:known], params, 4)
        asked = request(1, [*prompt, *output[:known]], length, params=params)
        assert through(drafter, [asked])[0] == [expected]
    drafter.open(2)
    assert through(drafter, [request(2, [*prompt, *output], length, params=params)])[0] == [expected]
    assert drafter._runner.kv.length(drafter._slots[2].slot) <= 20 + len(output) + 4


def test_a_prompt_cut_short_is_foretold_and_enumerated_like_it_is_drafted(directory):
    """One forward over known text gives what rounds along it gave; level 2 goes on where the block ends."""
    prompt, params = prompt_of(150, seed=5), PARAMS["sampled"]
    drafter = load(directory, prompt_tokens=20)
    drafter.open(1)
    following = short_sighted(directory, prompt, [], params, 9)
    foretold = None
    while foretold is None:
        foretold = drafter.foretell(request(1, prompt, params=params), following)
    assert foretold == following
    block = through(drafter, [request(1, prompt, params=params, k=4)])[0][0]
    assert block == following[:4]
    enumeration = Enumeration(request(1, prompt, params=params, k=3), block, 1)
    for _ in range(6):
        drafter.enumerate([enumeration])
    whole = next(branch for branch in enumeration.branches if branch.assumed == tuple(following[:5]))
    assert whole.guesses == following[5:8]


def test_behind_a_prompt_cut_short_a_hypothesis_that_fails_leaves_no_trace(directory):
    """Level 1 counts what is confirmed in the tokens it has read: nothing assumed stays after another verdict."""
    prompt, params = prompt_of(90, seed=6), PARAMS["sampled"]
    drafter = load(directory, prompt_tokens=20)
    drafter.open(1)
    for assumed in ([11, 12], [11, 12, 13]):
        tokens, count = [*prompt, *assumed], len(assumed)
        ahead = DraftRequest(1, tokens, 90, params, 2, VOCAB, num_hypothetical=count)
        assert through(drafter, [ahead])[0] == [short_sighted(directory, prompt, assumed, params, 2)]
        assert drafter._slots[1].num_confirmed <= 20
    for output in ([], [14]):
        expected = short_sighted(directory, prompt, output, params, 3)
        assert through(drafter, [request(1, [*prompt, *output], 90, params=params, k=3)])[0] == [expected]


def test_the_end_of_the_prompt_is_part_of_the_version(directory):
    """Other guesses, other statistics; and what is never read is nothing to catch up on."""
    whole, cut = load(directory), load(directory, prompt_tokens=20)
    assert cut.version == f"{whole.version}-20p"
    assert [skipped(whole, 90), skipped(cut, 90), skipped(cut, 20)] == [0, 70, 0]


@pytest.mark.parametrize("kind", PARAMS)
def test_self_draft_is_the_targets_own_output(drafter, plain, kind):
    """A model that drafts for itself guesses every token, whatever the sampling: same noise, same positions, and
    penalties that see the guesses before.
    """
    params = PARAMS[kind]
    prompts = [prompt_of(length, seed=length) for length in (1, 5, 30)]
    for handle in range(len(prompts)):
        drafter.open(handle)
    outputs = [plain(prompt, params, 28) for prompt in prompts]
    for start in (0, 8, 9, 17, 20):  # all accepted with the bonus, only the bonus, part of the block ...
        batch = [
            request(handle, prompt + output[:start], len(prompt), params=params, k=8)
            for handle, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
        for output, guesses in zip(outputs, drafter.propose(batch), strict=True):
            expected = output[start : start + 8]
            if 2 in expected:
                expected = expected[: expected.index(2) + 1]
            assert guesses == expected


def test_one_for_each_k(drafter, plain):
    """Sequences of one batch may ask for different numbers of guesses."""
    prompt = prompt_of(6)
    output = plain(prompt, PARAMS["greedy"], 8)
    for handle in range(1, 9):
        drafter.open(handle)
    batch = [request(handle, prompt, k=handle) for handle in range(1, 9)]
    assert drafter.propose(batch) == [output[:k] for k in range(1, 9)]


@pytest.mark.parametrize("kind", ["greedy", "penalties sampled"])
def test_kv_after_partial_acceptance_equals_a_fresh_one(drafter, directory, kind):
    """Whatever part of the guesses the verifier takes and whatever it puts instead: the next guesses are those of a
    drafter that reads the sequence for the first time.
    """
    rng, fresh, params = random.Random(5), load(directory), PARAMS[kind]
    sequences = {handle: prompt_of(4 + handle, seed=handle) for handle in range(3)}
    prompt_lens = {handle: len(token_ids) for handle, token_ids in sequences.items()}
    for handle in sequences:
        drafter.open(handle)
    for step in range(25):
        asked = [h for h in sequences if rng.random() < 0.7] or [0]
        batch = [request(h, sequences[h], prompt_lens[h], params=params, k=rng.randint(1, 6)) for h in asked]
        drafts = drafter.propose(batch)
        for one, guesses in zip(batch, drafts, strict=True):
            key = 1000 * step + one.handle
            fresh.open(key)
            again = request(key, one.token_ids, one.prompt_len, params=params, k=one.k)
            assert through(fresh, [again])[0] == [guesses]
            fresh.close(key)
            taken = guesses[: rng.randint(0, len(guesses))]
            sequences[one.handle] = [*one.token_ids, *taken, rng.randrange(3, VOCAB)]


def test_asked_twice_without_news(drafter):
    """The same question has the same answer."""
    drafter.open(1)
    first = drafter.propose([request(1, prompt_of(9))])
    assert drafter.propose([request(1, prompt_of(9))]) == first


def test_a_long_prompt_is_read_beside_others_in_chunks(drafter, plain):
    """Who is ready drafts in each step; the long prompt gets there over several, with the right guesses."""
    long, short = prompt_of(280, seed=1), prompt_of(5, seed=2)
    drafter.open(1)
    drafter.open(2)
    first = drafter.propose([request(1, long, k=3), request(2, short, k=3)])
    assert first == [None, plain(short, PARAMS["greedy"], 3)]
    (guesses,), steps = through(drafter, [request(1, long, k=3)])
    assert guesses == plain(long, PARAMS["greedy"], 3)
    assert steps > 1, "the other one could ask again meanwhile"
    drafter.close(2)
    drafter.close(1)
    drafter.open(3)
    assert through(drafter, [request(3, long, k=3)]) == ([guesses], 2), "alone, chunks are large"


def test_many_prompts_at_once(drafter, plain):
    """All are read, oldest first, and each gets its own guesses."""
    prompts = [prompt_of(70 + 30 * i, seed=i) for i in range(6)]
    for handle in range(6):
        drafter.open(handle)
    guesses, _ = through(drafter, [request(handle, prompt, k=2) for handle, prompt in enumerate(prompts)])
    assert guesses == [plain(prompt, PARAMS["greedy"], 2) for prompt in prompts]


def test_slots_are_taken_and_given_back(directory):
    """One slot a sequence; beyond them CapacityError; a close makes room, and closing twice is harmless."""
    drafter = load(directory, kv_slots=2)
    drafter.open(1)
    drafter.open(2)
    with pytest.raises(CapacityError, match="all 2 KV slots of drafter 'self' are taken"):
        drafter.open(3)
    drafter.close(1)
    drafter.close(1)
    drafter.open(3)
    drafter.close(2)
    drafter.close(3)
    assert drafter.num_free_slots == 2


def test_a_slot_used_again_remembers_nothing(drafter, directory, plain):
    """What a closed sequence left in the KV is never attended to."""
    for handle in range(8):
        drafter.open(handle)
    through(drafter, [request(handle, prompt_of(100, seed=handle)) for handle in range(8)])
    for handle in range(8):
        drafter.close(handle)
    drafter.open(9)
    assert drafter.propose([request(9, prompt_of(3))]) == [plain(prompt_of(3), PARAMS["greedy"], 4)]


@pytest.mark.parametrize("beyond", [-1, 0])
def test_up_to_its_own_limit(directory, plain, beyond):
    """The last token may lie at the limit, and the last guess, which is never read, just behind it."""
    drafter = load(directory, max_context=40)
    assert drafter.max_context == 40
    drafter.open(1)
    prompt = prompt_of(40 + beyond)
    k = drafter.max_context - len(prompt) + 1
    assert drafter.propose([request(1, prompt, k=k)]) == [plain(prompt, PARAMS["greedy"], k)]


def test_a_target_with_a_smaller_head(tmp_path):
    """Both heads are padded, the drafter's more: it never guesses an id that the target has not got."""
    padded = tiny_model_dir(tmp_path / "padded", seed=3, model_vocab=700)
    drafter = load(padded)
    drafter.open(1)
    seen = set()
    for seed in range(30):
        params = SamplingParams(temperature=3.0, seed=seed)
        drafter.close(1)
        drafter.open(1)
        seen |= set(*drafter.propose([request(1, prompt_of(4), params=params, k=8, vocab_size=520)]))
    assert max(seen) < 520
    assert max(seen) > 500, "hot enough to have gone there"


def test_a_target_with_a_larger_head(directory):
    """A token that the drafter has no row for: no guess, no failure; a bias on such a token is ignored."""
    drafter = load(directory)
    drafter.open(1)
    drafter.open(2)
    biased = SamplingParams(temperature=0.0, logit_bias={600: 50.0})
    answers = drafter.propose(
        [request(1, [5, 600, 6], vocab_size=640), request(2, [5, 6], params=biased, vocab_size=640, k=2)]
    )
    assert answers[0] == []
    assert len(answers[1]) == 2


def test_guessing_ends_at_the_end_of_the_sequence(tmp_path, plain):
    """Nothing is guessed behind an end token."""
    prompt = prompt_of(7)
    output = plain(prompt, PARAMS["greedy"], 8)
    end = next(i for i in range(2, 8) if output.index(output[i]) == i)
    ending = tiny_model_dir(tmp_path / "ending", seed=1, eos_token_ids=(output[end],))
    drafter = load(ending)
    drafter.open(1)
    assert drafter.propose([request(1, prompt, k=8)]) == [output[: end + 1]]


def test_a_failed_forward_leaves_nothing_behind(drafter, plain, monkeypatch):
    """After an exception in mid-draft the sequence is read again, and the guesses are right."""
    forward, calls = drafter._runner.forward, []

    def failing(segments):
        calls.append(segments)
        if len(calls) == 3:
            forward(segments)
            raise RuntimeError("out of memory")
        return forward(segments)

    drafter.open(1)
    monkeypatch.setattr(drafter._runner, "forward", failing)
    with pytest.raises(RuntimeError):
        drafter.propose([request(1, prompt_of(9), k=5)])
    assert drafter.propose([request(1, prompt_of(9), k=5)]) == [plain(prompt_of(9), PARAMS["greedy"], 5)]


def test_only_the_first_layers(directory):
    """``layers`` makes another drafter, with another version."""
    whole, cut = load(directory), load(directory, layers=1)
    assert whole.version != cut.version
    cut.open(1)
    assert len(cut.propose([request(1, prompt_of(5))])[0]) == 4


def test_another_tokenizer_of_the_same_size_is_refused(directory, tmp_path):
    """Identity of tokenizers counts, not size of vocabularies; said in words, before weights are read."""
    other = tiny_model_dir(tmp_path / "other", tokenizer_vocab=400, model_vocab=VOCAB)
    with pytest.raises(ConfigError, match="target's own tokenizer"):
        load(other, tokenizer=Tokenizer.load(directory))


def test_built_from_settings(directory):
    """One entry a drafter; wrong entries are named."""
    tokenizer = Tokenizer.load(directory)
    entries = {
        "ngram": DrafterConfig(kind="ngram"),
        "bad": DrafterConfig(kind="random"),
        "small": DrafterConfig(kind="model", model=model_config(directory)),
        "first layer": DrafterConfig(kind="model", layers=1),
    }
    target = model_config(directory)
    draft = DraftConfig(kv_slots=3, max_context=50, drafters=entries)
    drafters = build_drafters(PacelineConfig(model=target, draft=draft), tokenizer)
    assert {name: (d.name, d.slow, d.max_context) for name, d in drafters.items()} == {
        "ngram": ("ngram", False, 0),
        "bad": ("bad", False, 0),
        "small": ("small", True, 50),
        "first layer": ("first layer", True, 50),
    }
    assert drafters["small"].version != drafters["first layer"].version
    wrong = DraftConfig(drafters={"x": DrafterConfig(kind="ngram", min_match=5, max_match=4)})
    with pytest.raises(ConfigError, match=r"draft\.drafters\.x: min_match 5 is above max_match 4"):
        build_drafters(PacelineConfig(draft=wrong), tokenizer)
    with pytest.raises(ConfigError, match="name at least one drafter"):
        build_drafters(PacelineConfig(draft=DraftConfig(drafters={})), tokenizer)


# --- ahead of the verdict -----------------------------------------------------------------------------------------


def enumerated(drafter, token_ids, params, block, *, fan, k, handle=1):
    request = DraftRequest(handle, token_ids, 3, params, k, VOCAB)
    one = Enumeration(request, block, fan)
    while not one.complete:
        drafter.enumerate([one])
    return one.branches


@pytest.mark.parametrize("name", ["greedy", "sampled", "penalties sampled"])
def test_every_outcome_gets_the_guesses_that_the_verdict_would_get(directory, name):
    """Drafted ahead in slots of their own, or asked for after the verdict: the same block; and no slot stays lent."""
    drafter, fresh = load(directory), load(directory)
    params, prompt = PARAMS[name], [5, 6, 7, 8, 9]
    drafter.open(1)
    block = drafter.propose([DraftRequest(1, prompt, 3, params, 2, VOCAB)])[0]
    branches = enumerated(drafter, prompt, params, block, fan=2, k=2)
    assert len(branches) == 6
    assert len({branch.assumed for branch in branches}) == 6
    for handle, branch in enumerate(branches, start=10):
        fresh.open(handle)
        tokens = prompt + list(branch.assumed)
        expected = fresh.propose([DraftRequest(handle, tokens, 3, params, 2, VOCAB)])[0]
        fresh.close(handle)
        assert branch.guesses == expected or branch.ended
    assert drafter.num_free_slots == 1
    drafter.abandon(1)
    assert drafter.num_free_slots == 7


def test_the_bonus_outcome_and_the_likeliest_correction_are_those_of_the_noise(directory, plain):
    """The drafter is the target here: its first outcome behind the whole block is what plain decoding says."""
    drafter, prompt = load(directory), [5, 6, 7, 8, 9]
    expected = plain(prompt, PARAMS["sampled"], 4)
    drafter.open(1)
    block = drafter.propose([DraftRequest(1, prompt, 5, PARAMS["sampled"], 3, VOCAB)])[0]
    assert block == expected[:3]
    branches = enumerated(drafter, prompt, PARAMS["sampled"], block, fan=1, k=1)
    assert branches[-1].assumed == tuple(expected)


def test_a_hypothesis_that_fails_leaves_no_trace(drafter, plain):
    """Level 1: the drafter went on along its own guess; after another verdict it guesses as if it never had."""
    prompt, params = [5, 6, 7, 8, 9], PARAMS["sampled"]
    drafter.open(1)
    drafter.propose([DraftRequest(1, [*prompt, 11, 12], 5, params, 2, VOCAB, num_hypothetical=2)])
    drafter.propose([DraftRequest(1, [*prompt, 11, 12, 13], 5, params, 2, VOCAB, num_hypothetical=3)])
    assert drafter.propose([DraftRequest(1, prompt, 5, params, 3, VOCAB)])[0] == plain(prompt, params, 3)


def test_lent_slots_go_back_to_a_new_sequence(directory):
    """Outcomes are drafted ahead in what is free, and give way."""
    drafter = load(directory, kv_slots=3)
    drafter.open(1)
    block = drafter.propose([DraftRequest(1, [5, 6, 7], 3, PARAMS["greedy"], 2, VOCAB)])[0]
    branches = enumerated(drafter, [5, 6, 7], PARAMS["greedy"], block, fan=2, k=2)
    assert sum(bool(branch.guesses) for branch in branches) == 2
    assert drafter.num_free_slots == 0
    drafter.open(2)
    assert drafter.num_free_slots == 1
    drafter.close(1)
    drafter.close(2)
    assert drafter.num_free_slots == 3
