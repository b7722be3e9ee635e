"""``python -m draft_service``: one draft replica, without Ray."""

from draft_service.service import create_server
from paceline.serving.main import run_tier

if __name__ == "__main__":
    run_tier("draft", create_server)
