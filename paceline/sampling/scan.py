"""The passes over a whole row of logits; what they leave is little, and is decided on the host.

On a CPU they are numpy over the same memory: vector instructions, and one thread whatever torch is set to. torch
shares rows above 32,768 entries out among its threads, and on cores that other services keep busy it waits for the
slowest (one draw from 151,936 tokens beside two busy processes on 2 cores, one run: torch with 2 threads 74 ms, with one
13 ms, numpy 5 ms); its argmax and nonzero are 8 to 20 times slower besides. On other devices torch does them.

Ties go to the lowest index. NaN counts as largest, so a caller sees it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling.noise import hash_counters, noise_bits, row_keys, token_counters

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# Temperatures that float32 can divide by. Beyond, the answer is the same: all differences between logits are out of
# reach, or all are nothing.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 1e-30, 1e30
_LEAST_FLOAT32 = float(np.finfo(np.float32).min)

# 64 KiB of hashes: the dozen passes over them stay in the core's own cache, three times faster than over a whole row.
_CHUNK = 8192


def on_host(tensor: torch.Tensor) -> bool:
    """Whether numpy can read the tensor where it is."""
    return tensor.device.type == "cpu"


def largest(rows: Sequence[torch.Tensor]) -> tuple[list[int], list[float]]:
    """Index and value of each row's largest entry; ``rows`` are R tensors [V] float32."""
    if on_host(rows[0]):
        arrays = [array(row) for row in rows]
        ids = [int(row.argmax()) for row in arrays]
        return ids, [float(row[index]) for row, index in zip(arrays, ids, strict=True)]
    together = torch.stack(list(rows))
    best = together.argmax(-1, keepdim=True)
    return best.squeeze(-1).tolist(), together.gather(-1, best).squeeze(-1).tolist()


def kth_largest(row: torch.Tensor, k: int) -> float:
    """The k-th largest value, equal ones counted each; ``row`` [V] float32, 1 <= k <= V."""
    if on_host(row):
        return float(np.partition(array(row), -k)[-k])
    return float(torch.topk(row, k).values[-1])


def indices_at_least(row: torch.Tensor, threshold: float) -> Ids:
    """Ascending indices of values >= threshold, on the host; ``row`` [V] float32."""
    threshold = max(threshold, _LEAST_FLOAT32)
    if on_host(row):
        return np.flatnonzero(array(row) >= np.float32(threshold))
    return _to_ids((row >= threshold).nonzero())


def take(row: torch.Tensor, ids: Ids) -> Floats:
    """The values at ``ids``, on the host."""
    if on_host(row):
        taken: Floats = array(row)[ids]
        return taken
    return array(row[torch.from_numpy(ids).to(row.device)].cpu())


def put(row: torch.Tensor, ids: Ids, values: Floats) -> torch.Tensor:
    """A copy of ``row`` with ``values`` at ``ids``."""
    if on_host(row):
        changed = array(row).copy()
        changed[ids] = values
        return torch.from_numpy(changed)
    index = torch.from_numpy(ids).to(row.device)
    return row.index_copy(0, index, torch.from_numpy(values).to(row.device))


def mass(row: torch.Tensor, top: float, temperature: float) -> float:
    """Sum of all weights exp((logit - top) / temperature): float32 weights, summed in float64."""
    scale = within_float32(temperature)
    if on_host(row):
        with np.errstate(over="ignore", under="ignore"):
            return float(np.exp((array(row) - np.float32(top)) / np.float32(scale)).sum(dtype=np.float64))
    return float(torch.exp((row - top) / scale).sum(dtype=torch.float64))


def ratio_bounds(
    row: torch.Tensor | Floats, top: float, temperature: float, key: int, token_ids: Ids | None
) -> torch.Tensor | Floats:
    """(bits + 1/2) / weight of each entry: [N] float32, right within 1e-4 where the weight is above e**-87.

    ``bits`` is the noise under the row's ``key``. ``token_ids`` names the token of each entry of a row on the host;
    without it the row is a whole one, where it is.
    """
    scale = within_float32(temperature)
    if isinstance(row, torch.Tensor) and not on_host(row):
        bits = noise_bits(row_keys([key], row.device), len(row))[0]
        return bits.float().add_(0.5).div_(torch.exp((row - top) / scale))
    logits = array(row) if isinstance(row, torch.Tensor) else row
    counters = token_counters(len(logits) if token_ids is None else token_ids)
    bounds = np.empty(len(logits), dtype=np.float32)
    hashed, scratch = np.empty((2, min(_CHUNK, len(logits))), dtype=np.uint64)
    # Weights underflow to 0 and then bound nothing (infinity): as it should be.
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        for start in range(0, len(logits), _CHUNK):
            part = slice(start, start + _CHUNK)
            size = len(counters[part])
            hash_counters(key, counters[part], out=hashed[:size], scratch=scratch[:size])
            weights = np.exp((logits[part] - np.float32(top)) / np.float32(scale))
            drawn = hashed[:size].view(np.int64).astype(np.float32)
            drawn += np.float32(0.5)
            np.divide(drawn, weights, out=bounds[part])
    return bounds


def smallest(bounds: torch.Tensor | Floats) -> tuple[int, float]:
    """Index and value of the smallest entry."""
    index = int(bounds.argmin())
    return index, float(bounds[index])


def indices_at_most(bounds: torch.Tensor | Floats, threshold: float) -> Ids:
    """Ascending indices of values <= threshold, on the host."""
    if isinstance(bounds, torch.Tensor):
        return _to_ids((bounds <= threshold).nonzero())
    return np.flatnonzero(bounds <= np.float32(threshold))


def array(tensor: torch.Tensor) -> Floats:
    """The memory of a float32 CPU tensor as an array."""
    view: Floats = tensor.detach().numpy()
    return view


def within_float32(temperature: float) -> float:
    """The nearest temperature that a float32 pass can divide by; the answer is the same."""
    return min(max(temperature, _LEAST_TEMPERATURE), _MOST_TEMPERATURE)


def _to_ids(found: torch.Tensor) -> Ids:
    ids: Ids = found.squeeze(-1).cpu().numpy()
    return ids
