"""The type of task of a prompt, by keywords and shape: a first classifier, cheap enough to run on every request.

It only steers the decode plan, so a wrong answer costs time and nothing else. PLACEHOLDER
"""

import re

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

# Words that instructions use, by type of task: (weight, cues parted by "|"). A cue is found as whole words, whatever
# punctuation stands between them; a Chinese one anywhere.
_CUES: dict[str, tuple[tuple[float, str], ...]] = {
    "summarization": (
        (
            6,
            "tldr|tl dr|summarise|summarize|summarizing|summarising|summary|summarization|main points|key points",
        ),
        (
            6,
            "key takeaways|condense|card view|the gist|abridge|总结|概括|摘要|概述|梗概|归纳|zusammenfassen|zusammenfassung",
        ),
    ),
    "translation": (
        (8, "translate|translation|翻译|译成|译为|übersetze|übersetzen|traduce|traducir"),
        (6, "how would you say this|how do you say"),
    ),
    "rewriting": (
        (
            6,
            "rewrite|rephrase|paraphrase|paraphrase the sentence|reword|proofread|shorter sentences|splitting it up",
        ),
        (
            6,
            "make it more|make this more|make it shorter|fix the grammar|correct the grammar|correct the spelling",
        ),
        (6, "improve the following|edit the following|easier to read|more formal|more concise|simpler"),
        (6, "改写|重写|改成|改为|润色|修改|纠正|重新表述|重组|换一种|替换|更正|转换成|缩短"),
    ),
    "extraction": (
        (
            6,
            "extract|named entities|named entity|pull out|key details|what type of details|topics in the sentence",
        ),
        (
            6,
            "mentioned below|mentioned above|mentioned in the|can be gathered from|details about|the topics|facts about",
        ),
        (
            6,
            "list every|find all|identify the names|following bio|提取|抽取|找出|实体|关键词|关键字|列出文本",
        ),
    ),
    "classification": (
        (
            6,
            "classify|categorize|categorise|which category|what category|sentiment|positive or negative|true or false",
        ),
        (
            6,
            "express the same meaning|same meaning|a paraphrase that|is that a paraphrase|yes or no|refers to which one",
        ),
        (
            6,
            "list of categories|choice of categories|categories|intent of this|which intent|what does this customer want",
        ),
        (6, "is the intent|label the|label this|spam|toxic|分类|归类|情感|类别|属于哪|判断"),
    ),
    "creative_writing": (
        (
            5,
            "story|stories|poem|song|lyrics|haiku|novel|fiction|fanfiction|screenplay|movie plot|a plot|limerick",
        ),
        (
            5,
            "sonnet|slogan|short story|fan fiction|dialogue|alternate history|chapter|narrative|backstory|monologue",
        ),
        (
            5,
            "dnd|the scene|a scene|comedy|rap|characters|roleplay|blog post|essay|humorous|verse|tv show|anime",
        ),
        (
            6,
            "故事|诗|歌词|小说|作文|口号|对联|广告|剧本|散文|创作|对仗|写一首|写一篇|写一段|写一封|标语|情节|小红书",
        ),
    ),
    "code": (
        (
            6,
            "python|javascript|typescript|sqlite|sql query|html|css|golang|kotlin|php|powershell|regex|pandas|numpy",
        ),
        (
            6,
            "write a function|function to|a function that|write a python|write a program|the code|this code|django|react",
        ),
        (
            5,
            "source code|unit test|unit tests|refactor|debug|compile|api|java|rust|bash|c code|docker|kubernetes|linux",
        ),
        (5, "script|class|def|return|import|代码|编程|函数|程序|算法"),
    ),
    "math_reasoning": (
        (
            3,
            "how many|how much|how far|how fast|how old|what percent|in total|altogether|what is the value|each",
        ),
        (
            4,
            "solve|calculate|compute|equation|equations|integral|theorem|prove|probability|percentage|polynomial",
        ),
        (
            4,
            "ratio|average|what is the sum|remainder|per hour|per day|matrix|interest|profit|twice|times as many|kmph",
        ),
        (4, "none of these|km hr|km h|rs|dollars|cents|speed|distance|discount"),
        (5, "计算|方程|多少|求出|求证|证明|概率|平方|面积|几个|几只|几人|几元|几米|几次|几天|等于|之和"),
    ),
    "structured_output": ((9, "functions available|json|json schema|following schema|yaml|csv|xml"),),
    "rag": (
        (
            6,
            "given context|following context|context below|context above|following passage|the passage|passage|context",
        ),
        (
            6,
            "paragraph below|based on the following|using the following|extract the answer|if there is no answer",
        ),
        (
            7,
            "insufficient information|question related to the paragraph|answer the above question|from the text",
        ),
        (
            7,
            "answer the question|answer correctly|根据以下|根据上述|根据下面|根据文章|根据短文|根据文本|阅读下|阅读以|文章内容",
        ),
    ),
    "reasoning": (
        (
            6,
            "what if|step by step|given these facts|among the following options|following options|logic test",
        ),
        (
            5,
            "pick the most|best answer|most correct|most likely|explain your|how can you determine|what would happen",
        ),
        (
            5,
            "how might|how could|riddle|implications|here s a logic|following is a logic|what will|what may|why might|why did",
        ),
        (5, "推理|逻辑|推断|为什么|how do you|what are some|how does|how can|why do"),
    ),
    "chat": (
        (
            6,
            "imagine you are|recommend|advice|suggest|i want you to act|pretend|your opinion|hello|thank you|你好",
        ),
        (4, "can you give me|tips|i am|i m|my|should i|i have|let s|help me"),
    ),
}

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
    ("reasoning", 7, re.compile(r"(?:\n ?-[^\n]+){3,}\s*\Z")),
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


def _prepared() -> tuple[tuple[str, float, str], ...]:
    return tuple(
        (task_type, weight, f" {cue} " if cue.isascii() or "ü" in cue else cue)
        for task_type, groups in _CUES.items()
        for weight, cues in groups
        for cue in cues.split("|")
    )


_PREPARED = _prepared()


def classify(prompt: str) -> str:
    """One of ``TASK_TYPES``, or ``UNSURE``. Reads only the two ends of a long prompt."""
    head, tail = prompt[:_END], prompt[max(_END, len(prompt) - _END) :]
    ends = " " + _NO_WORD.sub(" ", f"{head} {tail}".lower()) + " "
    body = prompt if len(prompt) <= 2 * _BODY else f"{prompt[:_BODY]}\n{prompt[-_BODY:]}"
    scores = dict.fromkeys(TASK_TYPES, 0.0)
    for task_type, weight, cue in _PREPARED:
        if cue in ends:
            scores[task_type] += weight
    for task_type, weight, pattern in _SHAPES:
        if pattern.search(body):
            scores[task_type] += weight
    best = max(scores, key=lambda task_type: scores[task_type])
    if scores[best] >= 3:
        return best
    return "qa" if len(prompt) < 200 and _QUESTION.match(prompt) else UNSURE
