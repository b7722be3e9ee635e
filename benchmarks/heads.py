"""Would a head on the target's own last hidden state pay as a drafter? Trains one, and works out what it would be worth.

    python -m benchmarks.heads --answers DIR --recorded FILE [--minutes 10] [--texts 3000] [--quick]

The head reads the target's state at the token that gave token t + 1, and the embedding of token t + 1, and guesses t + 2; what
it makes of them stands in for the target's next state when it guesses on (EAGLE, Li et al. 2024, without its attention; Hydra,
Ankner et al. 2024). It starts as the ridge regression of the target's next state and learns the target's distribution over the
likeliest tokens, on its own states from the second guess on. ``--answers``: shards as ``training.generate`` writes them; one prompt
in twenty is held out. ``--recorded``: what ``benchmarks.recorded`` wrote; its Spec-Bench answers at temperature 0 are never trained on.

Two tables. Acceptance by position, at every position of the answers. And speed over plain decoding of the look-ups of the default
cascade with such a head beside them, on paper: steps cost what a quiet machine measured (docs/log.md), a guess of the head costs
0 to 0.5 ms, and the head is asked where the look-ups' first guess is likely less than ``--below``. The same for imagined heads that
are right so and so often, which says what would be needed. The last line is ``RESULT {json}``.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)

from benchmarks.recorded import load_recorded
from paceline.config import DrafterConfig, ModelConfig
from paceline.engine import Segment, load_runner
from paceline.engine.lean_weights import Checkpoint, shape_of
from paceline.engine.weights import open_model
from paceline.lookup import Lookup, build_lookup
from training.answers import is_held_out, read_shard, whole_shards
from training.loss import HeadLoss, targets_of
from training.vocabulary import ranked_vocabulary

DEPTH = 3
STEP_MS = (3.7, 3.7, 4.5, 4.8, 5.2)  # of a step with 1, 2, ... rows: w4a8, two quiet threads, docs/log.md
ROUND_MS = 0.25  # what a round with guesses takes besides
PRICES_MS = (0.0, 0.15, 0.3, 0.5)
IMAGINED = (0.3, 0.4, 0.5, 0.6)
BARS = {"first_position": 0.42}
_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and an answer, and what the target made of it: ``states`` [answer + 1, hidden], from the prompt's last token on."""

    kind: str
    ids: torch.Tensor
    prompt_len: int
    states: torch.Tensor
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    held_out: bool = True

    def rows(self, depth: int) -> torch.Tensor:
        """Rows of ``states`` behind which ``depth`` guesses can be held against the text."""
        return torch.arange(max(len(self.ids) - self.prompt_len - depth, 0))


class Target:
    """The model as it is served, with its last hidden states."""

    def __init__(self, name: str, threads: int) -> None:
        model = ModelConfig(name=name, threads=threads)
        source = open_model(model)
        self.runner = load_runner(model, kv_slots=1, max_context=2048)
        shape, checkpoint = shape_of(source, 2048), Checkpoint(source.directory)
        self.vocab_size = source.config.vocab_size
        self.epsilon = shape.epsilon
        self.eos_token_ids = source.eos_token_ids
        self.norm = checkpoint.final_norm(shape.hidden).float()
        self.embedding = checkpoint.embedding(self.vocab_size, shape.hidden).float()
        self.head = checkpoint.head(shape, self.vocab_size).float()
        self._body = self.runner._body
        self._body._embedding, self._rows = _Kept(self._body._embedding), []

    def states(self, ids: list[int], prompt_len: int) -> torch.Tensor:
        """The last hidden state at the prompt's last token and behind, after the final norm; float16, to save memory."""
        slot, kept = self.runner.kv.acquire(), []
        for start in range(0, len(ids), _CHUNK):
            self.runner.forward([Segment(slot, start, ids[start : start + _CHUNK], 0)])
            kept.append(self._body._embedding.last)
        self.runner.kv.release(slot)
        rows = torch.cat(kept)[prompt_len - 1 :]
        return (unit(rows, self.epsilon) * self.norm).half()


class _Kept:
    """An embedding that remembers the rows it gave: the native kernels compute in place, so these are the last layer's output."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.last = weight[:0]

    def __getitem__(self, ids: list[int]) -> torch.Tensor:
        self.last = self._weight[ids].float()
        return self.last


def unit(x: torch.Tensor, epsilon: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


class Head(torch.nn.Module):
    """(state, token) to the next state; a state to logits over ``vocab_ids``."""

    def __init__(self, target: Target, vocab_ids: torch.Tensor, inner: int) -> None:
        super().__init__()
        size = target.embedding.shape[1]
        self.embedding, self.vocab_ids = target.embedding, vocab_ids
        self.mix = torch.nn.Parameter(torch.zeros(2 * size + 1, size))
        self.gate_up = torch.nn.Parameter(0.02 * torch.randn(size, 2 * inner))
        self.down = torch.nn.Parameter(torch.zeros(inner, size))
        self.norm = torch.nn.Parameter(torch.ones(size))
        self.out = torch.nn.Parameter(target.head[vocab_ids].clone())

    def inputs(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([states, unit(self.embedding[tokens]), torch.ones(len(tokens), 1)], dim=1)

    def forward(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = self.inputs(states, tokens) @ self.mix
        gate, up = (unit(x) @ self.gate_up).chunk(2, dim=1)
        return x + (F.silu(gate) * up) @ self.down

    def ready(self, states: torch.Tensor) -> torch.Tensor:
        """What ``out`` is applied to."""
        return unit(states) * self.norm


@torch.no_grad()
def start(head: Head, texts: Sequence[Text]) -> None:
    """``mix`` by ridge regression on the target's next state, and the scale of the logits that loses least."""
    gram, cross, size = 0.0, 0.0, 0.0
    for text in texts:
        states = text.states.float()
        x = head.inputs(states[:-1], text.ids[text.prompt_len :])
        gram, cross = gram + x.T @ x, cross + x.T @ states[1:]
        size = float(states.square().mean().sqrt())
    head.mix.copy_(torch.linalg.solve(gram + 0.02 * gram.diagonal().mean() * torch.eye(len(gram)), cross))
    head.norm.fill_(0.7 * size)  # 0.7 lost least of 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3


def train(head: Head, texts: Sequence[Text], vocab_size: int, options: argparse.Namespace) -> Iterator[str]:
    """For ``options.minutes`` of processor time; says how it goes. The averaged weights are what is left."""
    index_of = torch.full((vocab_size,), -1)
    index_of[head.vocab_ids] = torch.arange(len(head.vocab_ids))
    matrices = [head.mix, head.gate_up, head.down]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "lr": options.lr, "peak": options.lr, "weight_decay": 0.05},
            {"params": [head.norm], "lr": options.lr, "peak": options.lr, "weight_decay": 0.0},
            {"params": [head.out], "lr": options.lr / 5, "peak": options.lr / 5, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    average = [param.detach().clone() for param in head.parameters()]
    spent, step, recent, order = 0.0, 0, 0.0, []
    while spent < 60 * options.minutes:
        began = time.process_time()
        batch: list[Text] = []
        while sum(len(text.states) for text in batch) < options.rows:
            order = order or torch.randperm(len(texts)).tolist()
            batch.append(texts[order.pop()])
        rate = min(1.0, (step + 1) / 20) * (0.5 + 0.5 * np.cos(np.pi * spent / (60 * options.minutes)))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        loss = _loss(head, batch, index_of)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for kept, param in zip(average, head.parameters(), strict=True):
                kept.lerp_(param, max(1 / 60, 1 / (step + 2)))
        step += 1
        spent += time.process_time() - began
        lost = float(loss.detach())
        recent = lost if step == 1 else 0.95 * recent + 0.05 * lost
        if step % 50 == 0:
            yield f"{spent / 60:.1f} min, step {step}, loss {recent:.3f}"
    with torch.no_grad():
        for kept, param in zip(average, head.parameters(), strict=True):
            param.copy_(kept)
    yield f"{spent / 60:.1f} min, step {step}, loss {recent:.3f}"


def _loss(head: Head, batch: Sequence[Text], index_of: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the target's likeliest tokens, over all guesses; later ones start from the head's own states."""
    rows = [text.rows(DEPTH) for text in batch]
    states = torch.cat([text.states[at] for text, at in zip(batch, rows, strict=True)]).float()
    out, ids, logprobs = [], [], []
    for depth in range(DEPTH):
        tokens = [text.ids[text.prompt_len + depth + at] for text, at in zip(batch, rows, strict=True)]
        states = head(states, torch.cat(tokens))
        out.append(head.ready(states))
        ids += [text.top_ids[at + 1 + depth] for text, at in zip(batch, rows, strict=True)]
        logprobs += [text.top_logprobs[at + 1 + depth] for text, at in zip(batch, rows, strict=True)]
    return HeadLoss.apply(torch.cat(out), head.out, targets_of(ids, logprobs, index_of, 0.1), 0.0)


@dataclass(frozen=True, slots=True)
class Guessed:
    """At every position of one answer, [N, DEPTH]: the guesses, and how likely each is by the head's own word."""

    token_ids: np.ndarray
    chances: np.ndarray
    right: np.ndarray


@torch.no_grad()
def guess(head: Head, text: Text) -> Guessed:
    """Behind every token of the answer."""
    rows = text.rows(1)
    states, tokens = text.states[rows].float(), text.ids[text.prompt_len + rows]
    beyond = torch.cat([text.ids, torch.full((DEPTH,), -1)])
    found = []
    for depth in range(DEPTH):
        states = head(states, tokens)
        top = (head.ready(states) @ head.out.T).softmax(-1).max(-1)
        tokens = head.vocab_ids[top.indices]
        found.append((tokens, top.values, tokens == beyond[text.prompt_len + 1 + depth + rows]))
    return Guessed(*(torch.stack(part, 1).numpy() for part in zip(*found, strict=True)))


def acceptance(guessed: Sequence[tuple[Text, Guessed]]) -> dict[str, list[float]]:
    """By kind of text: share right at each position where all before it were right, and tokens a round of DEPTH guesses."""
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(DEPTH + 2))
    for text, one in guessed:
        kept = np.cumprod(one.right, axis=1)
        at = rounds = 0
        while at < len(kept):
            at, rounds = at + int(kept[at].sum()) + 1, rounds + 1
        sums[text.kind] += [len(kept), *kept.sum(0), rounds]
    return {
        kind: [*np.round(s[1:-1] / np.maximum(s[:-2], 1), 3).tolist(), round(s[0] / s[-1], 3)]
        for kind, s in sorted(sums.items())
    }


def calibration(guessed: Sequence[tuple[Text, Guessed]]) -> list[tuple[float, float, int]]:
    """First guesses by their chance: mean chance, share right, how many."""
    chances = np.concatenate([one.chances[:, 0] for _, one in guessed])
    right = np.concatenate([one.right[:, 0] for _, one in guessed])
    bins = [(chances >= low) & (chances < low + 0.2) for low in (0.0, 0.2, 0.4, 0.6, 0.8)]
    return [
        (round(float(chances[b].mean()), 3), round(float(right[b].mean()), 3), int(b.sum()))
        for b in bins
        if b.any()
    ]


def worth(
    guessed: Sequence[tuple[Text, Guessed]], lookups: Sequence[Lookup], price_ms: float, below: float
) -> tuple[float, float]:
    """(speed over plain, tokens a round), means over the kinds; the head is asked where look-ups are weaker than ``below``."""
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for handle, (text, one) in enumerate(guessed):
        ids, at = text.ids.tolist(), text.prompt_len + 1
        for lookup in lookups:
            lookup.open(handle)
        while at < len(ids):
            block, spent_ms = _block(
                lookups, handle, ids[:at], text, one, min(4, len(ids) - at), price_ms, below
            )
            hits = 0
            while hits < len(block) and block[hits] == ids[at + hits]:
                hits += 1
            made = min(hits + 1, len(ids) - at)
            sums[text.kind] += [made, spent_ms + STEP_MS[len(block)] + ROUND_MS, 1]
            at += made
        for lookup in lookups:
            lookup.close(handle)
    ratios = [s[0] * STEP_MS[0] / s[1] for s in sums.values()]
    return float(np.mean(ratios)), float(np.mean([s[0] / s[2] for s in sums.values()]))


def imagined(text: Text, share: float, rng: np.random.Generator) -> Guessed:
    """What a head might say that is right so often and knows how sure it may be (chances spread as a language model's do)."""
    chances = rng.beta(0.8 * share, 0.8 * (1 - share), (len(text.rows(1)), DEPTH)).clip(0.01, 0.99)
    beyond = torch.cat([text.ids, torch.full((DEPTH,), -1)]).numpy()
    truth = np.lib.stride_tricks.sliding_window_view(beyond[text.prompt_len + 1 :], DEPTH)[: len(chances)]
    right = rng.random(chances.shape) < chances
    return Guessed(np.where(right, truth, -2), chances, right)


_RATE = 1.3 / STEP_MS[0]  # tokens that a millisecond is worth, about what is measured


def _block(lookups, handle, so_far, text, one, k, price_ms, below) -> tuple[list[int], float]:
    """What a round verifies, and the head's time."""
    found = [lookup.guess(handle, so_far, prompt_len=text.prompt_len, scope="", k=k) for lookup in lookups]
    best = max(found, key=lambda weighed: sum(weighed.probabilities))
    tokens, chances, spent_ms = best.token_ids, best.probabilities, 0.0
    row = len(so_far) - 1 - text.prompt_len
    if (not chances or chances[0] < below) and row < len(one.right):
        own = np.cumprod(one.chances[row])[:k]
        num = 1
        while num < len(own) and own[num] > _RATE * (price_ms + STEP_MS[num + 1] - STEP_MS[num]):
            num += 1
        spent_ms = num * price_ms
        if own[:num].sum() > sum(chances):
            tokens, chances = one.token_ids[row][:num].tolist(), own[:num].tolist()
    gains = np.cumsum(chances) - _RATE * (np.array(STEP_MS[1 : len(chances) + 1]) - STEP_MS[0])
    best_num = int(np.argmax(gains)) + 1 if len(chances) and gains.max() > 0 else 0
    return list(tokens[:best_num]), spent_ms


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="directories of shards")
    parser.add_argument("--recorded", type=Path, required=True, help="file of benchmarks.recorded")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--texts", type=int, default=3000, help="answers to train on")
    parser.add_argument("--minutes", type=float, default=10, help="processor time of training")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--inner", type=int, default=1536)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=512, help="positions a step")
    parser.add_argument("--below", type=float, nargs="+", default=[0.35, 0.5, 1.1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few texts, half a minute of training")
    options = parser.parse_args()
    if options.quick:
        options.texts, options.minutes = 60, 0.5
    torch.manual_seed(0)
    print("RESULT " + json.dumps(_run(options)))


def _run(options: argparse.Namespace) -> dict:
    target = Target(options.target, options.threads)
    answers = [
        one for folder in options.answers for shard in whole_shards(folder) for one in read_shard(shard)
    ]
    known = [answer for answer in answers if not is_held_out(answer, 20)]
    vocab_ids = ranked_vocabulary(known, target.vocab_size, options.vocab, target.eos_token_ids)
    texts = [
        Text(
            answer.task,
            torch.from_numpy(answer.ids),
            answer.prompt_len,
            target.states(answer.ids.tolist(), answer.prompt_len),
            torch.from_numpy(answer.top_ids),
            torch.from_numpy(answer.top_logprobs),
        )
        for answer in known[: options.texts]
        if answer.num_answer > DEPTH and len(answer.ids) < target.runner.info.max_context
    ]
    positions = sum(len(text.states) - 1 for text in texts)
    print(f"{len(texts)} texts, {positions} positions", flush=True)
    head = Head(target, vocab_ids, options.inner)
    start(head, texts)
    for line in train(head, texts, target.vocab_size, options):
        print(line, flush=True)
    asked, counts = [], defaultdict(int)
    for one in load_recorded(options.recorded):
        ids = one.prompt_ids + one.output_ids
        if one.mix != "spec_bench" or one.temperature or len(one.output_ids) < 2 or len(ids) > 2048:
            continue
        counts[one.category] += 1
        if not options.quick or counts[one.category] <= 2:
            states = target.states(ids, len(one.prompt_ids))
            asked.append(Text(one.category, torch.tensor(ids), len(one.prompt_ids), states))
    guessed = [(text, guess(head, text)) for text in asked]
    by_kind = acceptance(guessed)
    for kind, figures in by_kind.items():
        print(f"{kind:16} positions {figures[:-1]}, tokens a round {figures[-1]}")
    first = float(np.mean([figures[0] for figures in by_kind.values()]))
    fingerprint = target.runner.info.tokenizer_fingerprint

    def lookups() -> list[Lookup]:
        return [
            build_lookup(kind, DrafterConfig(kind=kind), fingerprint, target.vocab_size)
            for kind in ("suffix", "backoff")
        ]

    alone = worth(guessed, lookups(), 0.0, 0.0)
    print(f"look-ups: {alone[0]:.3f} x plain, {alone[1]:.2f} tokens a round")
    table = []
    for price_ms in PRICES_MS:
        for below in options.below:
            ratio, length = worth(guessed, lookups(), price_ms, below)
            table.append(
                {
                    "guess_ms": price_ms,
                    "below": below,
                    "ratio": round(ratio, 3),
                    "accepted_length": round(length, 3),
                }
            )
            print(
                f"with the head, {price_ms} ms a guess, below {below}: {ratio:.3f} x plain, {length:.2f} tokens a round"
            )
    needed = []
    for share in IMAGINED:
        rng = np.random.default_rng(0)
        made_up = [(text, imagined(text, share, rng)) for text in asked]
        for price_ms in PRICES_MS[1:]:
            ratio, _ = worth(made_up, lookups(), price_ms, options.below[-1])
            needed.append({"right": share, "guess_ms": price_ms, "ratio": round(ratio, 3)})
            print(f"a head that is right {share:.0%} of the time, {price_ms} ms a guess: {ratio:.3f} x plain")
    return {
        "benchmark": "heads",
        "texts": len(texts),
        "positions": positions,
        "first_position": round(first, 3),
        "accepted_length": round(float(np.mean([figures[-1] for figures in by_kind.values()])), 3),
        "by_category": by_kind,
        "calibration": calibration(guessed),
        "lookups": {"ratio": round(alone[0], 3), "accepted_length": round(alone[1], 3)},
        "with_head": table,
        "imagined": needed,
        "bars": BARS,
    }


if __name__ == "__main__":
    main()
