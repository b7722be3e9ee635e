"""How gRPC passes messages in the process of a tier: through as few threads as it can.

gRPC 1.80 gave Python its EventEngine, which hands every message to another thread once more. Without it a question and its answer between two
processes take a third less, a fifth less where the cores slept between (docs/log.md, "Fewer wakes in gRPC"; ``python -m benchmarks.wakes``
measures it again).
"""

import os

VARIABLE, VALUE = "GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener"


def few_wakes() -> None:
    """Call before gRPC is imported: it reads its environment then. Whoever has set the variable knows better."""
    os.environ.setdefault(VARIABLE, VALUE)
