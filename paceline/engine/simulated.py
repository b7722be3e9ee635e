"""The simulated runner: a forward sleeps as long as the pair's cost table says, and its logits come from a keyed source.

The source is a language of its own: from the words that follow each other in a small text, shuffled by a hash of the
last tokens and the position, so that greedy text wanders and never falls into a loop. A row's logits are a pure function
of the tokens before it. What the target and the drafter share is this function: a simulated drafter can ask it what
the target will say, and be right as often as it is told to be.
"""

import hashlib
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline import simulation
from paceline.config import SimulationConfig
from paceline.engine.kv import KVShape, SlotKV
from paceline.engine.packing import Segment, check_segments
from paceline.model_store import resolve_model_dir
from paceline.sampling import largest
from paceline.sampling.noise import mix64
from paceline.tokenizer import Tokenizer
from paceline.types import ModelInfo

_MEMORY = 3
"""Tokens that the next one depends on, besides the position."""
_MAX_CONTEXT = 1 << 15
_NEVER, _UNLIKELY, _SHUFFLE = -40.0, -18.0, 1.5
_MASK64 = (1 << 64) - 1

Logits = npt.NDArray[np.float32]


class Source:
    """Which token follows which, how likely. Immutable."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode(" " + " ".join(simulation.TEXT.split()))
        self.vocab_size = simulation.VOCAB_SIZE
        followers: dict[int, dict[int, int]] = {}
        for one, next_one in zip(ids, [*ids[1:], ids[0]], strict=True):
            counts = followers.setdefault(one, {})
            counts[next_one] = counts.get(next_one, 0) + 1
        full_stop = tokenizer.encode(".")[-1]
        self._start = self._row(followers[full_stop])
        self._rows = {token: self._row(counts) for token, counts in followers.items()}

    def _row(self, counts: dict[int, int]) -> tuple[npt.NDArray[np.int64], Logits]:
        ids = np.array(sorted(counts), dtype=np.int64)
        weights = np.array([counts[token] for token in ids.tolist()], dtype=np.float32)
        return ids, np.log(weights / weights.sum())

    def logits(self, last_ids: Sequence[int], position: int) -> Logits:
        """[V] for the token at ``position``, after ``last_ids`` (only the last three count, all that there are)."""
        key = position & _MASK64
        for token in last_ids[-_MEMORY:]:
            key = mix64(((key ^ token) + 0x9E3779B97F4A7C15) & _MASK64)
        ids, values = self._rows.get(last_ids[-1], self._start)
        row = np.full(self.vocab_size, _UNLIKELY, dtype=np.float32)
        row[:3] = _NEVER
        # A splitmix step in numpy: one word for each follower, uniform in [0, 1).
        words = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        uniform = (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        row[ids] = values + _SHUFFLE * uniform
        return row


class SimulatedRunner:
    """See the module; the protocol is ``paceline.engine.Runner``. The KV of a position is its token id."""

    def __init__(self, config: SimulationConfig, *, kv_slots: int, max_context: int) -> None:
        pair = simulation.pair_of(config)
        tokenizer = Tokenizer.load(resolve_model_dir(simulation.MODEL_NAME))
        capacity = min(max_context, _MAX_CONTEXT)
        self.device = torch.device("cpu")
        self.eos_token_ids = simulation.END_IDS
        self.source = Source(tokenizer)
        self.kv = SlotKV(
            KVShape(1, 1, 1, 1),
            num_slots=kv_slots,
            capacity=capacity,
            dtype=torch.float32,
            device=self.device,
        )
        self._ids = self.kv.keys[0, :, 0].numpy()
        self._cost = pair.verify
        digest = hashlib.sha256(f"{simulation.TEXT}{_MEMORY}{_SHUFFLE}".encode()).hexdigest()
        self.info = ModelInfo(
            name=f"{simulation.MODEL_NAME} {pair.target}",
            fingerprint=digest,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=self.source.vocab_size,
            max_context=capacity,
            dtype="float32",
            device="cpu",
            runner="simulated",
            runner_reason=f"simulated: a forward of few rows sleeps {pair.verify.base_s * 1e3:g} ms",
            numerics="deterministic",
        )

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """See ``Runner.forward``."""
        started = time.monotonic()
        check_segments(segments, self.kv)
        rows, num_rows, context = [], 0, 0
        for segment in segments:
            first = self.kv.row(segment.slot, 0)
            self._ids[first + segment.start : first + segment.end] = segment.token_ids
            for length in range(segment.end - segment.num_logits + 1, segment.end + 1):
                last = self._ids[first + max(0, length - _MEMORY) : first + length].astype(np.int64)
                rows.append(self.source.logits(last.tolist(), length))
            num_rows += len(segment.token_ids)
            context += segment.end
        for segment in segments:
            self.kv.extend(segment.slot, len(segment.token_ids))
        logits = np.stack(rows) if rows else np.empty((0, self.source.vocab_size), dtype=np.float32)
        best = logits.argmax(1)  # in the device's time, as kernels do
        found = torch.from_numpy(logits)
        largest.tell(found, best.tolist(), np.take_along_axis(logits, best[:, None], 1)[:, 0].tolist())
        simulation.sleep_until(started + self._cost.seconds(num_rows, context))
        return found
