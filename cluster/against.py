"""Run a command against a stack of its own: start the tiers, run it with PACELINE_ADDRESS set, stop the tiers.

    python -m cluster.against --config evaluation/same_output.toml -- python -m evaluation.same_output --prompts q.jsonl

The exit status is the command's.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from cluster.launch import running_cluster
from cluster.progress import progress_on
from paceline.config import load_config
from paceline.errors import PacelineError


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, help="topology and settings, TOML")
    parser.add_argument("--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("command", nargs="+", help="what to run, after --")
    args = parser.parse_args()
    # Ports of its own, so that a stack that runs already is not in the way.
    free_ports = [f"{tier}.server.port=0" for tier in ("router", "verify", "draft")]
    try:
        config = load_config(args.config, [*free_ports, *args.overrides])
        with (
            progress_on(Console(stderr=True, highlight=False)) as progress,
            running_cluster(config, progress=progress) as cluster,
        ):
            environment = os.environ | {"PACELINE_ADDRESS": cluster.router_address}
            done = subprocess.run(args.command, env=environment, check=False)
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
