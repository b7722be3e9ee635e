"""Rules that operators set at run time: pin a task, a tenant or both to plain or speculative, or forbid a drafter.

They stand in the ledger, so that all routers that share it go by them and a restart keeps them.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Self

from paceline.ranges import MAX_K
from router.ledger.documents import entries, value_of


class Action(Enum):
    """What a rule says."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"
    FORBID = "forbid"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; an empty scope is everything."""

    action: Action
    task: str = ""
    tenant: str = ""
    drafter: str = ""
    k: int = 0
    note: str = ""
    set_at: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """Of two rules with one key the later one holds. A pin has one for its task and tenant, whatever the drafter."""
        return self.task, self.tenant, self.drafter if self.action is Action.FORBID else ""

    @property
    def scope(self) -> str:
        """In words."""
        parts = [
            f"{name} {value!r}" for name, value in (("task", self.task), ("tenant", self.tenant)) if value
        ]
        if self.action is Action.FORBID and self.drafter:
            parts.append(f"drafter {self.drafter!r}")
        return " and ".join(parts) or "everything"

    def fits(self, task: str, tenant: str) -> bool:
        """Whether a request of that task and tenant is meant."""
        return self.task in ("", task) and self.tenant in ("", tenant)


class Rules:
    """The rules in force; a value."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self._rules = {(rule.action is Action.FORBID, rule.key): rule for rule in rules}

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules.values())

    def pin(self, task: str, tenant: str) -> Rule | None:
        """The narrowest pin that fits, a tenant's before a task's, the later one of two."""
        fitting = [r for r in self if r.action is not Action.FORBID and r.fits(task, tenant)]
        return max(
            fitting, key=lambda r: (bool(r.tenant) + bool(r.task), bool(r.tenant), r.set_at), default=None
        )

    def forbids(self, drafter: str, task: str, tenant: str) -> bool:
        """Whether the drafter may not be chosen."""
        return any(
            r.action is Action.FORBID and r.drafter in ("", drafter) and r.fits(task, tenant) for r in self
        )

    def plus(self, rule: Rule) -> "Rules":
        """With ``rule``, instead of one of the same scope."""
        return Rules([*self, rule])

    def without(self, task: str, tenant: str, drafter: str) -> "Rules":
        """Without those of exactly this scope."""
        return Rules(r for r in self if (r.task, r.tenant, r.drafter) != (task, tenant, drafter))

    def document(self) -> str:
        """As text."""
        return json.dumps([asdict(rule) | {"action": rule.action.value} for rule in self])

    @classmethod
    def parse(cls, document: str) -> Self:
        """What ``document`` gave. Raises ValueError for what is none."""
        rules = [value_of(Rule, entry) for entry in entries(document)]
        for rule in rules:
            if not 0 <= rule.k <= MAX_K:
                raise ValueError(f"k: {rule.k} is not within 0 to {MAX_K}")
        return cls(rules)
