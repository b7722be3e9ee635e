"""The check's page as HTML, and as JSON."""

import dataclasses
import enum
import json
import time
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from cluster.check_advice import advice
from cluster.check_words import conclusion, do, facts, gates, interval, outcome, rollout_words, task_words
from gates.bimodal import shape_of
from gates.check import GOLDEN_ACCEPTANCE, Check
from gates.svg import bars
from paceline import __version__

_TEMPLATE = Path(__file__).with_name("check.html.j2")
_CSS = {"yes": "yes", "no": "no", "not shown": "open"}


def html(check: Check) -> str:
    """One file without anything from elsewhere."""
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _TEMPLATE.read_text(encoding="utf-8")
    )
    shape = shape_of(check.blocks) if check.blocks else None
    return template.render(
        check=check,
        outcome=outcome(check).value,
        conclusion=conclusion(check),
        advice=advice(check),
        rollout=rollout_words(check),
        gates=gates(check),
        facts=list(facts(check)),
        css=_CSS,
        golden=GOLDEN_ACCEPTANCE,
        interval=interval,
        do=do,
        task_words=task_words,
        pictures=[Markup(picture) for picture in _pictures(check)],  # noqa: S704  # our own SVG, its words escaped
        shape=shape.words if shape is not None else "",
        version=__version__,
        at=time.strftime("%Y-%m-%d %H:%M"),
    )


def _pictures(check: Check) -> list[str]:
    found = []
    speeds = {task.task: task.speed.value for task in check.tasks if task.speed is not None}
    if speeds:
        found.append(
            bars(speeds, title="Speed over plain decoding", x_label="", y_label="times plain", mark=1.0)
        )
    if check.blocks:
        rounds = sum(check.blocks.values())
        lengths = range(max(length for length, _ in check.blocks) + 1)
        shares = {
            str(length): (check.blocks.get((length, False), 0) + check.blocks.get((length, True), 0)) / rounds
            for length in lengths
        }
        found.append(
            bars(
                shares, title="Accepted draft tokens of a round", x_label="tokens", y_label="share of rounds"
            )
        )
    return found


def as_json(check: Check) -> str:
    """Everything, for programs."""
    told_next = advice(check)
    told = dataclasses.asdict(dataclasses.replace(check, blocks={}))
    told["blocks"] = [
        {"accepted": length, "whole": whole, "rounds": count}
        for (length, whole), count in sorted(check.blocks.items())
    ]
    told |= {
        "holds": check.holds,
        "outcome": outcome(check).value,
        "tail_failing": check.tail.failing,
        "conclusion": conclusion(check),
        "advice": told_next.words,
        "command": told_next.command,
    }
    for found, task in zip(told["tasks"], check.tasks, strict=True):
        found["do"] = do(task, check)
    return json.dumps(
        told, default=lambda value: value.value if isinstance(value, enum.Enum) else str(value), indent=1
    )
