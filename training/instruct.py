"""Lets a target write prompts for itself: ``python -m training.instruct --target smollm2 --to prompts.jsonl --count 4000``.

Given the opening of a user's turn and nothing else, a chat model goes on with what a user might ask (Magpie, Xu et al. 2024). The
file is what ``training.generate --prompts`` takes; each call writes the file anew, the same for the same seed.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.config import ModelConfig
from paceline.engine import load_runner
from paceline.errors import InvalidRequestError
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import SamplingParams
from training.generate import Generator, Job
from training.prompts import Prompt

_FEWEST_CHARACTERS = 12
_TRIES = 20  # answers for each prompt that is wanted: a target that is no chat model ends no turn


def opening(tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation up to the first token of what a user says; InvalidRequestError without a chat template."""
    one, other = (tokenizer.encode_chat([("user", text)]) for text in ("a", "0"))
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token for token, _ in common]


def instructions(
    generator: Generator, tokenizer: Tokenizer, eos: frozenset[int], *, seed: int, count: int
) -> Iterator[str]:
    """At most ``count`` user turns that the target has brought to an end, each text once; fewer where few are."""
    ids = opening(tokenizer)
    nothing = Prompt("own", "target", "")
    jobs = (
        Job(nothing, ids, SamplingParams(temperature=1.0, top_p=0.95, seed=seed + number))
        for number in range(_TRIES * count)
    )
    said: set[str] = set()
    for answer in generator.run(jobs):
        written = answer.ids[answer.prompt_len :].tolist()
        text = tokenizer.decode(written).strip()
        if written[-1] in eos and len(text) >= _FEWEST_CHARACTERS and text not in said:
            said.add(text)
            yield text
        if len(said) >= count:
            return


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="training.instruct", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--to", type=Path, required=True, help="file to write")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--longest", type=int, default=160, help="tokens of a prompt")
    parser.add_argument("--width", type=int, default=24, help="sequences at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    tokenizer = Tokenizer.load(resolve_model_dir(options.target))
    try:
        header = len(opening(tokenizer))
    except InvalidRequestError as error:
        raise SystemExit(f"--target {options.target}: {error}") from error
    runner = load_runner(
        ModelConfig(name=options.target, device=options.device, dtype=options.dtype, threads=options.threads),
        kv_slots=options.width,
        max_context=options.longest + header,
    )
    generator = Generator(runner, width=options.width, longest=options.longest, num_top=1)
    with options.to.open("w", encoding="utf-8") as file:
        eos = frozenset(runner.eos_token_ids)
        for text in instructions(generator, tokenizer, eos, seed=options.seed, count=options.count):
            file.write(json.dumps({"task": "own", "source": "target", "text": text}) + "\n")


if __name__ == "__main__":
    main()
