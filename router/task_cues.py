"""Words that instructions use, by type of task: weight, then cues parted by "|".

A cue is found as whole words, whatever punctuation stands between them; one without any ASCII letter is found anywhere
(Chinese has no spaces). Collected by reading real prompts; the weights were set by hand on them. The classifier takes the
sums as features among many others.
"""

import re
from collections.abc import Mapping

CUES: dict[str, dict[float, str]] = {
    "summarization": {
        9: """tldr | tl dr | summarise | summarize | summarizing | summarising | summary | summarization | main points
            | key points | key takeaways | condense | card view | the gist | abridge | zusammenfassen | zusammenfassung
            | 总结 | 概括 | 摘要 | 概述 | 梗概 | 归纳""",
    },
    "translation": {
        8: """translate | translation | traduce | traducir | übersetze | übersetzen | 翻译 | 译成 | 译为""",
        6: """how would you say this | how do you say""",
    },
    "rewriting": {
        7: """rewrite | rephrase | paraphrase | paraphrase the sentence | reword | proofread | shorter sentences
            | splitting it up | make it more | make this more | make it shorter | fix the grammar | correct the grammar
            | correct the spelling | improve the following | edit the following | easier to read | more formal
            | more concise | simpler | 改写 | 重写 | 改成 | 改为 | 润色 | 修改 | 纠正 | 重新表述 | 重组 | 换一种 | 替换
            | 更正 | 转换成 | 缩短 | 编辑 | 重新写""",
    },
    "extraction": {
        7: """extract | named entities | named entity | pull out | key details | what type of details | give details
            | topics in the sentence | mentioned below | mentioned above | mentioned in the | can be gathered from
            | details about | the topics | facts about | list every | find all | identify the names | following bio
            | bio below | label them | 提取 | 抽取 | 找出 | 实体 | 关键词 | 关键字 | 列出文本""",
    },
    "classification": {
        7: """classify | categorize | categorise | which category | what category | support category | sentiment
            | positive or negative | positive negative or neutral | true or false | predict whether | decide whether
            | express the same meaning | same meaning | a paraphrase that | is that a paraphrase | yes or no
            | refers to which one | list of categories | choice of categories | categories | intent of this
            | which intent | what does this customer want | is the intent | label the | label this | spam | toxic
            | 分类 | 归类 | 情感 | 类别 | 属于哪 | 判断""",
    },
    "creative_writing": {
        5: """story | stories | poem | song | lyrics | haiku | novel | fiction | fanfiction | screenplay | movie plot
            | a plot | scene | limerick | sonnet | slogan | short story | fan fiction | dialogue | alternate history | chapter
            | narrative | backstory | monologue | dnd | the scene | a scene | comedy | rap | characters | roleplay
            | blog post | essay | humorous | verse | tv show | anime""",
        6: """故事 | 诗 | 歌词 | 小说 | 作文 | 口号 | 对联 | 广告 | 剧本 | 散文 | 创作 | 对仗 | 写一首 | 写一篇 | 写一段
            | 写一封 | 标语 | 情节 | 小红书 | песня | песню | рассказ""",
    },
    "code": {
        6: """python | javascript | typescript | sqlite | sql query | html | css | golang | kotlin | php | powershell
            | regex | pandas | numpy | write a function | function to | a function that | write a python
            | write a program | the code | this code | django | react | flutter | c program | unity""",
        5: """source code | unit test | unit tests | refactor | debug | compile | api | java | rust | bash | c code
            | docker | kubernetes | linux | script | class | def | return | import | 代码 | 编程 | 函数 | 程序 | 算法""",
    },
    "math_reasoning": {
        3: """how many | how much | how far | how fast | how old | what percent | in total | altogether | each
            | what is the value""",
        4: """solve | calculate | compute | equation | equations | integral | theorem | prove | probability
            | percentage | polynomial | ratio | average | what is the sum | remainder | per hour | per day | matrix
            | interest | profit | twice | times as many | kmph | none of these | km hr | km h | rs | dollars | cents
            | speed | distance | discount | find the value | half as many | more than""",
        5: """计算 | 方程 | 多少 | 求出 | 求证 | 证明 | 概率 | 平方 | 面积 | 几个 | 几只 | 几人 | 几元 | 几米 | 几次 | 几天
            | 等于 | 之和 | 百分之 | 几瓶 | 函数f""",
    },
    "structured_output": {
        9: """functions available | json | json schema | following schema | yaml | csv | xml""",
    },
    "rag": {
        4: """passage | context""",
        6: """given context | following context | context below | context above | following passage | paragraph below
            | based on the following | using the following | extract the answer | if there is no answer""",
        7: """insufficient information | question related to the paragraph | answer the above question | from the text
            | answer the question | answer correctly | 根据以下 | 根据上述 | 根据下面 | 根据文章 | 根据短文 | 根据文本
            | 阅读下 | 阅读以 | 文章内容""",
    },
    "reasoning": {
        12: """logic test""",
        6: """what if | step by step | given these facts | among the following options | following options""",
        5: """pick the most | best answer | most correct | most likely | explain your | how can you determine
            | what would happen | how might | how could | riddle | implications | what will | what may | why might
            | 推理 | 逻辑 | 推断""",
    },
    "chat": {
        6: """imagine you are | recommend | advice | i want you to act | pretend | your opinion | hello | thank you
            | 你好""",
        4: """can you give me | tips | my | should i | i have | let s | help me""",
    },
    "qa": {
        4: """what is | what are | who is | who was | who wrote | when did | when was | where is | where does | 是什么
            | 什么是 | 为什么 | 谁 | 哪个 | 哪些 | 哪里 | 描述 | 解释 | 介绍 | how do you | how does | why do""",
    },
}


_END = 350  # instructions stand at the ends of a prompt, data in the middle
_MOST = 12.0
_NO_WORD = re.compile(r"[^\w]+|_+")


def _prepare() -> tuple[
    Mapping[str, list[tuple[int, float]]], list[tuple[int, float, str]], list[tuple[int, float, str]]
]:
    """Cues of one word by word, of several words, and those without ASCII letters; tasks by their place in CUES."""
    words: dict[str, list[tuple[int, float]]] = {}
    phrases: list[tuple[int, float, str]] = []
    anywhere: list[tuple[int, float, str]] = []
    for task, weighted in enumerate(CUES.values()):
        for weight, text in weighted.items():
            for cue in map(str.strip, text.split("|")):
                if " " in cue:
                    phrases.append((task, weight, f" {cue} "))
                elif cue.isupper() or cue.islower():
                    words.setdefault(cue, []).append((task, weight))
                else:  # neither case: not an alphabet
                    anywhere.append((task, weight, cue))
    return words, phrases, anywhere


_WORDS, _PHRASES, _ANYWHERE = _prepare()


def cue_scores(prompt: str) -> list[float]:
    """From 0 to 1 for each task of ``CUES``. Reads only the two ends of a long prompt."""
    head, tail = prompt[:_END], prompt[max(_END, len(prompt) - _END) :]
    ends = " " + _NO_WORD.sub(" ", f"{head} {tail}".lower()) + " "
    scores = [0.0] * len(CUES)
    for word in _WORDS.keys() & set(ends.split()):
        for task, weight in _WORDS[word]:
            scores[task] += weight
    for task, weight, cue in _PHRASES if ends.isascii() else _PHRASES + _ANYWHERE:
        if cue in ends:
            scores[task] += weight
    return [min(score, _MOST) / _MOST for score in scores]
