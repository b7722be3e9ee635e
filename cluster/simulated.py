"""The settings behind ``--simulate``: devices that nobody has here, everything else real."""

from paceline.errors import ConfigError
from paceline.simulation import MODEL_NAME, PAIRS
from router.plan import TASK_TYPES


def simulated(pair: str, *, k: int = 4) -> list[str]:
    """Overrides for a stack on simulated devices, speculative for every type of task. Raises ConfigError."""
    if pair not in PAIRS:
        raise ConfigError(f"--simulate {pair}: expected one of {', '.join(sorted(PAIRS))}")
    rule = f"{{mode='speculative', drafter='{MODEL_NAME}', k={k}, reason='simulated devices'}}"
    return [
        f'model.name="{MODEL_NAME}"',
        f'simulation.pair="{pair}"',
        f"draft.drafters={{{MODEL_NAME}={{kind='{MODEL_NAME}'}}}}",
        *(f"router.plans.{task}={rule}" for task in TASK_TYPES),
    ]
