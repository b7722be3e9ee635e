"""Trains the router's task classifier, and says how good it is where it matters: on sources it has never seen.

    python -m training.task_type --data ../shared/data/task_classification --report

A score on held-out rows of the same sources flatters, because a source words its instruction in one or two ways. So every
source is left out in turn, with the material taken from it, and predicted by a model trained on the rest. The temperature
is fitted on those predictions. Wants scikit-learn (a development dependency); the artifact wants numpy alone.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from router.task_features import (
    EDGE_SCALE,
    GRAM_SCALE,
    NUM_DENSE,
    NUM_HASHED,
    SHAPE_NAMES,
    Features,
    features,
    values,
)
from router.task_type import MODEL_PATH, TASK_TYPES, TaskModel, softmax
from training.task_templates import Material, made_up

PER_TASK, PER_TASK_CHINESE = 160, 120
_TASK_NUMBER = {task: number for number, task in enumerate(TASK_TYPES)}
_NO_MATERIAL = frozenset(
    ("humaneval", "mbpp", "sql_eval", "jsonschemabench", "bfcl_multiple", "bfcl_simple_python", "gsm8k_train", "aqua_dev", "nq_open", "arena_hard_v2")
)  # fmt: skip
"""Sources whose prompts are all instruction: nothing in them is a text that another instruction could be about."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Names = NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class Rows:
    """Prompts and what is known of them; N of them. ``X`` is a sparse [N, NUM_HASHED + NUM_DENSE] matrix."""

    X: Any
    tasks: Ints
    sources: Names
    """A model that may not know a source may not know rows of it, or rows made with its material."""
    origins: Names
    """The source again, "made up" for rows of ours: what weights are balanced over."""
    languages: Names


def family(source: str) -> str:
    """Sources that word alike or come from one data set: a stricter thing to leave out."""
    for prefix in (
        "t0_paws",
        "t0_dbpedia",
        "t0_cnn",
        "t0_wiki_bio",
        "t0_duorc",
        "t0_adversarial_qa",
        "bfcl",
        "oasst",
    ):
        if source.startswith(prefix):
            return prefix
    return source


def read(path: Path) -> list[dict[str, Any]]:
    """One dictionary a line."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def materials(rows: Sequence[Mapping[str, Any]]) -> list[Material]:
    """Texts of the collected prompts that any instruction could be about: the longest line, without what leads to it."""
    found = []
    for row in rows:
        if row["lang"] not in ("en", "zh") or row["source"] in _NO_MATERIAL:
            continue
        line = max(row["text"].split("\n"), key=len).strip()
        for mark in (": ", "：", ":"):
            before, _, behind = line.partition(mark)
            if behind and len(before) < 90 and len(behind) > 0.4 * len(line):
                line = behind.strip()
                break
        chinese = row["lang"] == "zh"
        if len(line) >= (12 if chinese else 40) and not {"?", "？"} & set(line[-3:]):
            found.append(Material(line[:900], row["source"], row["lang"]))
    return found


def matrix(found: Sequence[Features]) -> Any:
    """[N, NUM_HASHED + NUM_DENSE], float32."""
    indices, weights, starts = [], [], [0]
    for one in found:
        for part, scale in ((one.grams, GRAM_SCALE), (one.edges, EDGE_SCALE)):
            indices.append(part)
            weights.append(np.full(len(part), values(part, scale), dtype=np.float32))
        starts.append(starts[-1] + len(one.grams) + len(one.edges))
    hashed = sparse.csr_matrix(
        (np.concatenate(weights), np.concatenate(indices), starts), shape=(len(found), NUM_HASHED)
    )
    hashed.sum_duplicates()
    dense = sparse.csr_matrix(np.stack([one.dense for one in found]))
    return sparse.hstack([hashed, dense], format="csr").astype(np.float32)


def collected(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Prompts as they were collected."""
    sources = np.array([row["source"] for row in rows])
    return Rows(
        matrix([features(row["text"]) for row in rows]),
        np.array([_TASK_NUMBER[row["task"]] for row in rows]),
        sources,
        sources,
        np.array([row["lang"] for row in rows]),
    )


def invented(rows: Sequence[Mapping[str, Any]]) -> Rows:
    """Prompts of ours, mostly about material from ``rows``."""
    made = made_up(PER_TASK, PER_TASK_CHINESE, materials(rows))
    return Rows(
        matrix([features(one.text) for one in made]),
        np.array([_TASK_NUMBER[one.task] for one in made]),
        np.array([one.source for one in made]),
        np.array(["made up"] * len(made)),
        np.array([one.language for one in made]),
    )


def joined(a: Rows, b: Rows) -> Rows:
    """Both."""
    return Rows(
        sparse.vstack([a.X, b.X], format="csr"),
        *(
            np.concatenate([getattr(a, n), getattr(b, n)])
            for n in ("tasks", "sources", "origins", "languages")
        ),
    )


def balance(tasks: Ints, origins: Names) -> Floats:
    """Weights of mean 1: a big source speaks less loudly than its rows are many, and so does a big task."""
    of_pair, of_task = Counter(zip(origins, tasks, strict=True)), Counter(tasks)
    weights = np.array(
        [of_pair[pair] ** -0.5 * of_task[pair[1]] ** -0.25 for pair in zip(origins, tasks, strict=True)]
    )
    result: Floats = weights / weights.mean()
    return result


def fit(rows: Rows, chosen: NDArray[np.bool_]) -> Any:
    """Logistic regression on the chosen rows."""
    model = LogisticRegression(C=10, max_iter=100, tol=1e-4)
    tasks, origins = rows.tasks[chosen], rows.origins[chosen]
    return model.fit(rows.X[chosen], tasks, sample_weight=balance(tasks, origins))


def scores(model: Any, rows: Any) -> Floats:
    """[N, T]; minus infinity for a task that the model never saw."""
    result = np.full((rows.shape[0], len(TASK_TYPES)), -np.inf)
    result[:, model.classes_] = model.decision_function(rows)
    return result


def left_out(known: Rows, training: Rows, key: Callable[[str], str]) -> Floats:
    """[N, T] scores of ``known``: each group of sources by a model that has not seen it."""
    result = np.zeros((len(known.tasks), len(TASK_TYPES)))
    groups = np.array([key(source) for source in known.sources])
    of_training = np.array([key(source) for source in training.sources])
    for group in sorted(set(groups)):
        model = fit(training, of_training != group)
        result[groups == group] = scores(model, known.X[groups == group])
        print(f"  without {group}: {_right(result, known, groups == group):.2f}", flush=True)
    return result


def temperature(found: Floats, tasks: Ints, sources: Names) -> float:
    """That of the least log loss where every source counts the same: big ones are templates, and easy."""
    grid = np.geomspace(0.3, 6.0, 90)
    rows, counts = np.arange(len(tasks)), Counter(sources)
    weights = np.array([1 / counts[source] for source in sources])
    losses = [
        -(weights * np.log(np.maximum(softmax(found / t)[rows, tasks], 1e-9))).sum() / weights.sum()
        for t in grid
    ]
    return float(grid[int(np.argmin(losses))])


def calibration_error(chances: Floats, tasks: Ints, bins: int = 15) -> float:
    """Expected calibration error: mean distance of confidence and share of right answers, over bins of equal width."""
    confidence, right = chances.max(axis=1), chances.argmax(axis=1) == tasks
    number = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [
        abs(confidence[number == b].mean() - right[number == b].mean()) * (number == b).mean()
        for b in range(bins)
        if (number == b).any()
    ]
    return float(sum(gaps))


def cross_calibrated(found: Floats, known: Rows) -> Floats:
    """Chances with the temperature of other sources: half of the sources calibrate the other half."""
    names = sorted(set(known.sources))
    even = np.isin(known.sources, names[::2])
    chances = np.zeros_like(found)
    for half in (even, ~even):
        chances[half] = softmax(
            found[half] / temperature(found[~half], known.tasks[~half], known.sources[~half])
        )
    return chances


def report(known: Rows, found: Floats, title: str) -> dict[str, float]:
    """Prints the figures by source, language and task; gives the main ones."""
    right = found.argmax(axis=1) == known.tasks
    chances = cross_calibrated(found, known)
    sure = chances.max(axis=1) >= 0.5
    print(f"{title}\n  by source:")
    for source in sorted(set(known.sources)):
        mine = known.sources == source
        print(f"    {source:<56}{mine.sum():5}{right[mine].mean():7.2f}{sure[mine].mean():7.2f} sure")
    for language in sorted(set(known.languages)):
        mine = known.languages == language
        print(f"  {language}: {right[mine].mean():.3f} of {mine.sum()}")
    for number, task in enumerate(TASK_TYPES):
        mine = known.tasks == number
        print(f"  {task}: {right[mine].mean():.3f} of {mine.sum()}")
    figures = {
        "accuracy": float(right.mean()),
        "accuracy_mean_of_sources": float(
            np.mean([right[known.sources == s].mean() for s in set(known.sources)])
        ),
        "calibration_error": calibration_error(chances, known.tasks),
        "sure": float(sure.mean()),
        "accuracy_where_sure": float(right[sure].mean()),
    }
    print("  " + ", ".join(f"{name} {value:.4f}" for name, value in figures.items()), flush=True)
    return figures


def packed(model: Any, heat: float) -> TaskModel:
    """The artifact: 8-bit weights."""
    weights = np.zeros((NUM_HASHED + NUM_DENSE, len(TASK_TYPES)))
    bias = np.full(len(TASK_TYPES), -1e3)
    weights[:, model.classes_], bias[model.classes_] = model.coef_.T, model.intercept_
    scale = np.maximum(np.abs(weights[:NUM_HASHED]).max(axis=0), 1e-9) / 127
    return TaskModel(
        np.round(weights[:NUM_HASHED] / scale).astype(np.int8),
        scale.astype(np.float32),
        weights[NUM_HASHED:].astype(np.float32),
        bias.astype(np.float32),
        heat,
    )


def _right(found: Floats, known: Rows, chosen: NDArray[np.bool_]) -> float:
    return float((found[chosen].argmax(axis=1) == known.tasks[chosen]).mean())


def _without_cues(rows: Rows) -> Rows:
    bare = rows.X.tolil()
    bare[:, NUM_HASHED + len(SHAPE_NAMES) :] = 0
    return Rows(bare.tocsr(), rows.tasks, rows.sources, rows.origins, rows.languages)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True, help="directory with train.jsonl and dev.jsonl")
    parser.add_argument("--out", type=Path, default=MODEL_PATH)
    parser.add_argument(
        "--report", action="store_true", help="also families left out, and without the cues; minutes"
    )
    options = parser.parse_args()
    started = time.process_time()
    rows = read(options.data / "train.jsonl")
    known, ours = collected(rows), invented(rows)
    training = joined(known, ours)
    found = left_out(known, training, str)
    figures = {"sources": report(known, found, "each source left out")}
    model = packed(
        fit(training, np.ones(len(training.tasks), dtype=bool)),
        temperature(found, known.tasks, known.sources),
    )
    np.savez_compressed(
        options.out, hashed=model.hashed, scale=model.scale, dense=model.dense, bias=model.bias,
        temperature=np.float64(model.temperature),
    )  # fmt: skip
    dev_rows = read(options.data / "dev.jsonl")
    dev = collected(dev_rows)
    chances = np.stack([model.probabilities(row["text"]) for row in dev_rows])
    right = chances.argmax(axis=1) == dev.tasks
    figures["dev"] = {
        "accuracy": float(right.mean()), "chinese": float(right[dev.languages == "zh"].mean()),
        "calibration_error": calibration_error(chances, dev.tasks),
    }  # fmt: skip
    if options.report:
        figures["families"] = report(
            known, left_out(known, training, family), "each family of sources left out"
        )
        bare = _without_cues(known)
        figures["without_cues"] = report(
            bare, left_out(bare, _without_cues(training), str), "each source left out, without the cues"
        )
    print(
        f"wrote {options.out}, {options.out.stat().st_size} bytes; {time.process_time() - started:.0f} s of processor time"
    )
    print("RESULT " + json.dumps(figures))


if __name__ == "__main__":
    main()
