"""What the process holds of the machine's memory, and models of their devices."""

import contextlib
import ctypes
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from paceline.engine.runner import Runner


def give_back_free_memory() -> None:
    """Hand freed pages back to the system: loading and measuring leave many that will not be wanted again.

    glibc keeps them otherwise, and they count as resident. Does nothing where the C library has no such call.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def weights_bytes(runner: object) -> int:
    """Bytes of the weights as the runner holds them; 0 for one that has none."""
    body = getattr(runner, "_body", None)
    known = getattr(body, "weight_bytes", 0)
    if known:
        return int(known)
    model = getattr(runner, "_model", None)
    if isinstance(model, torch.nn.Module):
        return sum(weight.nbytes for weight in model.parameters())
    return sum({_place(found): found.nbytes for found in _tensors(body, 4)}.values())


def kv_bytes_per_token(runner: Runner) -> int:
    """Bytes of one token's keys and values over all layers."""
    return runner.kv.nbytes // (runner.kv.num_slots * runner.kv.stride)


def device_bytes(device: torch.device) -> int:
    """All of the device's memory, or what a container may use of it; 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    with contextlib.suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))  # "max": no limit
    return min(found, default=0)


def _place(tensor: torch.Tensor) -> int:
    """The same for tensors that share their memory. Weights packed by oneDNN have an address of their own, which is not told."""
    return tensor.data_ptr() if tensor.layout is torch.strided else -id(tensor)


def _tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        inside: Iterable[object] = ()
        if isinstance(value, list | tuple):
            inside = value
        elif isinstance(value, dict):
            inside = value.values()
        elif hasattr(value, "__dict__"):
            inside = vars(value).values()
        elif hasattr(value, "__slots__"):
            inside = [getattr(value, name, None) for name in value.__slots__]
        for one in inside:
            yield from _tensors(one, depth - 1)
