"""``python -m router.ledger --config topology.toml``: a ledger that several routers share."""

from paceline.few_wakes import few_wakes

few_wakes()

from paceline.serving.main import run_tier  # noqa: E402
from router.ledger.service import create_server  # noqa: E402

if __name__ == "__main__":
    run_tier("router", create_server)
