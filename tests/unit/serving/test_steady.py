"""What a serving process asks of the interpreter."""

import subprocess
import sys


def test_what_exists_at_the_start_is_not_collected_again():
    """In a process of its own: the objects of the libraries are out of the collector's sight, new garbage is not."""
    code = (
        "import gc, sys, torch\n"
        "from paceline.serving.steady import SWITCH_S, steady\n"
        "before = len(gc.get_objects())\n"
        "steady()\n"
        "assert gc.get_freeze_count() > 0.5 * before\n"
        "assert len(gc.get_objects()) < 0.1 * before\n"
        "assert abs(sys.getswitchinterval() - SWITCH_S) < 1e-6\n"
        "one = []; one.append(one); del one\n"
        "assert gc.collect() >= 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
