import asyncio
import time

from paceline.serving.delay_line import DelayLine


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
    writer.close()


async def test_bytes_arrive_late_whole_and_in_order():
    """A round trip takes at least what was asked for; with jitter the order holds."""
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with DelayLine(f"127.0.0.1:{port}", rtt_s=0.02, jitter_s=0.003) as line:
        reader, writer = await asyncio.open_connection(*line.address.rsplit(":", 1))
        started = time.monotonic()
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        assert time.monotonic() - started >= 0.02
        sent = b"".join(bytes([i]) * 100 for i in range(50))
        for at in range(0, len(sent), 100):
            writer.write(sent[at : at + 100])
            await writer.drain()
        assert await reader.readexactly(len(sent)) == sent
        line.cut()
        assert await reader.read() == b""
        writer.close()
    server.close()


async def test_a_line_to_nowhere_hangs_up():
    """Like a host where nobody listens."""
    with DelayLine("127.0.0.1:1", rtt_s=0.0) as line:
        reader, writer = await asyncio.open_connection(*line.address.rsplit(":", 1))
        assert await reader.read() == b""
        writer.close()
