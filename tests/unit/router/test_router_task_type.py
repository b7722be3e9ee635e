"""The classifier: plain instructions, both languages, unsure where it should be, quick whatever the prompt."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.task_type import TASK_TYPES, UNSURE, classify

EXAMPLES = {
    "summarization": "Please summarize the following article in two sentences:\n\nThe council met on Monday.",
    "translation": "Translate this sentence to German: The weather is nice.",
    "rewriting": "Rewrite the following so that it is more formal:\nhey, can u send the doc",
    "extraction": "Extract all named entities from the text: Ada Lovelace met Charles Babbage in London.",
    "classification": "Classify the intent of this customer message: my card has not arrived",
    "creative_writing": "Write a short story about a lighthouse keeper.",
    "code": "Write a python function to reverse a linked list.",
    "math_reasoning": "A shop sells pens at $3 each. How much do 12 pens cost in total?",
    "structured_output": 'Return a JSON object that conforms to this JSON schema: {"type": "object"}',
    "rag": "Answer the question based on the following context.\nContext: The bridge opened in 1932.\nQuestion: When?",
    "qa": "who wrote the odyssey",
    "reasoning": "What if the moon were twice as close? Think step by step.",
    "chat": "User: hello there\nAssistant: Hi!\nUser: tell me more",
}


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_plain_instructions_are_understood(task_type: str) -> None:
    """One for each type."""
    assert classify(EXAMPLES[task_type]).task == task_type


def test_the_instruction_may_stand_behind_the_material() -> None:
    """Both ends of a long prompt are read."""
    material = "The council met on Monday and talked about the bridge. " * 400
    assert classify(material + "\n\nSummarize the text above.").task == "summarization"
    assert classify("Summarize this text:\n" + material).task == "summarization"


def test_no_cue_is_no_answer() -> None:
    """Unsure is said, not guessed; how sure it must be is a setting."""
    assert classify("").task == UNSURE
    assert classify("Translate to German: good morning", confident=1.0).task == UNSURE
    assert classify("Translate to German: good morning", confident=0.0).task == "translation"


CHINESE = {
    "summarization": "请用一句话总结下面的文章：市议会周一开会，讨论了大桥的修建问题，市民代表也参加了会议并发表意见。",
    "translation": "请把下面的句子翻译成英文：今天的天气很好。",
    "rewriting": "请改写下面的句子，使它更正式：你快点把文件发给我。",
    "extraction": "从下面的文本中提取所有的人名和地名：张伟上个月从上海去了巴黎。",
    "creative_writing": "写一首关于秋天的诗。",
    "code": "用Python写一个函数，反转一个链表。",
    "math_reasoning": "小明有12个苹果，吃了3个，又买了5个，现在有多少个？",
    "qa": "什么是光合作用？",
}


@pytest.mark.parametrize("task_type", CHINESE)
def test_chinese_instructions_are_understood(task_type: str) -> None:
    """One for each of the types that have many Chinese examples."""
    assert classify(CHINESE[task_type]).task == task_type


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
def test_any_text_gets_one_of_the_known_answers(prompt: str) -> None:
    """No text breaks it."""
    found = classify(prompt)
    assert found.task in {*TASK_TYPES, UNSURE}
    assert 0 <= found.confidence <= 1


@pytest.mark.parametrize("unit", ["\n- ", "A) ", "\n", " ", "```", "def x(", "a\nb\n", "User: \n", "1 + 1 "])
def test_no_text_makes_it_slow(unit: str) -> None:
    """A megabyte of whatever its patterns look for: the best of five runs stays in milliseconds."""
    prompt = unit * (1_000_000 // len(unit))
    best = min(_seconds(prompt) for _ in range(5))
    assert best < 0.02


def test_a_long_number_costs_no_more_than_a_long_word() -> None:
    """Best of five each; looking for several numbers took the square of its length."""
    number, word = (min(_seconds(sign * 100_000) for _ in range(5)) for sign in "1a")
    assert number < 2 * word


def _seconds(prompt: str) -> float:
    started = time.process_time()
    classify(prompt)
    return time.process_time() - started
