"""``python -m router.ledger --config topology.toml``: a ledger that several routers share."""

from paceline.serving.main import run_tier
from router.ledger.service import create_server

if __name__ == "__main__":
    run_tier("router", create_server)
