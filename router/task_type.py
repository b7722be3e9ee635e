"""The type of task of a prompt, by keywords and shape: a first classifier, cheap enough to run on every request.

It only steers the decode plan, so a wrong answer costs time and nothing else. On 1,102 labelled prompts kept aside (the
``dev`` part of the task classification set) 89.1 % are right and 4.7 % ``UNSURE``; of those it is sure about, 93.5 %
are right. That flatters: the cues were collected from the same sources. Prompts that are not built from a template:
84.8 %; Chinese ones 65 %. Weakest are creative writing (recall .41) and chat (.55); both are decoded plainly, as unsure
prompts are. A call takes 0.16 ms of processor time on average, at most 0.7 ms there. A trained classifier replaces this one.
"""

import re

from router.task_cues import CUES

UNSURE = "unsure"
"""No cue speaks: the policy's default row applies."""

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

# What the material itself looks like.
_SHAPES: tuple[tuple[str, float, re.Pattern[str]], ...] = (
    (
        "code",
        9,
        re.compile(
            r"^(?:def|class|import|from|#include|public|const|let|var|SELECT|<!DOCTYPE|<html|@)\b",
            re.MULTILINE,
        ),
    ),
    ("code", 7, re.compile(r"```|>>> |\bdef \w+\(|[;{]\n|</\w+>")),
    ("structured_output", 8, re.compile(r'"\$schema"|"properties": ?\{|"parameters": ?\{|"type": ?"object"')),
    ("math_reasoning", 9, re.compile(r"\bA ?[).][^\n]{1,80}\n? ?B ?[).]")),
    (
        "math_reasoning",
        4,
        re.compile(r"\$ ?\d|\d\$|\\frac|\\sum|\\int|\\begin\{|\d ?[+*×÷=^] ?\d|\d ?%|\b\d+/\d+\b"),
    ),
    ("chat", 20, re.compile(r"^(?:User|Human): .*\n(?:Assistant|AI): ")),
    ("chat", 20, re.compile(r"\n(?:User|Human): ")),
    ("rag", 5, re.compile(r"\b(?:Context|Passage|Document|Background)\b ?:|\[\d\]|问题：")),
)

_END = 350  # instructions stand at the ends of a prompt, data in the middle
_BODY = 1500
_NO_WORD = re.compile(r"[^\w]+|_+")
_QUESTION = re.compile(
    r"\s*(?:who|whom|whose|what|when|where|which|why|how|is|are|was|were|does|do|did|can|name|the)\b",
    re.IGNORECASE,
)


def _ends_in_choices(text: str) -> bool:
    """A question that offers its answers as a list."""
    lines = text.rstrip().rsplit("\n", 3)
    return len(lines) == 4 and all(line.lstrip().startswith("-") for line in lines[1:])


def _prepare() -> tuple[
    dict[str, list[tuple[str, float]]], list[tuple[str, float, str]], list[tuple[str, float, str]]
]:
    """Cues of one word by word, of several words, and those without ASCII letters."""
    words: dict[str, list[tuple[str, float]]] = {}
    phrases: list[tuple[str, float, str]] = []
    anywhere: list[tuple[str, float, str]] = []
    for task_type, weighted in CUES.items():
        for weight, text in weighted.items():
            for cue in map(str.strip, text.split("|")):
                if " " in cue:
                    phrases.append((task_type, weight, f" {cue} "))
                elif cue.isupper() or cue.islower():
                    words.setdefault(cue, []).append((task_type, weight))
                else:  # neither case: not an alphabet
                    anywhere.append((task_type, weight, cue))
    return words, phrases, anywhere


_WORDS, _PHRASES, _ANYWHERE = _prepare()


def classify(prompt: str) -> str:
    """One of ``TASK_TYPES``, or ``UNSURE``. Reads only the two ends of a long prompt."""
    head, tail = prompt[:_END], prompt[max(_END, len(prompt) - _END) :]
    ends = " " + _NO_WORD.sub(" ", f"{head} {tail}".lower()) + " "
    body = prompt if len(prompt) <= 2 * _BODY else f"{prompt[:_BODY]}\n{prompt[-_BODY:]}"
    scores = dict.fromkeys(TASK_TYPES, 0.0)
    for word in _WORDS.keys() & set(ends.split()):
        for task_type, weight in _WORDS[word]:
            scores[task_type] += weight
    for task_type, weight, cue in _PHRASES if ends.isascii() else _PHRASES + _ANYWHERE:
        if cue in ends:
            scores[task_type] += weight
    for task_type, weight, pattern in _SHAPES:
        if pattern.search(body):
            scores[task_type] += weight
    if _ends_in_choices(tail or head):
        scores["reasoning"] += 7
    best = max(scores, key=lambda task_type: scores[task_type])
    if scores[best] >= 3:
        return best
    return "qa" if len(prompt) < 200 and _QUESTION.match(prompt) else UNSURE
