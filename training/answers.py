"""Stored answers of a target: token ids and, for each answered position, the target's likeliest tokens.

A shard is a pair of files, ``NAME.npz`` and ``NAME.json``. ``ids`` has all sequences one after the other, prompt first;
the json gives for each sequence its task, source, prompt_len, len and temperature. ``top_ids`` and ``top_logprobs``
[answer tokens, M] are the target's M likeliest tokens and their log-probabilities at temperature 1, in the same order.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt and one answer of the target to it."""

    task: str
    source: str
    temperature: float
    ids: npt.NDArray[np.int64]
    """Prompt and answer."""
    prompt_len: int
    top_ids: npt.NDArray[np.int64]
    """[answer tokens, M]; row i stands for position prompt_len + i."""
    top_logprobs: npt.NDArray[np.float32]
    split_key: str = ""
    """Decides the split where the rows before ``prompt_len`` are not the whole prompt."""

    @property
    def num_answer(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def prompt_key(self) -> str:
        """The same for all answers to one prompt, whatever the shard."""
        return self.split_key or key_of(self.ids[: self.prompt_len])

    def cut(self, longest: int) -> "Answer | None":
        """The answer within ``longest`` tokens, its end cut off; None when less than four tokens would be left."""
        if len(self.ids) <= longest:
            return self if self.num_answer else None
        left = longest - self.prompt_len
        if left < 4:
            return None
        return Answer(
            self.task,
            self.source,
            self.temperature,
            self.ids[:longest],
            self.prompt_len,
            self.top_ids[:left],
            self.top_logprobs[:left],
            self.split_key,
        )


def read_shard(path: Path) -> list[Answer]:
    """The answers of the shard ``path`` (its npz file)."""
    rows: list[dict[str, Any]] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    with np.load(path) as arrays:
        ids, top_ids, logprobs = arrays["ids"], arrays["top_ids"], arrays["top_logprobs"]
    answers, at, top_at = [], 0, 0
    for row in rows:
        length, prompt = row["len"], row["prompt_len"]
        rest = length - prompt
        answers.append(
            Answer(
                row["task"],
                row["source"],
                float(row["temperature"]),
                ids[at : at + length].astype(np.int64),
                prompt,
                top_ids[top_at : top_at + rest].astype(np.int64),
                logprobs[top_at : top_at + rest].astype(np.float32),
                row.get("split_key", ""),
            )
        )
        at, top_at = at + length, top_at + rest
    if at != len(ids) or top_at != len(top_ids):
        raise ValueError(f"{path}: {path.with_suffix('.json').name} describes {at} tokens, found {len(ids)}")
    return answers


def write_shard(path: Path, answers: Sequence[Answer]) -> None:
    """Write the shard ``path`` (an npz file); the json comes last, so a shard with both files is whole."""
    wide = max(int(answer.ids.max()) for answer in answers) > np.iinfo(np.uint16).max
    kind = np.uint32 if wide else np.uint16
    np.savez_compressed(
        path,
        ids=np.concatenate([answer.ids for answer in answers]).astype(kind),
        top_ids=np.concatenate([answer.top_ids for answer in answers]).astype(kind),
        top_logprobs=np.concatenate([answer.top_logprobs for answer in answers]).astype(np.float16),
    )
    rows = [
        {
            "task": answer.task,
            "source": answer.source,
            "prompt_len": answer.prompt_len,
            "len": len(answer.ids),
            "temperature": answer.temperature,
            "split_key": answer.split_key,
        }
        for answer in answers
    ]
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    part.rename(path.with_suffix(".json"))


def key_of(prompt_ids: npt.ArrayLike) -> str:
    """Identity of a prompt."""
    return hashlib.sha256(np.asarray(prompt_ids).astype("<u4").tobytes()).hexdigest()[:16]


def whole_shards(directory: Path) -> list[Path]:
    """The finished shards in ``directory``, in order of name."""
    return sorted(path for path in directory.glob("*.npz") if path.with_suffix(".json").is_file())


def is_held_out(answer: Answer, every: int) -> bool:
    """Whether the prompt belongs to the split that is never trained on: one of ``every``, by hash of the prompt."""
    return is_held_out_key(answer.prompt_key, every)


def is_held_out_key(key: str, every: int) -> bool:
    """The same for a prompt's key."""
    return int(key, 16) % every == 0
