"""``python -m verify_service``: the verify tier alone."""

from paceline.serving.main import run_tier
from verify_service.service import create_server

if __name__ == "__main__":
    run_tier("verify", create_server)
