"""What ``make run`` prints, and when it fails, against a scripted router."""

import io

from rich.console import Console
from scripted_router import ScriptedRouter

from cluster import demo
from paceline.config import ServerConfig
from paceline.serving import TierServer
from paceline.v1 import router_pb2_grpc


async def show(router: ScriptedRouter) -> tuple[int, str]:
    server = TierServer(ServerConfig(), services=[])
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server.grpc_server)
    await server.start()
    out = io.StringIO()
    console = Console(file=out, width=demo.LOG_WIDTH, highlight=False)
    try:
        code = await demo._show(server.address, console, lambda _text: None, 8)
    finally:
        await server.stop(0.0)
    return code, out.getvalue()


async def test_six_tasks_are_shown_with_decision_figures_and_same_output(capsys):
    """Every task streams its answers, has one row, and a waterfall ends the page; readable without a terminal."""
    code, text = await show(ScriptedRouter())
    assert code == 0
    assert text.count("Blåbær [") == 12
    rows = [line for line in text.splitlines() if line.rstrip().endswith("yes")]
    assert len(rows) == 6
    assert "speculative ngram k=4:" in rows[0]
    assert "2.00" in rows[0]
    assert "1.00x" in rows[0]
    assert "\x1b" not in text
    assert "decode 100.0 ms = draft" in capsys.readouterr().out


async def test_other_output_fails_the_run():
    """One token that differs: exit code 1, and where it began is said."""
    code, text = await show(ScriptedRouter(drifts=True))
    assert code == 1
    assert "summarise: output differs from token 2 on" in text
    assert "NO" in text
