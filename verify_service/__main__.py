"""``python -m verify_service``: the verify tier alone."""

from paceline.few_wakes import few_wakes

few_wakes()

from paceline.serving.main import run_tier  # noqa: E402
from verify_service.service import create_server  # noqa: E402

if __name__ == "__main__":
    run_tier("verify", create_server)
