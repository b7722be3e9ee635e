"""``python -m router --config topology.toml``."""

from paceline.serving.main import run_tier
from router.service import create_server

if __name__ == "__main__":
    run_tier("router", create_server)
