"""What has to be there before a stack of containers starts: a token for Ray, and the model in the cache.

python deploy/prepare.py        idempotent; $PACELINE_MODEL names the model, default smollm2
"""

import os
import secrets
from pathlib import Path

from paceline.model_store import prepare_model

TOKEN_PATH = Path("/run/paceline/token")


def main() -> None:
    """Token, then model."""
    if not TOKEN_PATH.exists():
        descriptor = os.open(TOKEN_PATH, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        print(f"made {TOKEN_PATH}", flush=True)
    name = os.environ.get("PACELINE_MODEL") or "smollm2"
    print(f"model {name}: {prepare_model(name)}", flush=True)


if __name__ == "__main__":
    main()
