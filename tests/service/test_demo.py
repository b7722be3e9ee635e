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
    console = Console(file=out, width=80, highlight=False)
    try:
        code = await demo._show(server.address, console, lambda _text: None, 8)
    finally:
        await server.stop(0.0)
    return code, out.getvalue()


async def test_six_tasks_are_shown_with_decision_figures_and_same_output(capsys):
    """Every task streams its answers, has one row in each table, its reason, and a waterfall ends the page."""
    code, text = await show(ScriptedRouter())
    assert code == 0
    assert text.count("Blåbær [") == 12
    rows = [line for line in text.splitlines() if line.rstrip().endswith("yes")]
    assert len(rows) == 6
    assert rows[0].split() == ["summarise", "ngram", "k=4", "7", "3", "2.00", "1.00x", "1.00x", "yes"]
    assert "summarise 60.0 60.0 3 2.00 3 6 0 90" in [" ".join(line.split()) for line in text.splitlines()]
    assert "summarise: speculative ngram k=4, because answers repeat their question" in text
    assert "\x1b" not in text
    assert "forced" not in text
    assert "decode 100.0 ms = draft" in capsys.readouterr().out


async def test_everything_fits_eighty_columns():
    """Nothing is cut, and nothing but the answers themselves is left to the terminal to wrap."""
    for router in (ScriptedRouter(), ScriptedRouter(plain=True)):
        _, text = await show(router)
        page = text[text.index("Six tasks") :]
        assert max(map(len, page.splitlines())) <= 80
        assert "…" not in text


async def test_a_forced_row_stands_below_the_decision_for_plain():
    """What the router would not have done is marked, with figures of its own."""
    _, text = await show(ScriptedRouter(plain=True))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "summarise plain 7 3 2.00 1.00x 1.00x yes" in lines
    assert "forced ngram k=4 7 3 2.00 1.00x 1.00x yes" in lines
    assert any(line.startswith("forced: the router chose plain") for line in lines)


async def test_other_output_fails_the_run():
    """One token that differs: exit code 1, and where it began is said."""
    code, text = await show(ScriptedRouter(drifts=True))
    assert code == 1
    assert "summarise: output differs from token 2 on" in text
    assert "NO" in text
