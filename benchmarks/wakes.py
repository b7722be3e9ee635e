"""What a question and its answer over gRPC take between two processes, as gRPC comes and as the tiers set it.

    python -m benchmarks.wakes [--quick] [--rounds N] [--pause MS]

One process asks over a bidirectional stream of grpc.aio on loopback, as the verify tier does, the other one gives each message back.
Both ways take turns, several processes each; the median of all answers counts. ``--pause``: time between an answer and the next
question, in which cores fall asleep. If the ratio is near 1, ``paceline.few_wakes`` has become needless. The last
line is ``RESULT {json}``.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import grpc

from paceline import few_wakes

WAYS = {"as it comes": "", "as set": few_wakes.VALUE}
_METHOD = "/wakes/Echo"


async def echo() -> None:
    """Give every message back until killed."""

    async def handle(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(handle, None, None)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("wakes", {"Echo": handler}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


async def ask(port: int, rounds: int, pause_s: float) -> list[float]:
    """Seconds of each question with its answer."""
    took = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.stream_stream(_METHOD)()
        for _ in range(rounds):
            await asyncio.sleep(pause_s)
            begun = time.perf_counter()
            await call.write(b"sixty bytes or so, as a proposal of the link has them usually")
            await call.read()
            took.append(time.perf_counter() - begun)
        await call.done_writing()
    return took[rounds // 10 :]


def pair(way: str, rounds: int, pause_s: float) -> list[float]:
    """Both processes, begun anew."""
    environment = os.environ | {few_wakes.VARIABLE: WAYS[way]}
    command = [sys.executable, "-m", "benchmarks.wakes"]
    with subprocess.Popen(
        [*command, "--echo"], stdout=subprocess.PIPE, env=environment, text=True
    ) as answering:
        assert answering.stdout is not None
        port = answering.stdout.readline().strip()
        asking = [*command, "--port", port, "--rounds", str(rounds), "--pause", str(1e3 * pause_s)]
        found = subprocess.run(asking, stdout=subprocess.PIPE, env=environment, text=True, check=True)
        answering.kill()
    return [float(one) for one in json.loads(found.stdout)]


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.0, help="milliseconds")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.echo:
        asyncio.run(echo())
    elif args.port:
        print(json.dumps(asyncio.run(ask(args.port, args.rounds, args.pause / 1e3))))
    else:
        result: dict[str, Any] = {"benchmark": "wakes", "grpc": grpc.__version__}
        for pause_ms in (0.0, 10.0):
            took: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(3 if args.quick else 8):
                for way in WAYS:
                    took[way] += pair(way, args.rounds if not pause_ms else args.rounds // 4, pause_ms / 1e3)
            medians = {way: round(1e3 * statistics.median(times), 3) for way, times in took.items()}
            ratio = round(medians["as set"] / medians["as it comes"], 3)
            result[f"pause {pause_ms:g} ms"] = medians | {"ratio": ratio}
            print(f"pause {pause_ms:g} ms: {medians} ms, ratio {ratio}")
        print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
