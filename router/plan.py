"""What is believed before anything is measured: a table by type of task, and what a request wishes for itself.

The output depends on none of this (I1), only the speed does. Speculation is tried first where outputs copy from their
prompts, because a look-up guesses well there, whichever drafter makes it; everywhere else plain decoding is never worse. ``policy`` decides by
what was measured since.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.config import PlanRule
from paceline.errors import ConfigError
from paceline.types import Law, Mode, Plan
from router.task_type import UNSURE

DEFAULT = "default"
DEFAULT_K = 4
STAND_INS = ("cascade", "suffix", "ngram")
"""Which drafter the built-in table takes: the first of these that is there."""


def _plain(reason: str) -> PlanRule:
    return PlanRule(mode="plain", reason=reason)


def _cool(reason: str) -> PlanRule:
    """Measured: 1.07 to 1.8 times plain speed at temperature 0, 0.99 to 1.23 at 0.8, 0.93 to 1.16 at 1.0 (docs/log.md)."""
    return PlanRule(mode="speculative", k=4, max_temperature=0.9, reason=reason)


# Four draft tokens: on two cores five rows cost 1.5 times one and nine 2.2 times, and up to eight drafted tokens gain only where a
# text is copied (docs/log.md). Other hardware: router.plans in the settings.
_TABLE: dict[str, PlanRule] = {
    "code": PlanRule(mode="speculative", k=4, reason="code repeats names and idioms of its prompt"),
    "extraction": PlanRule(mode="speculative", k=4, reason="extraction copies from its prompt"),
    "rag": PlanRule(mode="speculative", k=4, reason="such an answer quotes the passage it was given"),
    "rewriting": PlanRule(mode="speculative", k=4, reason="rewriting keeps most of its prompt"),
    "structured_output": PlanRule(
        mode="speculative", k=4, reason="structured output repeats keys of its prompt"
    ),
    "summarization": PlanRule(mode="speculative", k=4, reason="summarization reuses phrases of its prompt"),
    "classification": _plain("a class is named in a few tokens, too few for speculation to pay"),
    "chat": _cool("the target's usual phrases can be guessed for next to nothing"),
    "creative_writing": _cool("the target's usual phrases can be guessed for next to nothing"),
    "math_reasoning": _cool("calculations repeat their numbers and the target its phrases"),
    "qa": _cool("an answer from knowledge is made of the target's usual phrases"),
    "reasoning": _cool("an argument comes back to its terms, in the target's usual phrases"),
    "translation": _cool("a translation repeats names, and the target its phrases"),
    DEFAULT: _cool("the type of task is unsure, and look-ups cost next to nothing"),
}

TASK_TYPES = tuple(_TABLE)
"""What ``router.plans`` may name."""


@dataclass(frozen=True, slots=True)
class DecodingWish:
    """What the request asks for; ``mode`` None leaves everything to the table."""

    mode: Mode | None = None
    drafter: str | None = None
    k: int | None = None
    law: Law | None = None


class PlanTable:
    """The built-in table under the settings of ``router.plans``: what is believed before anything is measured."""

    def __init__(
        self, rules: Mapping[str, PlanRule], more_types: Sequence[str] = (), law: Law = Law.COUPLED
    ) -> None:
        """``law`` holds where the request wishes no other. Raises ConfigError for a rule of an unknown type of task."""
        known = {*_TABLE, *more_types}
        unknown = sorted(set(rules) - known)
        if unknown:
            raise ConfigError(f"router.plans: unknown types of task {unknown}; known are {sorted(known)}")
        self._settings = dict(rules)
        self.law = law

    def rule(self, task_type: str) -> PlanRule:
        """What holds for a type of task; one without a row has that of the unsure."""
        name = DEFAULT if task_type == UNSURE else task_type
        return self._settings.get(name) or _TABLE.get(name) or self._settings.get(DEFAULT) or _TABLE[DEFAULT]

    def is_set(self, task_type: str) -> bool:
        """Whether the settings have a row for it, rather than the built-in table."""
        return (DEFAULT if task_type == UNSURE else task_type) in self._settings

    def preferred(self, task_type: str) -> tuple[str, ...]:
        """Drafters to take, the best one first: that of the settings, or the built-in table's and its stand-ins."""
        return (self.rule(task_type).drafter,) if self.is_set(task_type) else STAND_INS

    def reason(self, task_type: str) -> str:
        """Why the row says what it says, in words."""
        name = DEFAULT if task_type == UNSURE else task_type
        return self.rule(task_type).reason or f"a rule of router.plans for {name}"

    def as_wished(self, task_type: str, wish: DecodingWish, drafters: Mapping[str, bool]) -> Plan:
        """What a request wants that says so. ``drafters``: which are known, and whether each is available now."""
        if wish.mode is Mode.PLAIN:
            return Plan.plain("asked for by the request")
        return self._as_wished(self.rule(task_type), wish, drafters)

    def _as_wished(self, rule: PlanRule, wish: DecodingWish, drafters: Mapping[str, bool]) -> Plan:
        drafter = wish.drafter or best_drafter(rule.drafter, drafters)
        if drafter is None:
            return Plan.plain(
                "speculative decoding was asked for by the request, but there is no drafter to choose"
            )
        k = wish.k or (rule.k if rule.mode == "speculative" else DEFAULT_K)
        reason = "asked for by the request"
        if not drafters.get(drafter):
            # The verify tier goes on plainly and takes the drafter up when it is back.
            reason += f"; drafter {drafter!r} is not available now, so rounds are plain until it is"
        return Plan.speculative(drafter, k, reason, wish.law or self.law, k_fixed=wish.k is not None)


def best_drafter(preferred: str, drafters: Mapping[str, bool]) -> str | None:
    """The preferred one if it is there, else a stand-in, else any that is there, else any that is known."""
    ranked = sorted(
        drafters, key=lambda name: (not drafters[name], name != preferred, name not in STAND_INS, name)
    )
    return ranked[0] if ranked else None
