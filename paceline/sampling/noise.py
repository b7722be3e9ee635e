"""Keyed noise: the Gumbel variate of (seed, domain, position, token), without any generator state.

The bits are SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the row's key, hashed from seed, domain and position, is
the generator's state, and the token is its counter. All of it is wrap-around integer arithmetic, the same bits on
every device. It stands here three times: for a single token in plain integers, for a row on the host in numpy (one
thread, no masks needed), for rows on any device in torch.

    key = mix(mix(mix(seed) ^ domain) ^ position)      three words, hashed one after the other (``row_key``)
    bits[v] = mix(key + (v + 1) * GOLDEN) mod 2**63    63 bits (``noise_bits``)
    U = (bits + 1/2) / 2**63                           never 0, never 1
    E = -log(1 - U),  g = -log(E)                      exponential, Gumbel (``exponential``)

Large g, the tail that decides between many unlikely tokens, is small U: there E = -log1p(-U) keeps every bit. For
U > 1/2 the logarithm is taken of the complement, an exact integer too, so that the other tail is as good.
"""

import math
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK64 = (1 << 64) - 1
_MASK63 = (1 << 63) - 1
_SCALE = 2.0**-63


class Domain(IntEnum):
    """What a draw is for. Different domains share no noise under one seed."""

    COUPLED = 1  # the coupled law: target and drafter alike
    # The sampled laws. Draft and acceptance are keyed by the round too (``round_key``), see ``block``.
    DRAFT = 2  # the drafter's own draw
    ACCEPT = 3  # whether a draft token stays
    REPLACE = 4  # the token in place of one that does not
    BONUS = 5  # the token behind a block that stayed, or without a block


def mix64(word: int) -> int:
    """SplitMix64's finaliser on one unsigned 64-bit integer: a bijection, every output bit hangs on every input bit."""
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK64
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK64
    return word ^ (word >> 31)


def row_key(seed: int, position: int, domain: int) -> int:
    """The unsigned 64-bit key of one row of noise."""
    key = 0
    for word in (seed, domain, position):
        key = mix64(((key ^ word) + _GOLDEN) & _MASK64)
    return key


def round_key(seed: int, base_len: int, position: int, domain: int) -> int:
    """The key of one row of noise that belongs to the round which builds on ``base_len`` tokens, and to no other."""
    return row_key(row_key(seed, base_len, domain), position, domain)


def noise_bits(keys: torch.Tensor, token_ids: torch.Tensor | int) -> torch.Tensor:
    """63 hashed bits for each token under each key: int64, each in [0, 2**63).

    ``keys`` [R] int64 (``row_keys``). ``token_ids`` [N] int64 on the same device, or a vocabulary size for all
    tokens. Gives [R, N]; an entry depends on its key and its token only.
    """
    if isinstance(token_ids, int):
        counters = _counters(token_ids, keys.device)
    else:
        counters = (token_ids + 1) * _signed(_GOLDEN)
    bits = keys[:, None] + counters
    # torch shifts signed integers arithmetically: the mask makes the shift a logical one.
    shifted = bits >> 30
    bits ^= shifted.bitwise_and_((1 << 34) - 1)
    bits *= _signed(_MIX_1)
    torch.bitwise_right_shift(bits, 27, out=shifted)
    bits ^= shifted.bitwise_and_((1 << 37) - 1)
    bits *= _signed(_MIX_2)
    torch.bitwise_right_shift(bits, 31, out=shifted)
    bits ^= shifted.bitwise_and_((1 << 33) - 1)
    return bits.bitwise_and_(_MASK63)


def token_bits(key: int, token_id: int) -> int:
    """``noise_bits`` of one token under one ``row_key``, in plain integers."""
    return mix64((key + (token_id + 1) * _GOLDEN) & _MASK64) & _MASK63


def token_counters(token_ids: npt.NDArray[np.int64] | int) -> Words:
    """(token + 1) * GOLDEN of the given tokens, or of all tokens of a vocabulary of that size."""
    if isinstance(token_ids, int):
        return _all_counters(token_ids)
    return (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)


def hash_counters(key: int, counters: Words, *, out: Words, scratch: Words) -> None:
    """``noise_bits`` on the host: the bits of ``token_counters`` under one ``row_key``, into ``out``."""
    np.add(counters, np.uint64(key), out=out)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(out, np.uint64(shift), out=scratch)
        np.bitwise_xor(out, scratch, out=out)
        np.multiply(out, np.uint64(factor), out=out)
    np.right_shift(out, np.uint64(31), out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.bitwise_and(out, np.uint64(_MASK63), out=out)


def row_keys(keys: list[int], device: torch.device) -> torch.Tensor:
    """``row_key`` values as [R] int64, two's complement."""
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)


def exponential(bits: int) -> float:
    """The standard exponential variate E of 63 bits; the Gumbel variate is -log(E). Finite and above 0."""
    if bits < 1 << 62:
        return -math.log1p(-(bits + 0.5) * _SCALE)
    return -math.log((_MASK63 - bits + 0.5) * _SCALE)


def gumbel(
    seed: int, position: int, domain: int, vocab_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The Gumbel variates of all tokens at one position: [V] float64 on ``device``.

    The bits beneath are the same everywhere; the logarithms may differ in the last digit between devices, so
    ``choose`` takes its own from the host's libm, for the few tokens that can win.
    """
    keys = row_keys([row_key(seed, position, domain)], torch.device(device))
    bits = noise_bits(keys, vocab_size)[0]
    low = -torch.log1p((bits.double() + 0.5) * -_SCALE)
    high = -torch.log(((_MASK63 - bits).double() + 0.5) * _SCALE)
    return -torch.log(torch.where(bits < 1 << 62, low, high))


@lru_cache(maxsize=16)
def _all_counters(vocab_size: int) -> Words:
    counters = token_counters(np.arange(vocab_size, dtype=np.int64))
    counters.setflags(write=False)
    return counters


@lru_cache(maxsize=16)
def _counters(vocab_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)


def _signed(word: int) -> int:
    """An unsigned 64-bit integer in two's complement."""
    return word - (1 << 64) if word >> 63 else word
