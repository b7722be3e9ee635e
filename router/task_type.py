"""The type of task of a prompt, or "unsure": a linear classifier over hashed words and shapes, numpy alone.

It only steers the decode plan, so a wrong answer costs time and nothing else. ``training/task_type.py`` trains it;
docs/log.md has its accuracy on sources that it was not trained on. Prompts may also name their task, or an operator's rule
may (``router.task_rules``): then nothing is classified.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from router.task_features import EDGE_SCALE, GRAM_SCALE, NUM_DENSE, NUM_HASHED, features, values

UNSURE = "unsure"
"""Too little speaks for any type: the policy's default row applies."""

TASK_TYPES = (
    "chat",
    "classification",
    "code",
    "creative_writing",
    "extraction",
    "math_reasoning",
    "qa",
    "rag",
    "reasoning",
    "rewriting",
    "structured_output",
    "summarization",
    "translation",
)

MODEL_PATH = Path(__file__).with_name("task_model.npz")
CONFIDENT = 0.5
"""Below this calibrated confidence a prompt is unsure: the answer would be wrong more often than right."""


@dataclass(frozen=True, slots=True)
class Classified:
    """A type of task and the chance that it is right."""

    task: str
    confidence: float


@dataclass(frozen=True, slots=True)
class TaskModel:
    """Weights of the classifier. T tasks, in the order of TASK_TYPES."""

    hashed: NDArray[np.int8]
    """[NUM_HASHED, T], to be multiplied by ``scale``."""
    scale: NDArray[np.float32]
    """[T]"""
    dense: NDArray[np.float32]
    """[NUM_DENSE, T]"""
    bias: NDArray[np.float32]
    """[T]"""
    temperature: float
    """Divides the scores, so that confidence is the share of right answers."""

    @classmethod
    def load(cls, path: Path = MODEL_PATH) -> Self:
        """The model as trained. Raises ValueError for one of another shape of features."""
        with np.load(path, allow_pickle=False) as file:
            model = cls(
                file["hashed"], file["scale"], file["dense"], file["bias"], float(file["temperature"])
            )
        if model.hashed.shape != (NUM_HASHED, len(TASK_TYPES)) or model.dense.shape[0] != NUM_DENSE:
            raise ValueError(f"{path} was trained on other features: run training/task_type.py again")
        return model

    def probabilities(self, prompt: str) -> NDArray[np.float64]:
        """[T], calibrated."""
        found = features(prompt)
        scores = self.bias + found.dense @ self.dense
        for indices, scale in ((found.grams, GRAM_SCALE), (found.edges, EDGE_SCALE)):
            summed = self.hashed[indices].sum(axis=0, dtype=np.int32)
            scores = scores + summed * self.scale * values(indices, scale)
        return softmax(scores.astype(np.float64) / self.temperature)


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis."""
    shifted = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: NDArray[np.float64] = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


@cache
def task_model() -> TaskModel:
    """The one that is shipped."""
    return TaskModel.load()


def classify(prompt: str, confident: float = CONFIDENT) -> Classified:
    """The likeliest type of task, or ``UNSURE`` below the confidence ``confident``."""
    if not prompt.strip():
        return Classified(UNSURE, 0.0)
    chances = task_model().probabilities(prompt)
    best = int(chances.argmax())
    confidence = float(chances[best])
    return Classified(TASK_TYPES[best] if confidence >= confident else UNSURE, confidence)
