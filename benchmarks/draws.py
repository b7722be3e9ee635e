"""What a token costs to draw, by sampling setting: compiled pass against numpy, in one process.

    python -m benchmarks.draws [--vocab 49152]

Times are the least of many, one row, one thread. Both give the same tokens, which is looked at. The last line is ``RESULT {json}``.
"""

import argparse
import json
import time
from typing import Any
from unittest import mock

import torch

from paceline.sampling import TokenRow, choose, contenders, one_row, processors
from paceline.types import SamplingParams

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T=0.8": {"temperature": 0.8},
    "T=0.8, top_p=0.95": {"temperature": 0.8, "top_p": 0.95},
    "T=0.8, top_k=50": {"temperature": 0.8, "top_k": 50},
    "T=0.8, top_k=50, top_p=0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "T=0.8, min_p=0.05": {"temperature": 0.8, "min_p": 0.05},
    "T=0.8, repetition 1.1": {"temperature": 0.8, "repetition_penalty": 1.1},
}
ROUNDS = 200


def least_us(logits: torch.Tensor, settings: dict[str, Any]) -> tuple[float, list[int]]:
    """Microseconds of one draw, and the tokens of all."""
    params = SamplingParams(seed=3, **settings)
    times, tokens = [], []
    for position in range(ROUNDS):
        rows = [TokenRow(params, position, (1, 2, 3), (4, 5, 6))]
        began = time.perf_counter()
        tokens += choose(logits, rows)
        times.append(time.perf_counter() - began)
    return round(1e6 * min(times), 1), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    vocab = parser.parse_args().vocab
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)) * 2.5
    logits[0, :20] += 8
    result: dict[str, Any] = {"benchmark": "draws", "vocab": vocab, "us": {}}
    result["compiled"] = contenders.native_contenders() is not None
    same = True
    for name, settings in SETTINGS.items():
        ours, tokens = least_us(logits, settings)
        with (
            mock.patch.object(one_row, "can_pass", return_value=False),
            mock.patch.object(processors, "can_pass", return_value=False),
            mock.patch.object(one_row, "has_compiled", return_value=False),
        ):
            numpy, others = least_us(logits, settings)
        same = same and tokens == others
        result["us"][name] = {"compiled": ours, "numpy": numpy}
        print(f"{name:28} {ours:8.1f} us, numpy {numpy:8.1f} us")
    result["bars"] = {"same tokens": same}
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
