"""Has the target read text that it did not write: ``python -m training.read --target smollm2 --data DIR --out DIR``.

Prompts, and answers that people wrote, become training data with the target's own distributions at every position.
Reading takes a tenth of the time of writing; what is read is less like what will be drafted, so it adds to answers and
does not replace them. Shards look like those of ``training.generate``; held-out prompts are left out.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from paceline.config import ModelConfig
from paceline.engine import Runner, Segment, load_runner
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer
from training.answers import Answer, is_held_out_key, key_of, whole_shards, write_shard
from training.prompts import Text, texts


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="training.read", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="public prompts")
    parser.add_argument("--prompts", type=Path, help="own prompts instead: jsonl of {text, task, source}")
    parser.add_argument("--out", type=Path, required=True, help="directory of shards")
    parser.add_argument("--longest", type=int, default=400, help="tokens of a text; the rest is cut off")
    parser.add_argument("--shard", type=int, default=400, help="texts a shard")
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--held-out-every", type=int, default=20, help="as in training")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    runner = load_runner(
        ModelConfig(name=options.target, device=options.device, dtype=options.dtype, threads=options.threads),
        kv_slots=1,
        max_context=options.longest,
    )
    tokenizer = Tokenizer.load(resolve_model_dir(options.target))
    chosen = texts(options.data, mine=options.prompts)
    began, tokens = time.perf_counter(), 0
    for number in range(len(whole_shards(options.out)), -(-len(chosen) // options.shard)):
        read = []
        for text in chosen[number * options.shard : (number + 1) * options.shard]:
            answer = read_text(runner, tokenizer, text, options.longest, options.top, options.held_out_every)
            if answer is not None:
                read.append(answer)
                tokens += answer.num_answer
        if read:
            write_shard(options.out / f"shard-{number:05}.npz", read)
        share = (number + 1) * options.shard / len(chosen)
        speed = tokens / (time.perf_counter() - began)
        print(
            f"{min(share, 1):4.0%} of {len(chosen)} texts, {speed:.0f} tokens/s{os.linesep}",
            end="",
            file=sys.stderr,
        )


@torch.inference_mode()
def read_text(
    runner: Runner, tokenizer: Tokenizer, text: Text, longest: int, num_top: int, every: int
) -> Answer | None:
    """What the target expects at each position of the user's words and the answer; None for a held-out prompt."""
    prompt = _encoded(tokenizer, [("user", text.prompt.text)])
    key = key_of(prompt)
    if is_held_out_key(key, every):
        return None
    empty = _encoded(tokenizer, [("user", "")])
    start = next((i for i, (a, b) in enumerate(zip(empty, prompt, strict=False)) if a != b), len(empty))
    ids = (prompt + tokenizer.encode(text.answer) if text.answer else prompt)[:longest]
    start = max(start, 1)
    if len(ids) - start < 4:
        return None
    slot = runner.kv.acquire()
    assert slot is not None, "one text at a time"
    logits = runner.forward([Segment(slot, 0, ids[:-1], len(ids) - start)]).float().cpu()
    runner.kv.release(slot)
    top = logits.topk(num_top, dim=1)
    logprobs = top.values - logits.logsumexp(dim=1, keepdim=True)
    return Answer(
        text.prompt.task, "read", 1.0, np.array(ids), start, top.indices.numpy(), logprobs.numpy(), key
    )


def _encoded(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]]) -> list[int]:
    return (
        tokenizer.encode_chat(messages) if tokenizer.has_chat_template else tokenizer.encode(messages[0][1])
    )


if __name__ == "__main__":
    main()
