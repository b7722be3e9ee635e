"""Is the output the same with and without speculation? Token by token, over a running router.

    python -m evaluation.same_output --address 127.0.0.1:7440 --prompts question.jsonl

Every prompt is decoded plainly at each temperature, then with each drafter and block length; token ids are compared.
The first divergence of a request, if any, is listed with the gap between the two likeliest choices at that position
(logits at temperature 0, perturbed log-probabilities else), recomputed from the model: a gap at the size of rounding
says that two choices were as good as equal, a larger one that something is wrong.

The last line is ``RESULT {json}``; the exit status is 0 iff every divergence stays below the gap bound.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from evaluation.workload import Prompt, load_spec_bench
from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.config import ModelConfig
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer
from paceline.types import Law, Mode, SamplingParams, SpeculativeStats

GAP_BOUND = 1e-4


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to decode."""

    temperature: float
    drafter: str = ""
    k: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    token_ids: tuple[int, ...]
    finish: str
    stats: SpeculativeStats


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer first differs from the plain one."""

    prompt: Prompt
    setting: Setting
    position: int
    plain_token: int | None
    token: int | None
    gap: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a setting over all prompts."""

    temperature: float
    drafter: str
    k: int
    requests: int
    equal: int
    tokens: int
    rounds: int
    spec_rounds: int
    drafted: int
    accepted: int
    late: int
    seconds: float


async def decode(client: Client, prompt: Prompt, setting: Setting, max_tokens: int) -> Answer:
    """One request. The seed follows from the prompt alone, so that all settings share it."""
    request = generate_request(
        messages=[("user", prompt.text)],
        temperature=setting.temperature,
        seed=int(prompt.id),
        max_tokens=max_tokens,
        mode=Mode.SPECULATIVE if setting.drafter else Mode.PLAIN,
        drafter=setting.drafter or None,
        k=setting.k or None,
        law=Law.COUPLED if setting.drafter else None,  # the others promise the distribution, not the tokens
    )
    ids: list[int] = []
    answer: Answer | None = None
    async for event in client.generate(request):
        match event:
            case Chunk():
                ids.extend(event.token_ids)
            case Finished():
                answer = Answer(tuple(ids), event.finish_reason.value, event.speculative)
            case Started():
                pass
    assert answer is not None, "the client raises when no answer comes"
    return answer


async def decode_all(
    client: Client, prompts: Sequence[Prompt], setting: Setting, max_tokens: int, streams: int
) -> list[Answer]:
    """All prompts, so many at a time."""
    gate = asyncio.Semaphore(streams)

    async def one(prompt: Prompt) -> Answer:
        async with gate:
            return await decode(client, prompt, setting, max_tokens)

    return list(await asyncio.gather(*map(one, prompts)))


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, the end of the shorter one included; None: equal."""
    for index, (a, b) in enumerate(itertools.zip_longest(plain, other)):
        if a != b:
            return index
    return None


async def compare(args: argparse.Namespace) -> int:
    """Run everything, print the table, return the exit status."""
    prompts = load_spec_bench(args.prompts, args.per_category)
    divergences: list[Divergence] = []
    rows: list[Row] = []
    async with Client(args.address) as client:
        info = await client.server_info()
        print(
            f"{info.model.name} {info.model.dtype}, {info.model.runner} runner, numerics {info.model.numerics}; "
            f"{len(prompts)} prompts x {args.max_tokens} tokens, {args.streams} streams"
        )
        for temperature in args.temperatures:
            plain = await decode_all(client, prompts, Setting(temperature), args.max_tokens, args.streams)
            for drafter, k in itertools.product(args.drafters, args.ks):
                setting = Setting(temperature, drafter, k)
                began = time.monotonic()
                answers = await decode_all(client, prompts, setting, args.max_tokens, args.streams)
                found = [
                    Divergence(prompt, setting, at, _at(a.token_ids, at), _at(b.token_ids, at), float("nan"))
                    for prompt, a, b in zip(prompts, plain, answers, strict=True)
                    if (at := first_difference(a.token_ids, b.token_ids)) is not None
                ]
                divergences += [
                    _with_gap(d, plain[prompts.index(d.prompt)], args.model) if args.model else d
                    for d in found
                ]
                rows.append(_row(setting, answers, len(found), time.monotonic() - began))
                print(_line(rows[-1]), flush=True)
    for d in divergences:
        print(
            f"divergence: prompt {d.prompt.id} ({d.prompt.category}) T={d.setting.temperature} "
            f"{d.setting.drafter} k={d.setting.k} at {d.position}: plain {d.plain_token}, got {d.token}, gap {d.gap:.2e}"
        )
    bad = [d for d in divergences if not d.gap < GAP_BOUND]
    result = {
        "benchmark": "same_output",
        "requests": sum(row.requests for row in rows),
        "equal": sum(row.equal for row in rows),
        "divergences": len(divergences),
        "divergences_above_gap": len(bad),
        "bar": {"divergences_above_gap": 0},
        "rows": [asdict(row) for row in rows],
    }
    print("RESULT " + json.dumps(result))
    return 1 if bad else 0


def _row(setting: Setting, answers: Sequence[Answer], differing: int, seconds: float) -> Row:
    return Row(
        temperature=setting.temperature,
        drafter=setting.drafter,
        k=setting.k,
        requests=len(answers),
        equal=len(answers) - differing,
        tokens=sum(len(a.token_ids) for a in answers),
        rounds=sum(a.stats.num_rounds for a in answers),
        spec_rounds=sum(a.stats.num_spec_steps for a in answers),
        drafted=sum(a.stats.num_draft_tokens for a in answers),
        accepted=sum(a.stats.num_accepted_draft_tokens for a in answers),
        late=sum(a.stats.num_late_rounds for a in answers),
        seconds=round(seconds, 1),
    )


def _line(row: Row) -> str:
    rate = f"{row.accepted / row.drafted:.3f}" if row.drafted else "-"
    return (
        f"T={row.temperature} {row.drafter:>8} k={row.k}: {row.equal}/{row.requests} equal, "
        f"{row.tokens} tokens in {row.rounds} rounds, drafted {row.drafted}, acceptance {rate}, "
        f"late {row.late}, {row.seconds} s"
    )


def _at(ids: Sequence[int], index: int) -> int | None:
    return ids[index] if index < len(ids) else None


def _with_gap(divergence: Divergence, plain: Answer, model: str) -> Divergence:
    from evaluation.gap import choice_gap

    prompt_ids = Tokenizer.load(resolve_model_dir(model)).encode_chat([("user", divergence.prompt.text)])
    sampling = SamplingParams(temperature=divergence.setting.temperature, seed=int(divergence.prompt.id))
    output = plain.token_ids[: divergence.position]
    gap = choice_gap(ModelConfig(name=model), prompt_ids, output, sampling)
    return replace(divergence, gap=gap)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    address = os.environ.get("PACELINE_ADDRESS", "127.0.0.1:7440")
    parser.add_argument("--address", default=address, help="the router; default: PACELINE_ADDRESS")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench questions, JSONL")
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--drafters", nargs="+", default=["ngram", "model", "random"])
    parser.add_argument("--ks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument(
        "--model", default="smollm2", help="where the gap of a divergence is recomputed; empty: not"
    )
    sys.exit(asyncio.run(compare(parser.parse_args())))


if __name__ == "__main__":
    main()
