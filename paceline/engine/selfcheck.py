"""What a runner proves about itself on the real weights when it starts."""

from collections.abc import Callable, Sequence

import torch

from paceline.engine.kv import SlotKV
from paceline.engine.packing import Segment
from paceline.errors import ConfigError

_TOLERANCE = {  # of the largest logit, against the model's own forward
    "float32": 1e-3,
    "bfloat16": 6e-2,
    "w4a8": 6e-2,
}
_PROBE_LENGTH = 70  # crosses the edge of an attention bucket


def probe_ids(vocab_size: int, capacity: int) -> list[int]:
    """Token ids all over the vocabulary, always the same ones, at most ``capacity``."""
    return [(7919 * (i + 1) + 13 * i * i) % vocab_size for i in range(min(_PROBE_LENGTH, capacity))]


def check_equal(found: torch.Tensor, own: torch.Tensor, *, what: str, precision: str) -> None:
    """Raise ConfigError unless ``found`` are the logits of the model's ``own`` forward within the rounding of ``precision``."""
    allowed = _TOLERANCE[precision] * max(1.0, float(own.abs().max()))
    worst = float((found.float() - own.float()).abs().max())
    if not worst <= allowed:
        raise ConfigError(
            f"{what}: the packed forward differs from the model's own by {worst:.2g} "
            f"(allowed: {allowed:.2g}); this architecture cannot be served yet"
        )


def rows_are_independent(
    forward: Callable[[Sequence[Segment]], torch.Tensor], kv: SlotKV, ids: Sequence[int]
) -> bool:
    """Whether a sequence gets the same bits whole, in chunks, in blocks, one by one and beside others.

    ``forward`` gives the logits of the segments and moves their lengths on. Every slot of ``kv`` must be free, and is
    again afterwards.
    """
    size = len(ids)
    if size < _PROBE_LENGTH:
        return False

    def acquire() -> int:
        slot = kv.acquire()
        assert slot is not None, "nobody else has a slot yet"
        return slot

    whole = acquire()
    expected = forward([Segment(whole, 0, ids, size)])
    kv.truncate(whole, 0)
    parts = [forward([Segment(whole, 0, ids[:33], 33)]), forward([Segment(whole, 33, ids[33:34], 1)])]
    others = [(acquire(), count) for count in (1, 9, 20)[: kv.num_free]]
    neighbours = [Segment(slot, 0, ids[-count:], 1) for slot, count in others]
    parts.append(forward([*neighbours, Segment(whole, 34, ids[34:39], 5)])[len(neighbours) :])
    for start, end in ((39, 63), (63, 68), (68, 69), (69, 70)):
        parts.append(forward([Segment(whole, start, ids[start:end], end - start)]))
    for slot in (whole, *(slot for slot, _ in others)):
        kv.release(slot)
    return torch.equal(expected, torch.cat(parts))
