"""``python -m cluster`` is ``paceline``."""

from cluster.cli import main

if __name__ == "__main__":
    main()
