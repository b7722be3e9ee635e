"""Trains a drafter on a target's answers: ``python -m training.distill --target smollm2 --answers DIR --run DIR``.

Everything lives in the run's directory: ``checkpoint.pt`` (resumed when it is there), ``curve.jsonl`` (one line an
evaluation), ``best.pt`` (the averaged weights that accepted most). SIGTERM writes a checkpoint and ends.
A number of minutes written to ``minutes`` moves the end of the schedule while it runs.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config import ModelConfig
from paceline.engine.lean_weights import Checkpoint, Shape, shape_of
from paceline.engine.rope import rope_table
from paceline.engine.weights import ModelSource, open_model
from paceline.errors import ConfigError
from training.acceptance import Acceptance
from training.answers import Answer, is_held_out, read_shard, whole_shards
from training.drafter_model import Batch, DrafterModel, Rows
from training.loss import HeadLoss, Targets, targets_of
from training.optimizer import Average, make_optimizer, restore, set_rates
from training.start import fit_head
from training.vocabulary import ranked_vocabulary

_LONGEST = 520


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    options = _options(argv)
    torch.manual_seed(options.seed)
    run = Run(options)
    signal.signal(signal.SIGTERM, run.ask_to_stop)
    signal.signal(signal.SIGINT, run.ask_to_stop)
    run.train()


def _options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training.distill", description=__doc__)
    parser.add_argument("--target", required=True, help="registry name, directory or hub id")
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="directories of shards")
    parser.add_argument("--run", type=Path, required=True, help="directory of checkpoints and the curve")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", default="first-last", help="indices of the target's layers to start from")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens that the head knows")
    parser.add_argument("--minutes", type=float, default=110, help="training time, evaluation left out")
    parser.add_argument(
        "--steps", type=int, default=0, help="length of the schedule in steps, instead of minutes"
    )
    parser.add_argument(
        "--eval-steps", type=int, default=0, help="steps between evaluations, instead of minutes"
    )
    parser.add_argument(
        "--decay-share", type=float, default=0.3, help="last part of it in which the rate falls"
    )
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--head-lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.1, help="of what each half of a layer adds")
    parser.add_argument("--decay", type=float, default=0.05, help="weight decay of matrices")
    parser.add_argument("--warmup", type=int, default=30, help="steps until the full rate")
    parser.add_argument("--hard", type=float, default=0.1, help="share of the likeliest token in the loss")
    parser.add_argument("--tv", type=float, default=0.0, help="share of total variation while the rate falls")
    parser.add_argument("--average", type=float, default=50, help="horizon of the averaged weights in steps")
    parser.add_argument("--eval-minutes", type=float, default=4)
    parser.add_argument("--held-out-every", type=int, default=20)
    parser.add_argument(
        "--patience", type=int, default=0, help="evaluations without a better one; 0: never stop"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch and what the target says."""

    batch: Batch
    targets: Targets


class Run:
    """One training run and its directory."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.directory: Path = options.run
        self.directory.mkdir(parents=True, exist_ok=True)
        self.device = torch.device(options.device)
        self.train_answers: list[Answer] = []
        self.held_out: list[Answer] = []
        self.seen_shards: set[Path] = set()
        self.take_new_shards()
        self._check_answers()
        self.stopping = False
        self.elapsed_s = 0.0
        self.step = 0
        self.epoch = 0
        self.best = 0.0
        self.since_best = 0
        saved_at = self.directory / "checkpoint.pt"
        saved = (
            torch.load(saved_at, weights_only=True, map_location=self.device) if saved_at.is_file() else None
        )
        self.model, self.index_of = self._model(saved)
        self.optimizer = make_optimizer(
            self.model, lr=options.lr, head_lr=options.head_lr, decay=options.decay
        )
        for layer in self.model.layers:
            layer.dropout = options.dropout
        self.average = Average(self.model, options.average)
        if saved:
            self._resume(saved)

    def ask_to_stop(self, *_: Any) -> None:
        """Stop after the present step."""
        self.stopping = True

    def take_new_shards(self) -> None:
        """Read shards that have appeared."""
        for directory in self.options.answers:
            for path in whole_shards(directory):
                if path in self.seen_shards:
                    continue
                self.seen_shards.add(path)
                for whole in read_shard(path):
                    answer = whole.cut(_LONGEST)
                    if answer is None:
                        continue
                    held = is_held_out(answer, self.options.held_out_every)
                    (self.held_out if held else self.train_answers).append(answer)

    def _check_answers(self) -> None:
        """An epoch of no answers never ends, and a run without held-out ones never has a best one to export."""
        found = f"{len(self.train_answers)} answers to train on and {len(self.held_out)} held out"
        if not self.train_answers or not self.held_out:
            where = ", ".join(map(str, self.options.answers))
            raise ConfigError(
                f"--answers {where}: {found}; some of both are needed. training.generate writes answers, "
                f"--held-out-every {self.options.held_out_every} parts them by prompt"
            )

    def train(self) -> None:
        """Until the time is over, patience ends or somebody asks."""
        marked = self.elapsed_s
        recent, tokens, since = 0.0, 0, 0.0
        while not self.stopping:
            self.take_new_shards()
            for prepared in self._batches():
                began = time.perf_counter()
                share = self._progress()
                loss = self._step(prepared, share)
                self.elapsed_s += time.perf_counter() - began
                recent = loss if recent == 0 else 0.98 * recent + 0.02 * loss
                tokens += len(prepared.batch.answers.ids)
                since += time.perf_counter() - began
                self._bar(share, recent, tokens / since)
                if share >= 1:
                    self.stopping = True
                if self._is_time_to_look(marked) or self.stopping:
                    marked = self.elapsed_s
                    self.evaluate(recent, tokens / since)
                    tokens, since = 0, 0.0
                    self.save()
                if self.stopping:
                    break
            self.epoch += 1

    def _step(self, prepared: Prepared, share: float) -> float:
        decay = self.options.decay_share
        rate = min(1.0, (self.step + 1) / self.options.warmup)
        tv = 0.0
        if share > 1 - decay:
            rate *= max((1 - share) / decay, 0.02)
            tv = self.options.tv
        set_rates(self.optimizer.param_groups, rate)
        hidden = self.model(prepared.batch)
        loss = HeadLoss.apply(hidden, self.model.head, prepared.targets, tv)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update(self.model)
        self.step += 1
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self, train_loss: float, tokens_per_s: float = 0.0) -> None:
        """Acceptance of the averaged weights on the split that is not trained on."""
        own = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        self.model.load_state_dict(self.average.weights, strict=False)
        self.model.eval()
        greedy, sampled, loss, count = Acceptance(), Acceptance(), 0.0, 0.0
        tasks: dict[str, Acceptance] = {}
        for answers in _groups(self.held_out, self.options.batch_tokens):
            prepared = self.prepared(answers)
            hidden = self.model(prepared.batch)
            weight = float(prepared.targets.weight.sum())
            loss += float(HeadLoss.apply(hidden, self.model.head, prepared.targets, 0.0)) * weight
            count += weight
            guesses = self.model.vocab_ids[(hidden @ self.model.head.T).argmax(1)].cpu()
            at = 0
            for answer in answers:
                first = torch.from_numpy(answer.top_ids[:, 0])
                agreement = (guesses[at : at + len(first)] == first).tolist()
                at += len(first)
                if answer.temperature == 0:
                    greedy.add(agreement)
                    tasks.setdefault(answer.task, Acceptance()).add(agreement)
                else:
                    sampled.add(agreement)
        line = {
            "step": self.step,
            "minutes": round(self.elapsed_s / 60, 2),
            "epoch": self.epoch,
            "answers": len(self.train_answers),
            "answer_tokens": sum(answer.num_answer for answer in self.train_answers),
            "tokens_per_s": round(tokens_per_s),
            "train_loss": round(train_loss, 4),
            "loss": round(loss / max(count, 1), 4),
            "agreement": round(greedy.agreement, 4),
            "agreement_sampled": round(sampled.agreement, 4),
            "by_position": [round(x, 3) for x in greedy.by_position],
            "mean_length": round(greedy.mean_length, 3),
            "by_task": {task: round(found.mean_length, 2) for task, found in sorted(tasks.items())},
        }
        with (self.directory / "curve.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print("\n" + json.dumps(line), file=sys.stderr, flush=True)
        self.since_best += 1
        if greedy.mean_length > self.best:
            self.best, self.since_best = greedy.mean_length, 0
            _write(self.directory / "best.pt", self._described(self.average.weights, line))
        if self.options.patience and self.since_best >= self.options.patience:
            self.stopping = True
        self.model.load_state_dict(own, strict=False)
        self.model.train()

    def save(self) -> None:
        """A checkpoint to go on from."""
        state = self._described({n: p.detach() for n, p in self.model.named_parameters()}, {})
        state |= {
            "average": self.average.weights,
            "average_steps": self.average.steps,
            "optimizer": self.optimizer.state_dict(),
            "elapsed_s": self.elapsed_s,
            "step": self.step,
            "epoch": self.epoch,
            "best": self.best,
        }
        _write(self.directory / "checkpoint.pt", state)

    def _described(self, weights: dict[str, torch.Tensor], line: dict[str, Any]) -> dict[str, Any]:
        return {
            "target": self.options.target,
            "layers": self.model.shape.layers,
            "vocab_ids": self.model.vocab_ids,
            "weights": weights,
            "line": json.dumps(line),
        }

    def _resume(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["weights"], strict=False)
        self.average.weights, self.average.steps = saved["average"], saved["average_steps"]
        restore(self.optimizer, saved["optimizer"])
        self.elapsed_s, self.step, self.epoch = saved["elapsed_s"], saved["step"], saved["epoch"]
        self.best = saved["best"]

    def _model(self, saved: dict[str, Any] | None) -> tuple[DrafterModel, torch.Tensor]:
        source = open_model(ModelConfig(name=self.options.target, device="cpu", dtype="float32"))
        size = source.config.vocab_size
        ids = (
            saved["vocab_ids"].cpu()
            if saved
            else ranked_vocabulary(self.train_answers, size, self.options.vocab, source.eos_token_ids)
        )
        model = new_model(source, self.options.layers, ids, self.device)
        index_of = torch.full((size,), -1, dtype=torch.long)
        index_of[ids] = torch.arange(len(ids))
        self.index_of = index_of
        if not saved:
            fit_head(model, [self.prepared(group) for group in _groups(self.train_answers[:120], 4096)])
        return model, index_of

    def prepared(self, answers: Sequence[Answer]) -> Prepared:
        """One packed batch."""
        device = self.device
        before = [answer.prompt_len - 1 for answer in answers]
        counts = [answer.num_answer for answer in answers]

        def rows(parts: list[tuple[int, int]]) -> Rows:
            ids = [torch.from_numpy(answer.ids[a:b]) for answer, (a, b) in zip(answers, parts, strict=True)]
            positions = [torch.arange(a, b) for a, b in parts]
            return Rows(torch.cat(ids).to(device), torch.cat(positions).to(device), [b - a for a, b in parts])

        context = rows([(0, num) for num in before])
        asked = rows([(num, num + count) for num, count in zip(before, counts, strict=True)])
        batch = Batch(context, asked)
        targets = targets_of(
            [torch.from_numpy(answer.top_ids) for answer in answers],
            [torch.from_numpy(answer.top_logprobs) for answer in answers],
            self.index_of,
            self.options.hard,
        )
        moved = Targets(targets.index.to(device), targets.probs.to(device), targets.weight.to(device))
        return Prepared(batch, moved)

    def _batches(self) -> Iterator[Prepared]:
        order = torch.randperm(
            len(self.train_answers), generator=torch.Generator().manual_seed(self.epoch + 1000 * self.step)
        )
        shuffled = [self.train_answers[i] for i in order.tolist()]
        for group in _groups(shuffled, self.options.batch_tokens):
            yield self.prepared(group)

    def _progress(self) -> float:
        """Share of the schedule that is behind."""
        if self.options.steps:
            return min((self.step + 1) / int(self.options.steps), 1.0)
        asked = self.directory / "minutes"
        minutes: float = self.options.minutes
        if asked.is_file():
            minutes = float(asked.read_text(encoding="utf-8") or minutes)
        return min(self.elapsed_s / (60 * minutes), 1.0)

    def _is_time_to_look(self, marked_s: float) -> bool:
        if self.options.eval_steps:
            return self.step % int(self.options.eval_steps) == 0
        return self.elapsed_s - marked_s > 60 * float(self.options.eval_minutes)

    def _bar(self, share: float, loss: float, speed: float) -> None:
        if sys.stderr.isatty() or self.step % 50 == 0:
            full = int(30 * share)
            print(
                f"\r[{'#' * full}{'.' * (30 - full)}] {share:4.0%} step {self.step} loss {loss:.3f} "
                f"{speed:.0f} answer tok/s best length {self.best:.3f}",
                end="" if sys.stderr.isatty() else "\n",
                file=sys.stderr,
                flush=True,
            )


def new_model(source: ModelSource, layers: str, ids: torch.Tensor, device: torch.device) -> DrafterModel:
    """A drafter of ``source`` that starts from its layers ``layers`` ("first-last" or indices with commas)."""
    shape = shape_of(source, source.capacity(2048))
    last = shape.layers - 1
    chosen = [0, last] if layers == "first-last" else [int(part) for part in layers.split(",")]
    checkpoint = Checkpoint(source.directory)
    weights = next(iter(checkpoint.layers(shape)))
    own = Shape(
        shape.family,
        len(chosen),
        shape.hidden,
        shape.intermediate,
        shape.heads,
        shape.kv_heads,
        shape.head_size,
        shape.epsilon,
        tied=False,
    )
    size = source.config.vocab_size
    model = DrafterModel(
        own,
        checkpoint.embedding(size, shape.hidden),
        ids,
        rope_table(source.config, shape.head_size, source.capacity(2048)),
        bias=weights.query.bias is not None,
        head_norms=weights.query_norm is not None,
    )
    model.load_layers(checkpoint, shape, chosen)
    with torch.no_grad():
        model.final_norm.copy_(checkpoint.final_norm(shape.hidden))
        model.head.copy_(checkpoint.head(shape, size)[ids])
    return model.to(device)


def _groups(answers: Sequence[Answer], tokens: int) -> Iterator[list[Answer]]:
    """Answers in order, in groups of about ``tokens`` tokens."""
    group: list[Answer] = []
    size = 0
    for answer in answers:
        if group and size + len(answer.ids) > tokens:
            yield group
            group, size = [], 0
        group.append(answer)
        size += len(answer.ids)
    if group:
        yield group


def _write(path: Path, state: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.rename(path)


if __name__ == "__main__":
    main()
