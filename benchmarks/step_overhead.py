"""What a step costs beside the forward: scheduling, accepting, committing, telling links and clients.

    python -m benchmarks.step_overhead [--quick]

A tiny random model stands in for the target, so that the engine thread's own work is what is left; everything else is
the real engine of the verify tier. Plain decoding, and speculation configured with a drafter that is linked but not
asked for (the K=0 tax), alternate in one run; medians over all steps. The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

from paceline.config import ModelConfig, VerifyConfig
from paceline.engine import Runner, load_runner
from paceline.link import Lookahead, Stamp
from paceline.testing.tiny_models import tiny_model_dir
from paceline.types import Plan, SamplingParams
from verify_service.engine import Engine
from verify_service.link_port import Offer
from verify_service.sequence import DecodeSpec, Event, Failed, Finished, Run, Sequence

BARS_MS = {1: 1.0, 16: 3.0}


class SilentPort:
    """A link whose other end is there and is told nothing, since nobody speculates."""

    endpoint = "nowhere"

    def open(self, sequence: Sequence, epoch: int, k: int, lookahead: Lookahead) -> None:
        """See LinkPort."""

    def commit(
        self, stamp: Stamp, token_ids: list[int], k: int, round_index: int, lookahead: Lookahead
    ) -> None:
        """See LinkPort."""

    def close(self, sequence_id: int, epoch: int) -> None:
        """See LinkPort."""

    def flush(self) -> None:
        """See LinkPort."""


async def decode(engine: Engine, number: int, tokens: int, temperature: float) -> list[tuple[float, float]]:
    """(round, forward) seconds of every round of one sequence."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    prompt = tuple(5 + (number + i) % 400 for i in range(8))
    sampling = SamplingParams(temperature=temperature, seed=number)
    engine.submit(
        DecodeSpec(str(number), prompt, (), sampling, tokens, frozenset(), Plan.plain("benchmark")),
        events.put_nowait,
    )
    rounds = []
    while True:
        match await events.get():
            case Run(record=record) if record is not None:
                rounds.append((record.total_s, record.forward_s))
            case Finished():
                return rounds
            case Failed(error):
                raise error
            case _:
                pass


async def overhead_ms(
    runner: Runner, sequences: int, tokens: int, *, linked: bool, temperature: float
) -> float:
    """Median over all rounds of the round's time less its forward."""
    engine = Engine(runner, VerifyConfig(), asyncio.get_running_loop())
    engine.start()
    try:
        if linked:
            engine.link_up(SilentPort(), {"ngram": Offer("1")})
        found = await asyncio.gather(
            *(decode(engine, number, tokens, temperature) for number in range(sequences))
        )
    finally:
        await asyncio.to_thread(engine.stop)
    # The first and last rounds share their step with prompts and leave-takings.
    return statistics.median(1e3 * (total - forward) for one in found for total, forward in one[10:-10])


async def run(*, repeats: int, tokens: int) -> None:
    """Alternate all settings, print medians of medians."""
    with tempfile.TemporaryDirectory() as directory:
        path = tiny_model_dir(Path(directory))
        runner = load_runner(ModelConfig(name=str(path)), kv_slots=16, max_context=1024)
    figures: dict[str, list[float]] = {}
    for _ in range(repeats):
        for sequences in BARS_MS:
            for linked in (False, True):
                for temperature in (0.0, 0.8):
                    key = f"{sequences} sequences, T={temperature}, {'linked' if linked else 'alone'}"
                    value = await overhead_ms(
                        runner, sequences, tokens, linked=linked, temperature=temperature
                    )
                    figures.setdefault(key, []).append(value)
    medians = {key: round(statistics.median(values), 3) for key, values in figures.items()}
    for key, value in medians.items():
        print(f"{key}: {value} ms a step beside the forward")
    result = {"benchmark": "step_overhead", "overhead_ms": medians, "bar_ms": BARS_MS}
    print("RESULT " + json.dumps(result))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under half a minute")
    args = parser.parse_args()
    asyncio.run(run(repeats=3 if args.quick else 9, tokens=120 if args.quick else 400))


if __name__ == "__main__":
    main()
