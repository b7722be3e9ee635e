"""The keyed noise: golden bits, independence of shape and order, statistics, tails."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.sampling import Domain, gumbel
from paceline.sampling.noise import (
    exponential,
    hash_counters,
    noise_bits,
    row_key,
    row_keys,
    token_bits,
    token_counters,
)

CPU = torch.device("cpu")
MASK63 = (1 << 63) - 1

# Changing these changes every sampled output under every seed: a new major version, never an accident.
GOLDEN_BITS = {
    (0, 0): (
        0x51C0270687984B37,
        0x40D6B91D40FDEC19,
        0x5AE136E9149CA6CE,
        0x7739D1235E01643F,
        0x1121482ABFF9ED50,
    ),
    (1, 0): (
        0x4965D6348C188782,
        0xE83D17509CEFABC,
        0x42AC8602A0FB5DB7,
        0x7EBABD9E2C68AE89,
        0x1E488413D640FAFC,
    ),
    (2**64 - 1, 1023): (
        0x11129F4FE4EDC228,
        0x653DE62B290186FC,
        0x5060EC127BE1F794,
        0x288907EAE111F70F,
        0x1D15D285E91B80CC,
    ),
    (42, 7): (
        0x413FF7014E1B1F95,
        0x62B084DAF1A0DA13,
        0x16D7421CAB50CAF2,
        0x42BFA45640495E77,
        0x2397AD167FA1A960,
    ),
}
GOLDEN_TOKENS = [0, 1, 2, 49151, 151935]
GOLDEN_KEYS = {
    (0, 0, 1): 0x44E5B98100C67FB0,
    (42, 7, 1): 0x1B1863149F1726FA,
    (42, 7, 2): 0xEF5E260BC49C3C6F,
}


def bits_of(seed: int, position: int, vocab_size: int, domain: int = Domain.COUPLED) -> torch.Tensor:
    return noise_bits(row_keys([row_key(seed, position, domain)], CPU), vocab_size)[0]


def test_the_generator_is_splitmix64():
    """Under the key 1234567 the bits are the published SplitMix64 outputs of that seed, without their top bit."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert noise_bits(row_keys([1234567], CPU), 5)[0].tolist() == [value & MASK63 for value in published]


def test_golden_vectors():
    """Keys and bits of fixed (seed, position, token) never change."""
    for (seed, position), expected in GOLDEN_BITS.items():
        assert tuple(bits_of(seed, position, 151936)[GOLDEN_TOKENS].tolist()) == expected
    for words, key in GOLDEN_KEYS.items():
        assert row_key(*words) == key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_bits_are_the_same_on_cuda():
    """Integer arithmetic: CPU and CUDA give the same bits."""
    keys = [row_key(seed, 11, Domain.COUPLED) for seed in range(50)]
    on_gpu = noise_bits(row_keys(keys, torch.device("cuda")), 49152)
    assert torch.equal(on_gpu.cpu(), noise_bits(row_keys(keys, CPU), 49152))


def test_tensors_arrays_and_plain_integers_agree():
    """The noise in torch, in numpy and in plain Python is the same arithmetic modulo 2**64, for any key."""
    for key in (0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0xDEADBEEF12345678):
        plain = [token_bits(key, token) for token in range(1000)]
        assert noise_bits(row_keys([key], CPU), 1000)[0].tolist() == plain
        for tokens in (1000, np.arange(1000)):
            hashed, scratch = np.empty((2, 1000), dtype=np.uint64)
            hash_counters(key, token_counters(tokens), out=hashed, scratch=scratch)
            assert hashed.tolist() == plain


def test_a_token_s_noise_depends_on_nothing_else():
    """Rows together or alone, all tokens or some in any order, a larger vocabulary: the same bits."""
    keys = [row_key(seed, 3, Domain.COUPLED) for seed in range(9)]
    together = noise_bits(row_keys(keys, CPU), 5003)
    for index, key in enumerate(keys):
        assert torch.equal(together[index], noise_bits(row_keys([key], CPU), 5003)[0])
    some = torch.tensor([4999, 3, 3, 17, 0])
    assert torch.equal(noise_bits(row_keys(keys, CPU), some), together[:, some])
    assert torch.equal(noise_bits(row_keys(keys, CPU), 10_000)[:, :5003], together)


def test_seed_domain_and_position_are_three_different_words():
    """Swapping or shifting the words of the key gives other noise."""
    keys = {
        row_key(*words)
        for words in [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 3, 2), (0, 0, 0), (1, 0, 0), (0, 1, 0)]
    }
    assert len(keys) == 7
    assert len({row_key(seed, position, 1) for seed in range(100) for position in range(100)}) == 10_000


def test_every_bit_is_fair_and_flips_with_half_of_all_key_changes():
    """Bit balance and avalanche: each of the 63 bits is 1, and differs for a neighbour key, half of the time.

    63 bits x 5 samples of 20,000: |z| < 5 for all; false-alarm odds 2e-4.
    """
    num = 20_000
    base = bits_of(5, 9, num)
    others = [bits_of(6, 9, num), bits_of(5, 10, num), bits_of(5 ^ (1 << 63), 9, num), bits_of(5, 9, num, 2)]
    for sample in [base, *(base ^ other for other in others)]:
        ones = torch.stack([(sample >> bit) & 1 for bit in range(63)]).sum(-1).double()
        z = (ones - num / 2) / math.sqrt(num / 4)
        assert z.abs().max() < 5.0


def test_the_uniforms_are_uniform_along_tokens_positions_and_seeds():
    """Chi-square over 256 cells of the top bits, for the three directions a stream can run in.

    3 x 200,000 draws; p > 1e-5 each; false-alarm odds 3e-5.
    """
    num = 200_000
    along_tokens = bits_of(1, 1, num)
    along_positions = noise_bits(row_keys([row_key(1, t, 1) for t in range(num)], CPU), torch.tensor([7]))[
        :, 0
    ]
    along_seeds = noise_bits(row_keys([row_key(s, 1, 1) for s in range(num)], CPU), torch.tensor([7]))[:, 0]
    for bits in (along_tokens, along_positions, along_seeds):
        cells = torch.bincount(bits >> 55, minlength=256).numpy()
        assert stats.chisquare(cells).pvalue > 1e-5


def test_neighbours_are_uncorrelated():
    """Neighbouring tokens, positions and seeds: rank correlation of 49,152 pairs below 5 sigma; odds 2e-6."""
    num = 49_152
    here = bits_of(3, 5, num + 1).double() / 2.0**63 - 0.5
    position = bits_of(3, 6, num).double() / 2.0**63 - 0.5
    seed = bits_of(4, 5, num).double() / 2.0**63 - 0.5
    for other in (here[1:], position, seed):
        correlation = float((here[:num] * other).mean()) * 12
        assert abs(correlation) < 5 / math.sqrt(num)


def test_gumbel_follows_its_distribution():
    """Mean, variance and the whole shape (Kolmogorov-Smirnov) of 500,000 variates; p > 1e-5."""
    noise = gumbel(12, 34, Domain.COUPLED, 500_000, "cpu")
    assert noise.dtype == torch.float64
    assert abs(float(noise.mean()) - 0.5772156649) < 5 * math.pi / math.sqrt(6 * 500_000)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-5


def test_the_largest_of_a_large_vocabulary_is_distributed_right():
    """Maximum over 151,936 tokens at 100 positions is Gumbel shifted by log V: the tail is fine enough; p > 1e-5."""
    vocab_size = 151_936
    keys = row_keys([row_key(77, position, Domain.COUPLED) for position in range(100)], CPU)
    smallest = torch.cat([noise_bits(key[None], vocab_size).amin(-1) for key in keys])
    maxima = [-math.log(exponential(bits)) - math.log(vocab_size) for bits in smallest.tolist()]
    assert stats.kstest(maxima, "gumbel_r").pvalue > 1e-5


def test_both_tails_are_finite_and_exact():
    """The extreme bits give finite noise, and neighbouring bits in either tail give different noise, in order."""
    assert exponential(0) == pytest.approx(2.0**-64, rel=1e-15)
    assert exponential(MASK63) == pytest.approx(64 * math.log(2), rel=1e-15)
    low = [exponential(bits) for bits in range(1000)]
    high = [exponential(MASK63 - bits) for bits in range(1000)]
    assert low == sorted(set(low))
    assert high == sorted(set(high), reverse=True)
    assert exponential((1 << 62) - 1) == pytest.approx(exponential(1 << 62), rel=1e-15)


def test_gumbel_equals_the_scalar_noise():
    """The tensor and the scalar logarithm agree to the last digits."""
    bits = bits_of(8, 8, 4096).tolist()
    noise = gumbel(8, 8, Domain.COUPLED, 4096, "cpu").tolist()
    assert noise == pytest.approx([-math.log(exponential(value)) for value in bits], rel=1e-13, abs=1e-14)
