"""A prompt as numbers, for the task classifier: hashed words and their neighbours, and what the prompt is shaped like.

Training and serving use this one function, so the two cannot differ. Only the two ends of a long prompt are read word by
word: instructions stand there, material in the middle. Numpy alone.
"""

import math
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from router.task_cues import CUES, cue_scores

Indices = NDArray[np.int64]

NUM_HASHED = 1 << 15
END = 260
"""Characters of either end that are read word by word."""
BODY = 400
"""Characters of either end whose shape is looked at."""
_EDGE_TOKENS = 12
"""So many tokens at the beginning and at the end count once more, by where they stand."""
GRAM_SCALE, EDGE_SCALE = 0.5, 1.5
"""Ends weigh more: a prompt says there what is wanted."""
_SHAPE_SCALE, _CUE_SCALE = 0.3, 0.5

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_TOKEN = re.compile(rf"[{_CJK}]|[^\W\d_{_CJK}]+|\d+|[^\w\s]")
_IS_CJK = re.compile(rf"[{_CJK}]")

_SYMBOLS = [ord(c) for c in "{}[]()<>=;_"]
_LENGTHS = (30, 60, 100, 160, 250, 400, 700, 1200, 2500)
_LINES = (1, 2, 3, 5, 9, 20)

_SHAPES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, flags))
    for name, pattern, flags in (
        ("fence", r"```", 0),
        (
            "code line",
            r"^\s*(?:def |class |import |from \w+ import|#include|public |const |let |var |return\b|function\b|SELECT |CREATE |@\w)",
            re.MULTILINE,
        ),
        ("code call", r"\w\(\w*\)|[;{]\n|\w\.\w+\(|=>|->|==|!=|\+=", 0),
        ("markup", r"</?\w+>", 0),
        ("json", r'"\w+" ?: ?["\[{\d]', 0),
        ("schema", r'"\$schema"|"properties" ?:|"parameters" ?:|"type" ?: ?"', 0),
        ("choices", r"^\s*(?:\(?[A-Ea-e][).])\s?\S.*\n\s*\(?[B-Fb-f][).]", re.MULTILINE),
        ("choices in line", r"\(?A\)? ?\S.{0,60}\(?B\)", 0),
        ("list", r"^\s*[-*•] \S.*\n\s*[-*•] ", re.MULTILINE),
        ("numbered", r"^\s*1[.)] ", re.MULTILINE),
        ("table", r"\|.*\|.*\||^[^,\n]+(?:,[^,\n]+){2,}\n[^,\n]+(?:,[^,\n]+){2,}$", re.MULTILINE),
        ("latex", r"\\[a-z]+\{|\$[^$\n]{1,60}\$|\\\(|\^\{?\d", 0),
        ("money", r"[$€£¥]\s?\d", 0),
        ("sum", r"\d ?[+*/×÷=^] ?\d|\d ?%", 0),
        ("turns", r"(?:^|\n)(?:User|Human|Customer|客户|用户)\s?[:：]", 0),
        (
            "labels",
            r"(?:^|\n)\s*(?:Context|Passage|Document|Background|Paragraph|Article|Text|文章|文本|材料|短文)\s?[:：]",
            re.IGNORECASE,
        ),
        ("question label", r"(?:^|\n)\s*(?:Question|Q|问题)\s?\d?\s?[:：]", re.IGNORECASE),
        ("answer label", r"(?:Answer|A|答案|回答)\s?[:：]\s*$", re.IGNORECASE),
        ("citation", r"\[\d+\]", 0),
        ("colon and line", r"^[^\n]{1,200}[:：]\s*\n", 0),
        ("colon within", r"^[^\n:：]{4,120}[:：] ?\S", 0),
        ("ends in question", r"[?？][\"'”’)\s]*$", 0),
        (
            "starts with a question",
            r"^\s*(?:who|whom|whose|what|when|where|which|why|how|is|are|was|were|does|do|did|can|could|should|will|would)\b",
            re.IGNORECASE,
        ),
        ("question first", r"^[^\n.。!！]{1,200}[?？]", 0),
        ("question behind", r"[.。\n][^.。\n]{3,200}[?？]\s*$", 0),
        ("no punctuation", r"^[^.,;:!?。，；：！？\n]+$", 0),
        ("lower start", r"^[a-z]", 0),
        ("first person", r"\b(?:I|I'm|I've|my|me|we|our)\b|我", 0),
        ("quoted", r"[\"“「『][^\"”」』]{20,}[\"”」』]", 0),
        ("blank line", r"\n\s*\n", 0),
        ("names", r"\b[A-Z][a-z]+ [A-Z][a-z]+", 0),
        ("several numbers", r"\d\D+\d+\D+\d", 0),  # no \d+ first: a long number would take its square
        ("how many", r"how (?:many|much|long|far|old|fast)\b|多少|几[个只人元米次天块]", re.IGNORECASE),
    )
)

SHAPE_NAMES = (
    *(f"longer than {n}" for n in _LENGTHS),
    *(f"more than {n} lines" for n in _LINES),
    *(name for name, _ in _SHAPES),
    "chinese", "not latin", "digits", "symbols", "capitals", "long and asks", "short and asks", "long, no question",
)  # fmt: skip
NUM_DENSE = len(SHAPE_NAMES) + len(CUES)


def shape(prompt: str) -> list[float]:
    """One number, mostly 0 or 1, for each of ``SHAPE_NAMES``."""
    body = prompt if len(prompt) <= 2 * BODY else f"{prompt[:BODY]}\n{prompt[-BODY:]}"
    body = body.strip()
    size = max(len(body), 1)
    lines = body.count("\n") + 1
    found = {name: float(pattern.search(body) is not None) for name, pattern in _SHAPES}
    points = np.frombuffer(body.encode("utf-32-le", "replace"), dtype=np.uint32)
    ascii_points = np.bincount(points[points < 128], minlength=128)
    latin = int(ascii_points.sum())
    chinese = int(((points >= 0x3040) & (points <= 0x9FFF) & ((points <= 0x30FF) | (points >= 0x3400))).sum())
    asks = (
        found["ends in question"]
        or found["question first"]
        or found["question label"]
        or found["question behind"]
    )
    long = len(prompt) > 400
    return [
        *(float(len(prompt) > n) for n in _LENGTHS),
        *(float(lines > n) for n in _LINES),
        *found.values(),
        float(chinese > 0.2 * size),
        min(1.0, 2 * (len(points) - latin) / size),
        min(1.0, 10 * int(ascii_points[48:58].sum()) / size),
        min(1.0, 20 * int(ascii_points[_SYMBOLS].sum()) / size),
        min(1.0, 10 * int(ascii_points[65:91].sum()) / size),
        float(long and bool(asks)),
        float(len(prompt) < 120 and bool(asks)),
        float(long and not asks),
    ]


@dataclass(frozen=True, slots=True)
class Features:
    """A prompt as the classifier sees it. Indices are unique and below NUM_HASHED."""

    grams: Indices
    """Words and neighbours, wherever they stand."""
    edges: Indices
    """The same at the beginning and at the end."""
    dense: NDArray[np.float32]
    """[NUM_DENSE]: shape, then cues."""


def features(prompt: str) -> Features:
    """What is read from ``prompt``, all of it from its two ends."""
    head, tail = prompt[:END], prompt[max(END, len(prompt) - END) :]
    tokens = ["0" if token.isdigit() else token for token in _TOKEN.findall(f"{head}\n{tail}".lower())]
    grams = set(tokens)
    grams.update(map(" ".join, pairwise(tokens)))
    grams.update(
        a + b + c for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False) if _IS_CJK.match(b)
    )
    first, last = tokens[:_EDGE_TOKENS], tokens[-_EDGE_TOKENS:]
    edges = {f"F:{token}" for token in first} | {f"L:{token}" for token in last}
    edges |= {f"F:{a} {b}" for a, b in pairwise(first)} | {f"L:{a} {b}" for a, b in pairwise(last)}
    edges |= {"S:" + " ".join(first[:length]) for length in (1, 2, 3)}
    dense = [_SHAPE_SCALE * value for value in shape(prompt)] + [_CUE_SCALE * s for s in cue_scores(prompt)]
    return Features(_hashed(grams), _hashed(edges), np.array(dense, dtype=np.float32))


def values(indices: Indices, scale: float) -> float:
    """What each of ``indices`` counts: all together have the length ``scale``, however many they are."""
    return scale / math.sqrt(max(len(indices), 1))


def _hashed(names: Collection[str]) -> Indices:
    found = np.fromiter((zlib.crc32(name.encode("utf-8", "replace")) for name in names), np.int64, len(names))
    return np.unique(found & (NUM_HASHED - 1))
