"""The type of task of a request: as it says itself, as a rule of the settings says, else as classified."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.config import TaskRule
from paceline.errors import ConfigError
from router.task_type import TASK_TYPES, UNSURE, classify


@dataclass(frozen=True, slots=True)
class NamedTask:
    """A type of task, where it comes from, and the chance that it is right where it was classified."""

    name: str
    origin: str
    confidence: float | None = None


class TaskNamer:
    """Names types of task by the settings."""

    def __init__(self, rules: Sequence[TaskRule], more_types: Sequence[str], confident: float) -> None:
        """Raises ConfigError for a rule of an unknown type and a type that is there already."""
        twice = sorted({*TASK_TYPES, UNSURE, "default"} & set(more_types))
        if twice:
            raise ConfigError(f"router.task_types: {', '.join(twice)}: there is such a type already")
        self.types = (*TASK_TYPES, *more_types)
        """All types that a request may name."""
        unknown = sorted({rule.task for rule in rules} - set(self.types))
        if unknown:
            raise ConfigError(
                f"router.task_rules: unknown types of task {unknown}; add them to router.task_types, or use one of "
                f"{', '.join(self.types)}"
            )
        self._rules = tuple(rules)
        self._confident = confident

    def name(
        self, given: str, tenant: str, metadata: Mapping[str, str], words: Callable[[], str]
    ) -> NamedTask:
        """``given`` if it is not empty; ``words`` gives the text to read, and is called only if it must be."""
        if given:
            return NamedTask(given, "named by the request")
        text: str | None = None
        for number, rule in enumerate(self._rules, start=1):
            if rule.tenant and rule.tenant != tenant:
                continue
            if any(metadata.get(key) != value for key, value in rule.metadata.items()):
                continue
            if rule.contains:
                text = words() if text is None else text
                lowered = text.lower()
                if not any(part.lower() in lowered for part in rule.contains):
                    continue
            return NamedTask(rule.task, f"rule {number} of router.task_rules")
        found = classify(words() if text is None else text, self._confident)
        return NamedTask(found.task, f"classified, {found.confidence:.0%} sure", found.confidence)
