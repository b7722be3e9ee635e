"""What the target answers to the traffic of measurements, recorded once so that drafters can be replayed against it.

    python -m benchmarks.recorded --data DIR --out FILE [--temperatures 0 0.8]

Under the coupled law the committed text does not depend on the drafter, so a replay on recorded tokens gives exactly the
acceptance that a run would have, without the target. Goes on where it stopped: what ``FILE`` holds is not asked again.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.traffic import Asked, conversations, spec_bench, templates
from paceline.config import ModelConfig, VerifyConfig
from paceline.engine import load_runner
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import Plan, SamplingParams
from verify_service.engine import Engine
from verify_service.sequence import DecodeSpec, Event, Failed, Finished, Run


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer of the target. ``mix`` is the traffic it belongs to, ``seed`` the key of its draws."""

    mix: str
    id: str
    category: str
    temperature: float
    seed: int
    prompt_ids: list[int]
    output_ids: list[int]


def load_recorded(path: Path) -> list[Recorded]:
    """All answers of a file, in its order."""
    with path.open(encoding="utf-8") as file:
        return [Recorded(**json.loads(line)) for line in file]


class Target:
    """The real engine of the verify tier, alone in this process, decoding plainly."""

    def __init__(self, model: str, *, threads: int, slots: int, loop: asyncio.AbstractEventLoop) -> None:
        runner = load_runner(
            ModelConfig(name=model, dtype="float32", threads=threads), kv_slots=slots, max_context=2048
        )
        self.tokenizer = Tokenizer.load(resolve_model_dir(model))
        self._stop_ids = frozenset(runner.eos_token_ids)
        self._engine = Engine(runner, VerifyConfig(kv_slots=slots, max_queue=100_000), loop)
        self._engine.start()

    async def answer(self, prompt_ids: list[int], sampling: SamplingParams, max_tokens: int) -> list[int]:
        """The output's tokens, end of sequence included."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        spec = DecodeSpec(
            "", tuple(prompt_ids), (), sampling, max_tokens, self._stop_ids, Plan.plain("recording")
        )
        self._engine.submit(spec, events.put_nowait)
        output: list[int] = []
        while True:
            match await events.get():
                case Run(token_ids=token_ids):
                    output += token_ids
                case Finished():
                    return output
                case Failed(error):
                    raise error
                case _:
                    pass

    async def stop(self) -> None:
        """End the engine's thread."""
        await asyncio.to_thread(self._engine.stop)


def _seed(asked: Asked) -> int:
    return sum(256**i * b for i, b in enumerate(asked.id.encode()[-6:]))


async def record(args: argparse.Namespace) -> None:
    """Answer everything that is not in the file yet."""
    known = {(r.mix, r.id, r.temperature) for r in load_recorded(args.out)} if args.out.exists() else set()
    target = Target(args.model, threads=args.threads, slots=args.streams, loop=asyncio.get_running_loop())
    gate = asyncio.Semaphore(args.streams)
    done = 0
    started = time.monotonic()
    with args.out.open("a", encoding="utf-8") as file:

        async def one(mix: str, asked: Asked, temperature: float) -> None:
            nonlocal done
            messages: list[tuple[str, str]] = []
            for number, turn in enumerate(asked.turns):
                name = f"{asked.id}/{number}" if len(asked.turns) > 1 else asked.id
                messages.append(("user", turn))
                prompt_ids = target.tokenizer.encode_chat(messages)
                if len(prompt_ids) + args.max_tokens > 2048:
                    return
                sampling = SamplingParams(temperature=temperature, seed=_seed(asked))
                async with gate:
                    output = await target.answer(prompt_ids, sampling, args.max_tokens)
                messages.append(("assistant", target.tokenizer.decode(output).replace("<|im_end|>", "")))
                if (mix, name, temperature) not in known:
                    entry = Recorded(
                        mix, name, asked.category, temperature, sampling.seed, prompt_ids, output
                    )
                    file.write(json.dumps(asdict(entry)) + "\n")
                    file.flush()
                done += 1
                print(f"\r{done} answers, {time.monotonic() - started:.0f} s", end="", file=sys.stderr)

        def missing(mix: str, traffic: Iterable[Asked], temperature: float) -> list[tuple[str, Asked, float]]:
            return [
                (mix, asked, temperature)
                for asked in traffic
                if (mix, asked.id if len(asked.turns) == 1 else f"{asked.id}/1", temperature) not in known
            ]

        for temperature in args.temperatures:
            wanted = [
                *missing("template", templates(args.data, args.per_template), temperature),
                *missing("conversation", conversations(args.data, args.conversations), temperature),
                *missing("spec_bench", spec_bench(args.data, args.per_category), temperature),
            ]
            await asyncio.gather(*(one(*each) for each in wanted))
    print(file=sys.stderr)
    await target.stop()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with spec_bench, mt_bench, banking77, ..."
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--per-category", type=int, default=20)
    parser.add_argument("--per-template", type=int, default=50)
    parser.add_argument("--conversations", type=int, default=40)
    asyncio.run(record(parser.parse_args()))


if __name__ == "__main__":
    main()
