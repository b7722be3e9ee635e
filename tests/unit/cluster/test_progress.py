"""What is said while something is waited for."""

import io

from rich.console import Console

from cluster import progress


def lines(monkeypatch, steps):
    """What is printed without a terminal when told ``steps``: (seconds since the start, text)."""
    out = io.StringIO()
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.progress_on(Console(file=out, width=80)) as say:
        for at_s, text in steps:
            clock[0] = at_s
            say(text)
    return out.getvalue().splitlines()


def test_a_line_is_said_once_and_again_after_a_while(monkeypatch):
    """However often it is told: no flood in a log, and no silence of minutes either."""
    told = [(at_s / 2, "waiting for verify-0 (loading)") for at_s in range(60)]
    assert lines(monkeypatch, [(0, "starting Ray"), *told, (30, "")]) == [
        "[  0.0 s] starting Ray",
        "[  0.0 s] waiting for verify-0 (loading)",
        "[ 15.0 s] still waiting for verify-0 (loading)",
    ]


def test_a_long_line_is_not_broken(monkeypatch):
    """A log line stays one line, brackets are no markup."""
    text = "waiting for " + ", ".join(f"verify-{index} [loading]" for index in range(20))
    assert lines(monkeypatch, [(0, text)]) == [f"[  0.0 s] {text}"]


def test_a_terminal_gets_a_spinner_that_goes():
    """It names the step with its time; the end of the wait clears it, and it may begin again."""
    out = io.StringIO()
    with progress.progress_on(Console(file=out, force_terminal=True, width=80)) as say:
        say("starting Ray")
        say("starting Ray")
        say("waiting for verify-0 (loading)")
        say("")
        say("warming up")
        say("")
    assert "waiting for verify-0 (loading)" in out.getvalue()
    assert "0:00:0" in out.getvalue()
