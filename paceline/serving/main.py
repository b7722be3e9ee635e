"""Start-up of a tier from the shell: settings, logging, signals. Used by every ``__main__``."""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from paceline.config import PacelineConfig, load_config
from paceline.errors import ConfigError, PacelineError
from paceline.serving import logs
from paceline.serving.server import TierServer
from paceline.serving.steady import steady

_logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CONFIG = 2

Build = Callable[[PacelineConfig], Awaitable[TierServer]]


def run_tier(tier: str, build: Build, argv: Sequence[str] | None = None) -> None:
    """Run one tier (``draft``, ``verify`` or ``router``) until SIGTERM or SIGINT; ends the process.

    Prints the settings that concern it, then ``listening on HOST:PORT`` once calls are answered. The first signal drains, a
    second one cuts. Exit codes: 0 stopped, 2 wrong settings, 1 could not start for another known reason.
    """
    title = f"paceline {tier}"
    arguments = _parser(title).parse_args(argv)
    logs.configure()
    try:
        config = load_config(arguments.config, arguments.set)
        for line in config.to_toml_lines(sections=("model", tier, "telemetry")):
            print(line)
        sys.stdout.flush()
        asyncio.run(_serve(tier, build, config))
    except ConfigError as error:
        print(f"{title}: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    except PacelineError as error:
        print(f"{title}: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    sys.exit(0)


def _parser(title: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings in TOML; default: built-in ones"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="one setting on top of the file's, value as in TOML; may be repeated",
    )
    return parser


async def _serve(tier: str, build: Build, config: PacelineConfig) -> None:
    """Build, start, and stop when told to: while still building by giving up, afterwards by draining."""
    signals = asyncio.Queue[signal.Signals]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)

    building = asyncio.ensure_future(build(config))
    told = asyncio.create_task(signals.get())
    await asyncio.wait({building, told}, return_when=asyncio.FIRST_COMPLETED)
    if not building.done():
        _logger.info("stopped while starting", extra={"signal": told.result().name})
        building.cancel()
        return
    server = building.result()
    steady()
    try:
        await server.start()
        print(f"listening on {server.address}", flush=True)
        _logger.info("serving", extra={"tier": tier, "address": server.address})
        stopped = asyncio.create_task(server.wait())
        await asyncio.wait({told, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            _logger.info("draining", extra={"signal": told.result().name, "num_calls": server.num_in_flight})
    finally:
        stopping = asyncio.create_task(server.stop())
        again = asyncio.create_task(signals.get())
        await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            _logger.warning("told to stop again, calls are cut")
            await server.stop(0)
        await stopping
    _logger.info("stopped")
