"""What to do next after a check: in words, and as a command where there is one."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from gates.check import Check
from gates.pairs import Verdict
from gates.tail_gate import ENOUGH_FOR_P99

_OTHERS = "OTHER.jsonl"
"""Stands for a file that only the reader has."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence or two; ``command`` may be empty."""

    words: str
    command: str = ""


def advice(check: Check) -> Advice:
    """What to do next."""
    known = check.facts
    good = [task.task for task in check.tasks if task.verdict is Verdict.YES]
    diagnose = shlex.join(["paceline", "diagnose", "--records", known.records]) if known.records else ""
    if check.holds and good:
        return _roll_out(check, good)
    if not check.same_output:
        return Advice("Keep the records and run `paceline diagnose --records` on them.", diagnose)
    if check.memory.verdict is Verdict.NO:
        return Advice(
            "Lower verify.kv_slots or the longest context, or take a smaller drafter, then check again."
        )
    if check.tail.verdict is Verdict.NO and _late_first(check):
        return Advice(
            "It is the first token that comes late, as it does where a drafter reads long prompts beside the target: try one that "
            "only looks up (--drafter suffix), or a device of its own for the drafter. `paceline diagnose` on the records names the requests.",
            _again(check, "--drafter", "suffix"),
        )
    if check.tail.verdict is Verdict.NO:
        return Advice(
            "Run `paceline diagnose` on the records, or the ledger: it names the requests that the tail is made of.",
            diagnose,
        )
    if check.noisy:
        return _noisy(check)
    others = [task for task in check.tasks if not task.too_few and task.verdict is not Verdict.YES]
    if good and not others and check.memory.verdict is Verdict.OPEN:
        return Advice(
            "Say where a verify replica of the pair is (--verify host:port): it knows what the pair takes."
        )
    if good and others:
        return Advice(
            f"Check again with --task for {listed(good)} alone, on other requests: these have picked it, so on them it looks better than it "
            "is. For the rest plain decoding loses nothing.",
            _again(check, *(word for task in good for word in ("--task", task)), other=True),
        )
    if good or any(task.verdict is Verdict.OPEN for task in check.tasks):
        return Advice(
            f"Check again with more requests ({ENOUGH_FOR_P99} and more in all, 100 and more a task; repeats do not count), on a "
            "quieter machine or with --repeats 3; until then plain decoding loses nothing.",
            _again(check, "--repeats", "3", other=True),
        )
    return Advice("Leave this traffic to plain decoding, or try another drafter (--drafter).")


def _noisy(check: Check) -> Advice:
    """Repeats once, then nothing but quiet and more requests: the same command again would end in the same page."""
    few = check.tail.requests is not None and check.tail.requests < ENOUGH_FOR_P99
    more = f", on {ENOUGH_FOR_P99} requests and more: repeats of one count once" if few else ""
    repeats = ("--repeats", str(max(3, check.facts.repeats)))
    if check.facts.repeats < int(repeats[1]):
        return Advice(
            f"Check again when nothing else runs on the machine, with --repeats 3{more}. Until then plain decoding loses nothing.",
            _again(check, *repeats, other=few),
        )
    return Advice(
        f"Repeating did not help: find out what else runs on this machine, or check on another one{more}. Until then plain decoding loses "
        "nothing.",
        _again(check, *repeats, other=True) if few else "",
    )


def _roll_out(check: Check, good: list[str]) -> Advice:
    known = check.facts
    if known.simulated:
        return Advice(
            f"These were simulated devices ({known.simulated}): it says what such a pair would give, not what yours does. Check "
            "again on real ones before you roll out."
        )
    if known.started:
        return Advice(
            f"Roll out for {listed(good)}: the pair that was started for this check is gone, so start one with `paceline up` and the same "
            "settings, and check there: a running router hears what passed."
        )
    if known.gated is False:
        return Advice(
            f"{listed(good)} may speculate. That is what the router does by itself where it pays: its gate is off (see the end)."
        )
    return Advice(
        f"Roll out for {listed(good)}; `paceline rollout status` shows how it goes.",
        "paceline rollout status",
    )


def _again(check: Check, *options: str, other: bool = False) -> str:
    """The command that made this check, with ``options``; ``other``: on requests that the reader has to bring."""
    known = check.facts
    if not known.command:
        return ""
    kept = list(known.command)
    if (
        other and known.traffic_path
    ):  # the first word behind the command's own, whatever else is called like it
        first = kept.index("check") + 1
        assert Path(kept[first]) == Path(known.traffic_path), "arguments come before options"
        kept[first] = _OTHERS
    picked = [word for task in known.picked for word in ("--task", task)] if "--task" not in options else []
    return shlex.join([*kept, *picked, *options])


def _late_first(check: Check) -> bool:
    """Whether the tail is one of first tokens rather than of the tokens behind them."""
    return "first token" in check.tail.failing and "time a token" not in check.tail.failing


def listed(names: list[str]) -> str:
    """One; one and two; one, two and three."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
