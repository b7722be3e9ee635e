"""``python -m draft_service``: one draft replica, without Ray."""

from paceline.few_wakes import few_wakes

few_wakes()

from draft_service.service import create_server  # noqa: E402
from paceline.serving.main import run_tier  # noqa: E402

if __name__ == "__main__":
    run_tier("draft", create_server)
