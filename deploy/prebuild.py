"""Compiles all native code of the project into a directory: run where an image is built, used where it runs.

    python deploy/prebuild.py DIRECTORY       then set PACELINE_PREBUILT=DIRECTORY

Kernels are made for several kinds of processor, and the best one that the machine has is taken at start.
"""

import sys
from pathlib import Path

from paceline.compiled import prebuild as prebuild_source
from paceline.engine.kernels.build import prebuild as prebuild_kernels

PACKAGES = ("paceline", "draft_service", "verify_service", "router", "gates", "cluster")


def main() -> None:
    """Build everything; names what was built."""
    directory = Path(sys.argv[1])
    root = Path(__file__).resolve().parent.parent
    made = prebuild_kernels(directory)
    for package in PACKAGES:
        for source in sorted((root / package).rglob("*.cpp")):
            if source.parent.name != "kernels":
                made.append(prebuild_source(source, directory))
    for path in made:
        print(f"{path} ({path.stat().st_size >> 10} KiB)")


if __name__ == "__main__":
    main()
