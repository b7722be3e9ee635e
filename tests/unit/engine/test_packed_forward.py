import threading

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.compiled import NotCompiledError
from paceline.config import ModelConfig
from paceline.engine import Segment, load_runner
from paceline.engine.kernels.build import load_library
from paceline.errors import EngineError
from paceline.testing.tiny_models import FAMILIES, tiny_model_dir

CONTEXT = 200


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


LEAN = ("llama", "qwen2", "qwen3", "mistral")
KINDS = [
    *(pytest.param((family, 40, "reference"), id=f"{family}-reference") for family in FAMILIES),
    *(pytest.param((family, 0, "lean"), id=f"{family}-lean") for family in LEAN),
    *(pytest.param((family, 0, "torch"), id=f"{family}-lean-torch") for family in LEAN),
]


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory):
    """A runner and the same model as transformers loads it, without our attention."""
    name, window, kind = request.param
    path = tiny_model_dir(tmp_path_factory.mktemp(name), family=name, sliding_window=window, model_vocab=520)
    settings = ModelConfig(name=str(path), runner="reference" if kind == "reference" else "lean")
    with pytest.MonkeyPatch.context() as patch:
        if kind == "torch":
            patch.setenv("PACELINE_NO_COMPILER", "1")
        elif kind == "lean" and not native_kernels():
            pytest.skip("no native kernels on this machine")
        runner = load_runner(settings, kv_slots=6, max_context=CONTEXT)
    assert ("native" in runner.info.runner_reason) == (kind == "lean")
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    return runner, plain


@pytest.fixture
def runner(family):
    runner = family[0]
    yield runner
    assert runner.kv.is_idle(), "a test must give its slots back"


def native_kernels():
    try:
        return load_library()
    except NotCompiledError:
        return None


def ids(count, seed=0):
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole(runner, tokens):
    """Logits of every position, in one forward of its own."""
    slot = runner.kv.acquire()
    logits = runner.forward([Segment(slot, 0, tokens, len(tokens))])
    runner.kv.release(slot)
    return logits


def reference(plain, tokens):
    with torch.no_grad():
        return plain(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 63, 64, 65, 150])
def test_packed_equals_the_ordinary_forward(runner, family, length):
    """For every architecture, sliding window included: the logits of transformers within rounding."""
    tokens = ids(length)
    logits = whole(runner, tokens)
    assert logits.shape == (length, 520)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference(family[1], tokens), atol=1e-4, rtol=0)


def test_a_batch_of_unlike_sequences_equals_each_alone(runner, family):
    """A decode row, a verify block, a prefill chunk and its neighbours do not see one another."""
    kv = runner.kv
    tokens = [ids(90, 1), ids(33, 2), ids(120, 3), ids(1, 4)]
    slots = [kv.acquire() for _ in tokens]
    runner.forward([Segment(slots[0], 0, tokens[0][:89], 0), Segment(slots[1], 0, tokens[1][:28], 0)])
    logits = runner.forward(
        [
            Segment(slots[0], 89, tokens[0][89:], 1),
            Segment(slots[2], 0, tokens[2], 0),
            Segment(slots[1], 28, tokens[1][28:], 5),
            Segment(slots[3], 0, tokens[3], 1),
        ]
    )
    assert [kv.length(slot) for slot in slots] == [90, 33, 120, 1]
    for slot in slots:
        kv.release(slot)
    expected = [reference(family[1], t) for t in tokens]
    torch.testing.assert_close(
        logits, torch.cat([expected[0][-1:], expected[1][-5:], expected[3]]), atol=1e-4, rtol=0
    )


def test_the_bits_of_a_row_do_not_depend_on_the_batch(runner):
    """Where the runner says deterministic: whole, chunked, alone and beside others give the same bits."""
    assert runner.info.numerics == "deterministic"
    kv = runner.kv
    tokens = ids(150, 5)
    expected = whole(runner, tokens)
    slot, other = kv.acquire(), kv.acquire()
    parts, at = [], 0
    for count in (1, 1, 5, 2, 64, 9, 1, 33, 4, 1, 1, 28):
        beside = [Segment(other, kv.length(other), ids(3, at), 2)] if at % 2 else []
        logits = runner.forward([*beside, Segment(slot, at, tokens[at : at + count], count)])
        parts.append(logits[2 * len(beside) :])
        at += count
    kv.release(slot)
    kv.release(other)
    assert at == 150
    assert torch.equal(torch.cat(parts), expected)


def test_rollback_and_redo_equals_never_having_guessed(runner):
    """Rejected tokens leave no trace: the same bits as in a sequence that never saw them."""
    kv = runner.kv
    tokens = ids(100, 6)
    expected = whole(runner, tokens)
    slot = kv.acquire()
    runner.forward([Segment(slot, 0, tokens[:50], 0)])
    for at in range(50, 100):
        bad = ids(9, 1000 + at)
        runner.forward([Segment(slot, at, [tokens[at], *bad], 10)])
        kv.truncate(slot, at)
        logits = runner.forward([Segment(slot, at, [tokens[at]], 1)])
        assert torch.equal(logits[0], expected[at])
    kv.release(slot)


def test_what_an_earlier_sequence_left_is_never_attended_to(runner):
    """Even with every free row poisoned, a new sequence in that slot computes what it should."""
    kv = runner.kv
    tokens = ids(70, 7)
    expected = whole(runner, tokens)
    for poison in (float("nan"), float("inf"), 1e30):
        kv.keys.fill_(poison)
        kv.values.fill_(poison)
        slot = kv.acquire()
        parts = [
            runner.forward([Segment(slot, at, tokens[at : at + count], count)])
            for at, count in ((0, 5), (5, 58), (63, 1), (64, 6))
        ]
        kv.release(slot)
        assert torch.equal(torch.cat(parts), expected)


def test_only_the_rows_asked_for_come_back(runner):
    """No logits for a chunk that is not the last, the last rows otherwise, in segment order."""
    kv = runner.kv
    a, b = kv.acquire(), kv.acquire()
    tokens = ids(20, 8)
    expected = whole(runner, tokens)
    assert runner.forward([Segment(a, 0, tokens[:10], 0)]).shape == (0, 520)
    assert kv.length(a) == 10
    logits = runner.forward([Segment(b, 0, tokens, 3), Segment(a, 10, tokens[10:], 1)])
    assert torch.equal(logits, torch.cat([expected[-3:], expected[-1:]]))
    kv.release(a)
    kv.release(b)


def test_logits_are_ordinary_tensors(runner):
    """Callers may write into them: they share no memory with anything and are no inference tensors."""
    logits = whole(runner, ids(3))
    logits[0] -= 1.0
    assert not logits.is_inference()


def test_the_last_position_of_a_slot_can_be_used(runner):
    """A sequence may fill its slot to the last token, and not one more."""
    kv = runner.kv
    tokens = ids(CONTEXT, 9)
    expected = whole(runner, tokens)
    slot = kv.acquire()
    runner.forward([Segment(slot, 0, tokens[:-1], 0)])
    assert torch.equal(runner.forward([Segment(slot, CONTEXT - 1, tokens[-1:], 1)]), expected[-1:])
    with pytest.raises(EngineError, match="do not fit"):
        runner.forward([Segment(slot, CONTEXT, [5], 1)])
    kv.release(slot)


def test_far_beyond_a_sliding_window(tmp_path):
    """Whole blocks of keys behind the window are skipped without turning into NaN, and rollback works there too."""
    path = tiny_model_dir(tmp_path, family="mistral", sliding_window=40)
    runner = load_runner(ModelConfig(name=str(path)), kv_slots=2, max_context=800)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    tokens = ids(800, 11)
    expected = whole(runner, tokens)
    torch.testing.assert_close(expected, reference(plain, tokens), atol=1e-4, rtol=0)
    slot = runner.kv.acquire()
    runner.forward([Segment(slot, 0, tokens[:700], 0)])
    runner.forward([Segment(slot, 700, ids(60, 12), 0)])
    runner.kv.truncate(slot, 700)
    assert torch.equal(runner.forward([Segment(slot, 700, tokens[700:], 100)]), expected[700:])
    runner.kv.release(slot)


@pytest.mark.parametrize(
    "segments",
    [
        lambda a, b: [],
        lambda a, b: [Segment(a, 0, [], 0)],
        lambda a, b: [Segment(a, 1, [5], 1)],
        lambda a, b: [Segment(a, 0, [5], 2)],
        lambda a, b: [Segment(a, 0, [5], -1)],
        lambda a, b: [Segment(a, 0, [5], 1), Segment(a, 0, [6], 1)],
        lambda a, b: [Segment(b, 0, [5], 1), Segment(5, 0, [5], 1)],
        lambda a, b: [Segment(a, 0, [5] * (CONTEXT + 1), 1)],
    ],
)
def test_segments_that_do_not_continue_their_slots_are_refused(runner, segments):
    """An engine fault is told before anything is written."""
    kv = runner.kv
    a, b = kv.acquire(), kv.acquire()
    with pytest.raises(EngineError):
        runner.forward(segments(a, b))
    assert (kv.length(a), kv.length(b)) == (0, 0)
    kv.release(a)
    kv.release(b)


@pytest.mark.parametrize("token", [-1, -513, 520, 2**31])
def test_a_token_that_does_not_exist_is_refused(runner, token):
    """Not counted from the end of the vocabulary: the forward fails, the slot is as it was and serves on."""
    slot = runner.kv.acquire()
    expected = runner.forward([Segment(slot, 0, ids(5), 1)])
    with pytest.raises((EngineError, IndexError)):
        runner.forward([Segment(slot, 5, [7, token, 9], 1)])
    assert runner.kv.length(slot) == 5
    runner.kv.truncate(slot, 4)
    assert torch.equal(runner.forward([Segment(slot, 4, ids(5)[4:], 1)]), expected)
    runner.kv.release(slot)


def test_another_thread_computes_the_same(runner):
    """The engine thread is not the thread that loaded the model."""
    tokens = ids(40, 10)
    expected = whole(runner, tokens)
    found = []
    thread = threading.Thread(target=lambda: found.append(whole(runner, tokens)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_lives_equal_fresh_forwards(runner, data):
    """Any sequence of steps, rollbacks, releases and batches: each row's logits are those of a fresh sequence."""
    kv = runner.kv
    alive = {}
    try:
        for step in range(data.draw(st.integers(2, 4))):
            while len(alive) < 3:
                alive[kv.acquire()] = []
            segments = []
            for slot in data.draw(st.lists(st.sampled_from(sorted(alive)), min_size=1, unique=True)):
                keep = data.draw(st.integers(max(0, len(alive[slot]) - 10), len(alive[slot])))
                fresh = ids(data.draw(st.sampled_from([1, 2, 5, 17, 40])), seed=100 * step + slot)
                kv.truncate(slot, keep)
                alive[slot] = alive[slot][:keep] + fresh
                segments.append(Segment(slot, keep, fresh, data.draw(st.integers(0, len(fresh)))))
            logits = runner.forward(segments)
            for segment in segments:
                mine, logits = logits[: segment.num_logits], logits[segment.num_logits :]
                if segment.num_logits:
                    assert torch.equal(mine, whole(runner, alive[segment.slot])[-segment.num_logits :])
            assert len(logits) == 0
            if data.draw(st.booleans()):
                slot = data.draw(st.sampled_from(sorted(alive)))
                del alive[slot]
                kv.release(slot)
    finally:
        for slot in alive:
            kv.release(slot)
