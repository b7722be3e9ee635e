"""A diagnosis for the terminal: troubles with evidence and remedy, accepted lengths drawn."""

import textwrap
from collections.abc import Iterator

from cluster.words import counted
from gates.bimodal import FEWEST_ROUNDS, Blocks
from gates.diagnose import Diagnosis
from router.evidence import MIN_REQUESTS

WIDTH, _BAR = 80, 44


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Line by line, 80 columns."""
    yield f"{counted(diagnosis.requests, 'request')}, {diagnosis.speculative} of them speculative"
    for picture in diagnosis.pictures:
        if picture.blocks:
            yield ""
            rounds = sum(picture.blocks.values())
            yield from _wrapped(
                f"{picture.task}: accepted draft tokens of a round, {counted(rounds, 'round')} of "
                f"{counted(picture.requests, 'request')}",
                "",
            )
            enough = rounds >= FEWEST_ROUNDS and picture.requests >= MIN_REQUESTS
            yield from histogram_lines(picture.blocks, shares=enough)
            words = f"too few to say more: {FEWEST_ROUNDS} rounds of {MIN_REQUESTS} requests are needed"
            yield from _wrapped(picture.shape.words if enough and picture.shape else words, "  ")
    yield ""
    if not diagnosis.findings:
        yield "None of the known troubles shows." if diagnosis.judged else "Too few requests to judge by."
    for finding in diagnosis.findings:
        yield f"{finding.trouble.value.upper()}" + (f" ({finding.task})" if finding.task else "")
        yield from _wrapped(f"seen: {finding.evidence}", "  ")
        yield from _wrapped(f"do: {finding.remedy}", "  ")
    for words in diagnosis.not_judged:
        yield from _wrapped(f"Not judged: {words}.", "")


def histogram_lines(blocks: Blocks, *, shares: bool) -> Iterator[str]:
    """One bar a length; + marks rounds whose block ended there, all of it accepted. Shares of the rounds, or their numbers."""
    most = max(blocks.get((length, False), 0) + blocks.get((length, True), 0) for length, _ in blocks)
    rounds = sum(blocks.values())
    for length in range(max(length for length, _ in blocks) + 1):
        wrong, whole = blocks.get((length, False), 0), blocks.get((length, True), 0)
        bar = "#" * round(_BAR * wrong / most)
        bar += "+" * (round(_BAR * (wrong + whole) / most) - len(bar))
        figure = f"{(wrong + whole) / rounds:>5.1%}" if shares else f"{wrong + whole:>5}"
        yield f"  {length:>3} {bar:<{_BAR}} {figure}"
    yield "      # the next token was wrong   + the block ended, all of it accepted"


def _wrapped(words: str, indent: str) -> list[str]:
    return textwrap.wrap(words, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ")
