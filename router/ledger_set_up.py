"""The ledger's writer by the settings, with those who judge by it."""

from paceline.config import RouterConfig
from router.guard import Guard, GuardRules, verdicts_from
from router.holdout import Holdout, comparisons_from
from router.ledger.keeper import Keeper
from router.plan import PlanTable
from router.rollout import ORDERS, Rollout, RolloutRules, orders_from, standings_from
from router.rules import Rules

READERS = {
    Guard.name: verdicts_from,
    Holdout.name: comparisons_from,
    Rollout.name: standings_from,
    ORDERS: orders_from,
    "rules": Rules.parse,
}
"""What a document of the ledger must be readable as."""


def open_keeper(config: RouterConfig) -> Keeper:
    """A keeper with guard, holdout and rollout; ``start`` it. Raises ConfigError for wrong ``router.plans``."""
    table, guard = PlanTable(config.plans, config.task_types), config.guard
    rules = GuardRules(
        off_acceptance=guard.off_acceptance,
        on_acceptance=guard.on_acceptance,
        off_speed=guard.off_speed,
        on_speed=guard.on_speed,
        cool_down_requests=guard.cool_down_requests,
        cool_down_s=guard.cool_down_s,
        probe_share=guard.probe_share,
        begins_on=lambda task: table.rule(task).mode == "speculative",
    )
    pace = RolloutRules(config.rollout.steps, config.rollout.window)
    return Keeper(config.ledger.path, judges=[Guard(rules), Holdout(), Rollout(pace)], readers=READERS)
