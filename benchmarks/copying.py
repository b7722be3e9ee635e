"""Prompt lookup end to end, over gRPC, where the answer copies from the prompt: against transformers' own, and against plain.

    python -m benchmarks.copying --data ../shared/data [--quick] [--model smollm2] [--tokens 96] [--k 4]

Draft, verify and router run as processes of their own, without Ray. Three tasks from public data: extract (CrossNER), rewrite
(wiki-split) and summarise with quotes (CNN/DailyMail). Each prompt is decoded, greedily, by the router's client plainly and
with the drafter `ngram`, and by transformers' `generate` with prompt lookup of k and of 10 tokens (its usual number; the better
total counts), one after the other, so that a neighbour on the machine disturbs all alike. Times are those of whole requests;
the ratio to plain decoding is that of decoding alone. The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from evaluation.tiers import tier
from paceline.client import Chunk, Client, Finished, generate_request
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import Mode

BAR_TRANSFORMERS = 1.5
BAR_PLAIN = 1.8
HIGH_ACCEPTANCE = 0.7
USUAL_LOOKUP = 10


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer: its tokens, the whole request and the part from the first token to the last, in seconds."""

    tokens: int
    total_s: float
    decode_s: float
    drafted: int = 0
    accepted: int = 0


def rows(path: Path, count: int) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]


def prompts(data: Path, each: int) -> list[tuple[str, str]]:
    """(task, prompt), tasks in turn."""
    sentences = [row["text"] for row in rows(data / "crossner" / "ai_music_science.jsonl", 4 * each)]
    pairs = rows(data / "wiki_split" / "validation_300.jsonl", 2 * each)
    news = rows(data / "news_summaries" / "cnn_dailymail_120.jsonl", 120)
    short = sorted((row["prompt"] for row in news), key=len)[:each]
    found = []
    for i in range(each):
        text = "\n".join(sentences[4 * i : 4 * i + 4])
        found.append(("extract", f"Copy the last two sentences of this text, word for word.\n\n{text}"))
        text = " ".join(row["complex"] for row in pairs[2 * i : 2 * i + 2])
        found.append(
            ("rewrite", f"Rewrite the text without the blanks before commas and full stops.\n\n{text}")
        )
        article = short[i].partition("\n\n")[2] or short[i]
        found.append(("summarise", f"Summarise the article by quoting its two main sentences.\n\n{article}"))
    return found


async def ours(client: Client, prompt: str, tokens: int, k: int) -> Timed:
    request = generate_request(
        messages=[("user", prompt)],
        temperature=0.0,
        max_tokens=tokens,
        mode=Mode.SPECULATIVE if k else Mode.PLAIN,
        drafter="ngram" if k else None,
        k=k or None,
        tenant=os.urandom(8).hex(),  # nothing from memory: the others start from nothing too
    )
    began, first = time.perf_counter(), 0.0
    async for event in client.generate(request):
        match event:
            case Chunk() if event.token_ids and not first:
                first = time.perf_counter()
            case Finished():
                now = time.perf_counter()
                stats = event.speculative
                return Timed(
                    event.usage.completion_tokens,
                    now - began,
                    now - first,
                    stats.num_draft_tokens,
                    stats.num_accepted_draft_tokens,
                )
            case _:
                pass
    raise AssertionError("no answer")


def theirs(model: Any, eos: list[int], prompt: list[int], tokens: int, lookup: int) -> Timed:
    ids = torch.tensor([prompt])
    began = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
            eos_token_id=eos, pad_token_id=eos[0], prompt_lookup_num_tokens=lookup,
        )  # fmt: skip
    return Timed(output.shape[1] - len(prompt), time.perf_counter() - began, 0.0)


async def measure(args: argparse.Namespace) -> tuple[list[str], dict[str, list[Timed]]]:
    """Tasks, and by way of decoding one answer a prompt."""
    directory = resolve_model_dir(args.model)
    tokenizer = Tokenizer.load(directory)
    work = prompts(args.data, args.each)
    model_setting = [f'model.name="{args.model}"']
    found: dict[str, list[Timed]] = {"plain": [], "ngram": [], f"lookup {args.k}": [], "lookup 10": []}
    async with AsyncExitStack() as stack:
        drafters = "draft.drafters={ngram={kind='ngram'}}"
        draft, _ = await stack.enter_async_context(tier("draft_service", [*model_setting, drafters]))
        settings = [*model_setting, f'verify.draft_endpoints=["{draft}"]']
        verify, _ = await stack.enter_async_context(tier("verify_service", settings))
        settings = [*model_setting, f'router.verify_endpoints=["{verify}"]']
        router, _ = await stack.enter_async_context(tier("router", settings))
        client = await stack.enter_async_context(Client(router))
        info = await client.server_info()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[no-untyped-call]
            directory, dtype=getattr(torch, info.model.dtype.partition(" ")[0], torch.float32)
        ).eval()
        eos = model.generation_config.eos_token_id
        eos = [eos] if isinstance(eos, int) else list(eos)
        await ours(client, "Warm up.", 4, args.k)
        theirs(model, eos, tokenizer.encode("Warm up."), 4, args.k)
        for _, prompt in work:
            ids = tokenizer.encode_chat([("user", prompt)])
            found["plain"].append(await ours(client, prompt, args.tokens, 0))
            found["ngram"].append(await ours(client, prompt, args.tokens, args.k))
            for name, lookup in ((f"lookup {args.k}", args.k), ("lookup 10", USUAL_LOOKUP)):
                found[name].append(theirs(model, eos, ids, args.tokens, lookup))
    return [task for task, _ in work], found


def acceptance(answers: list[Timed]) -> float:
    """A ratio of sums; 0 where nothing was drafted."""
    return sum(a.accepted for a in answers) / max(1, sum(a.drafted for a in answers))


def per_token(answers: list[Timed], seconds: Callable[[Timed], float]) -> float:
    return 1e3 * sum(map(seconds, answers)) / max(1, sum(a.tokens for a in answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="the folder with crossner, wiki_split, news_summaries"
    )
    parser.add_argument("--quick", action="store_true", help="4 prompts a task instead of 15")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=0, help="default 96; 64 with --quick")
    parser.add_argument("--k", type=int, default=4)
    args = parser.parse_args()
    args.each = 4 if args.quick else 15
    args.tokens = args.tokens or (64 if args.quick else 96)
    torch.set_num_threads(os.cpu_count() or 1)
    tasks, found = asyncio.run(measure(args))

    print(
        f"{'ms a token, whole requests':<28}"
        + "".join(f"{name:>12}" for name in found)
        + f"{'acceptance':>12}"
    )
    table: dict[str, dict[str, float]] = {}
    for task in (*dict.fromkeys(tasks), "all"):
        chosen = [i for i, own in enumerate(tasks) if task in {own, "all"}]
        table[task] = {
            name: per_token([a[i] for i in chosen], lambda t: t.total_s) for name, a in found.items()
        }
        cells = "".join(f"{value:>12.2f}" for value in table[task].values())
        print(f"{task:<28}{cells}{acceptance([found['ngram'][i] for i in chosen]):>12.2f}")
    high = [i for i, answer in enumerate(found["ngram"]) if acceptance([answer]) >= HIGH_ACCEPTANCE]
    plain_s = per_token([found["plain"][i] for i in high], lambda t: t.decode_s)
    ngram_s = per_token([found["ngram"][i] for i in high], lambda t: t.decode_s)
    rival = min(value for name, value in table["all"].items() if name.startswith("lookup"))
    bars: dict[str, dict[str, Any]] = {
        "transformers' lookup over ours, time a token": {
            "value": rival / table["all"]["ngram"], "sign": ">=", "bar": BAR_TRANSFORMERS},
    }  # fmt: skip
    if high:
        name = f"plain over ngram, decoding, {len(high)} prompts with acceptance >= {HIGH_ACCEPTANCE}"
        bars[name] = {"value": plain_s / ngram_s, "sign": ">=", "bar": BAR_PLAIN}
    else:
        print(
            f"no prompt has acceptance >= {HIGH_ACCEPTANCE}: the ratio to plain decoding has nothing to show"
        )
    for text, bar in bars.items():
        print(
            f"{'met ' if bar['value'] >= bar['bar'] else 'MISSED'} {text}: {bar['value']:.2f} (>= {bar['bar']})"
        )
    result = {
        "benchmark": "copying",
        "quick": args.quick,
        "model": args.model,
        "k": args.k,
        "ms_a_token": table,
        "acceptance": acceptance(found["ngram"]),
        "bars": bars,
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
