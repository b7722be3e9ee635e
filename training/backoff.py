"""Makes a back-off table of a target: ``python -m training.backoff --target smollm2 --answers DIR ... --to models/NAME``.

Counts, over the answers that ``training.generate`` and ``training.read`` stored, what the target thinks comes next after one, two
and three tokens: not the token that came, but the probabilities of its likeliest ones, so a position says more than a
text would. Each order is smoothed towards the one below it (interpolation with a fixed weight, Jelinek and Mercer 1980).
A context that says what the shorter one says already is left out. Held-out prompts are not counted; the card has what
the table guesses on them.
"""

import argparse
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from paceline.lookup.backoff import SETTINGS, WEIGHTS, BackoffTable, check_of, hash_of
from paceline.model_store import resolve_model_dir
from paceline.tokenizer import Tokenizer
from training.acceptance import Acceptance
from training.answers import Answer, is_held_out, read_shard, whole_shards

Context = tuple[int, ...]
_SHORTER = 3.0  # positions that the shorter context's word counts for
_KEPT = 8  # next tokens of a context that its longer ones hear of
_LOAD = 0.7  # of the table's slots


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="training.backoff", description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="directories of shards")
    parser.add_argument("--to", type=Path, required=True, help="directory to write")
    parser.add_argument("--order", type=int, default=3, help="tokens of the longest context")
    parser.add_argument("--top", type=int, default=4, help="likeliest tokens counted at a position")
    parser.add_argument("--least", type=float, default=0.3, help="weight below which a context is left out")
    parser.add_argument("--held-out-every", type=int, default=20, help="as in training")
    options = parser.parse_args(argv)
    counts: list[dict[Context, dict[int, float]]] = [defaultdict(_none) for _ in range(options.order)]
    held_out: list[Answer] = []
    num_tokens = num_answers = 0
    for answer in _all(options.answers):
        if is_held_out(answer, options.held_out_every):
            held_out.append(answer)
            continue
        num_answers += 1
        num_tokens += answer.num_answer
        count(answer, counts, options.top)
    entries = table(counts, options.least)
    tokenizer = Tokenizer.load(resolve_model_dir(options.target))
    about = {
        "target": options.target,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "order": options.order,
        "contexts": len(entries),
        "answers": num_answers,
        "answer_tokens": num_tokens,
    }
    write(options.to, entries, about)
    (options.to / "README.md").write_text(_card(options.to, about, held_out), encoding="utf-8")
    print("RESULT " + json.dumps(about))


def count(answer: Answer, counts: Sequence[dict[Context, dict[int, float]]], top: int) -> None:
    """Add what the target thought at each position of an answer."""
    ids = answer.ids.tolist()
    tokens = answer.top_ids[:, :top].tolist()
    weights = np.exp(answer.top_logprobs[:, :top]).tolist()
    for at, (likeliest, chances) in enumerate(zip(tokens, weights, strict=True), start=answer.prompt_len):
        for length, counted in enumerate(counts, start=1):
            if at >= length:
                nexts = counted[tuple(ids[at - length : at])]
                for token, chance in zip(likeliest, chances, strict=True):
                    nexts[token] += chance


def table(
    counts: Sequence[dict[Context, dict[int, float]]], least: float
) -> dict[Context, tuple[int, float]]:
    """Likeliest next token and its probability by context, contexts that add nothing left out."""
    entries: dict[Context, tuple[int, float]] = {}
    shorter: dict[Context, dict[int, float]] = {}
    for counted in counts:
        smoothed: dict[Context, dict[int, float]] = {}
        for context, nexts in counted.items():
            weight = sum(nexts.values())
            if weight < least:
                continue
            below = shorter.get(context[1:], {})
            of_below = _SHORTER if below else 0.0
            chances = {
                token: (nexts.get(token, 0.0) + of_below * below.get(token, 0.0)) / (weight + of_below)
                for token in {*nexts, *below}
            }
            likeliest = sorted(chances, key=lambda token: (-chances[token], token))[:_KEPT]
            smoothed[context] = {token: chances[token] for token in likeliest}
            best = likeliest[0]
            known = _known(entries, context[1:])
            if known is None or known[0] != best or abs(known[1] - chances[best]) > 0.1:
                entries[context] = (best, chances[best])
        shorter = smoothed
    return entries


def write(directory: Path, entries: dict[Context, tuple[int, float]], about: dict[str, object]) -> None:
    """The directory that serving loads."""
    slots = 1 << max(4, int(np.ceil(np.log2(len(entries) / _LOAD + 1))))
    checks, tokens = np.zeros(slots, "<u4"), np.zeros(slots, "<u4")
    chances = np.zeros(slots, "u1")
    for context, (token, chance) in entries.items():
        key = hash_of(context)
        slot = key & (slots - 1)
        while checks[slot] and checks[slot] != check_of(key):
            slot = (slot + 1) & (slots - 1)
        if checks[slot] and chances[slot] >= 255 * chance:
            continue  # another context of the same check: the surer one stays
        checks[slot], tokens[slot], chances[slot] = check_of(key), token, round(255 * chance)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"checks": checks, "tokens": tokens, "chances": chances}, directory / WEIGHTS)
    digest = hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()[:16]
    text = json.dumps(about | {"version": digest}, indent=1)
    (directory / SETTINGS).write_text(text + "\n", encoding="utf-8")


def _none() -> dict[int, float]:
    return defaultdict(float)


def _known(entries: dict[Context, tuple[int, float]], context: Context) -> tuple[int, float] | None:
    """What the table says after a context, by backing off."""
    while context:
        if context in entries:
            return entries[context]
        context = context[1:]
    return None


def _all(directories: Iterable[Path]) -> Iterable[Answer]:
    for directory in directories:
        for shard in whole_shards(directory):
            yield from read_shard(shard)


def _card(directory: Path, about: dict[str, object], held_out: Sequence[Answer]) -> str:
    found: dict[str, Acceptance] = {}
    known = BackoffTable(directory)
    for answer in held_out:
        if answer.temperature == 0.0 and answer.source != "read":
            ids = answer.ids.tolist()
            right = []
            for at in range(answer.prompt_len + 1, len(ids)):
                guess = known.next(ids[max(0, at - known.order) : at])
                right.append(guess is not None and guess[0] == ids[at])
            found.setdefault(answer.task, Acceptance(k=1)).add(right)
    opening = directory / "about.md"
    size = (directory / WEIGHTS).stat().st_size
    lines = [
        f"# {directory.name}",
        "",
        *(opening.read_text(encoding="utf-8").splitlines() if opening.is_file() else []),
        "",
        f"- target: `{about['target']}`; contexts of 1 to {about['order']} tokens: {about['contexts']}; {size / 1e6:.1f} MB",
        f"- counted on {about['answers']} texts, {about['answer_tokens']} positions with the target's own probabilities",
        "",
        "## Held-out prompts, temperature 0",
        "How often the target says the table's guess next.",
        "",
        "| task | positions | right |",
        "|---|---|---|",
        *(f"| {task} | {one.positions} | {one.agreement:.3f} |" for task, one in sorted(found.items())),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
