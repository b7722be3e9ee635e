"""Makes answers of a target: ``python -m training.generate --target smollm2 --data DIR --out DIR --tokens 1000000``.

Runs through the project's own engine, so the answers come from the arithmetic that will be served. Sequences come and
go in one batch of constant width. What is done is written shard by shard; a restart goes on behind the last shard.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.model_store import resolve_model_dir
from paceline.sampling import TokenRow, choose
from paceline.tokenizer import Tokenizer
from paceline.types import SamplingParams
from training.answers import Answer, whole_shards, write_shard
from training.prompts import Prompt, collect, evaluation

_TEMPERATURES = (0.0, 0.8, 0.0, 1.0)
"""In turn over the prompts, and from pass to pass over one prompt; the seed changes with the pass."""


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to be made."""

    prompt: Prompt
    ids: list[int]
    sampling: SamplingParams


@dataclass(slots=True)
class _Running:
    job: Job
    slot: int
    ids: list[int]
    top_ids: list[Any] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)


class Generator:
    """A batch of ``width`` sequences over one runner."""

    def __init__(self, runner: Runner, *, width: int, longest: int, num_top: int) -> None:
        self._runner = runner
        self._width = width
        self._longest = longest
        self._num_top = num_top
        self._eos = frozenset(runner.eos_token_ids)
        self._running: list[_Running] = []

    @torch.inference_mode()
    def run(self, jobs: Iterator[Job]) -> Iterator[Answer]:
        """Answers in the order in which they end."""
        while True:
            while len(self._running) < self._width and (job := next(jobs, None)) is not None:
                slot = self._runner.kv.acquire()
                assert slot is not None, "a slot for each of the batch"
                self._running.append(_Running(job, slot, list(job.ids)))
            if not self._running:
                return
            yield from self._step()

    def _step(self) -> Iterator[Answer]:
        running = self._running
        starts = [self._runner.kv.length(one.slot) for one in running]
        segments = [
            Segment(one.slot, start, one.ids[start:], 1) for one, start in zip(running, starts, strict=True)
        ]
        logits = self._runner.forward(segments).float().cpu()
        top = logits.topk(self._num_top, dim=1)
        logprobs = (top.values - logits.logsumexp(dim=1, keepdim=True)).numpy().astype(np.float16)
        rows = [TokenRow(one.job.sampling, len(one.ids)) for one in running]
        for index, token in enumerate(choose(logits, rows)):
            one = running[index]
            one.ids.append(token)
            one.top_ids.append(top.indices[index].numpy())
            one.top_logprobs.append(logprobs[index])
        ended = [one for one in running if one.ids[-1] in self._eos or len(one.top_ids) >= self._longest]
        self._running = [one for one in running if one not in ended]
        for one in ended:
            self._runner.kv.release(one.slot)
            prompt = one.job.prompt
            yield Answer(
                prompt.task,
                prompt.source,
                one.job.sampling.temperature,
                np.array(one.ids),
                len(one.job.ids),
                np.array(one.top_ids),
                np.array(one.top_logprobs),
            )


def jobs_of(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    temperatures: Sequence[float],
    *,
    longest: int,
    seed: int,
    passes: int | None,
) -> Iterator[Job]:
    """Pass after pass over all prompts; without end where ``passes`` is None."""
    number = 0
    while prompts and number != passes:
        for index, prompt in enumerate(prompts):
            temperature = temperatures[(number + index) % len(temperatures)]
            ids = (
                tokenizer.encode_chat([("user", prompt.text)])
                if tokenizer.has_chat_template
                else tokenizer.encode(prompt.text)
            )
            if 0 < len(ids) <= longest:
                yield Job(prompt, ids, SamplingParams(temperature=temperature, seed=seed + number))
        number += 1


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="training.generate", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="public prompts")
    parser.add_argument("--prompts", type=Path, help="own prompts instead: jsonl of {text, task, source}")
    parser.add_argument(
        "--evaluation",
        type=int,
        metavar="N",
        help="instead: greedy answers to N Spec-Bench prompts a category",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of shards")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="answer tokens to make in all")
    parser.add_argument("--width", type=int, default=24, help="sequences at once")
    parser.add_argument("--longest", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--longest-prompt", type=int, default=400)
    parser.add_argument("--shard", type=int, default=200, help="answers a shard")
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stop.append(number))

    shards = whole_shards(options.out)
    rows = [row for shard in shards for row in json.loads(shard.with_suffix(".json").read_text("utf-8"))]
    made = sum(row["len"] - row["prompt_len"] for row in rows)
    runner = load_runner(
        ModelConfig(name=options.target, device=options.device, dtype=options.dtype, threads=options.threads),
        kv_slots=options.width,
        max_context=options.longest + options.longest_prompt,
    )
    tokenizer = Tokenizer.load(resolve_model_dir(options.target))
    temperatures: Sequence[float]
    if options.evaluation:
        prompts, temperatures = evaluation(options.data, options.evaluation), (0.0,)
    else:
        prompts, temperatures = collect(options.data, mine=options.prompts), _TEMPERATURES
    jobs = jobs_of(
        prompts, tokenizer, temperatures, longest=options.longest_prompt, seed=options.seed,
        passes=1 if options.evaluation else None,
    )  # fmt: skip
    for _ in range(
        len(rows)
    ):  # answers end a little out of order: a few are made twice or not at all, which does no harm
        next(jobs, None)
    generator = Generator(runner, width=options.width, longest=options.longest, num_top=options.top)
    began, fresh = time.perf_counter(), 0
    waiting: list[Answer] = []
    for answer in generator.run(jobs):
        waiting.append(answer)
        made, fresh = made + answer.num_answer, fresh + answer.num_answer
        _bar(made / options.tokens, made, fresh / (time.perf_counter() - began))
        if len(waiting) >= options.shard or made >= options.tokens or stop:
            write_shard(options.out / f"shard-{len(shards):05}.npz", waiting)
            shards.append(options.out)
            waiting = []
        if made >= options.tokens or stop:
            break
    if waiting:
        write_shard(options.out / f"shard-{len(shards):05}.npz", waiting)


def _bar(share: float, made: int, speed: float) -> None:
    full = int(30 * min(share, 1))
    line = f"[{'#' * full}{'.' * (30 - full)}] {share:4.0%} {made} answer tokens, {speed:.0f}/s"
    if sys.stderr.isatty():
        print("\r" + line, end="", file=sys.stderr, flush=True)
    elif made % 50 == 0:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
