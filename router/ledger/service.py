"""The ledger as a tier of its own, for routers that share one: keeper, guard and holdout behind gRPC."""

import asyncio
import os
import socket

from paceline.config import PacelineConfig
from paceline.serving.server import TierServer
from paceline.telemetry import names
from paceline.telemetry.metrics import Metrics, build_info
from paceline.v1 import ledger_pb2_grpc
from router.ledger.remote import SERVICE, LedgerService
from router.ledger_set_up import open_keeper


async def create_server(config: PacelineConfig) -> TierServer:
    """The writer of the ledger, ready to start."""
    keeper = open_keeper(config.router)
    settings = config.router.ledger.server
    metrics = Metrics()
    metrics.add(lambda: [build_info(names.SERVICE_LEDGER, f"{socket.gethostname()}:{os.getpid()}")])
    server = TierServer(settings, services=[SERVICE], section="router.ledger.server", metrics=metrics)
    ledger_pb2_grpc.add_LedgerServiceServicer_to_server(LedgerService(keeper), server.grpc_server)
    keeper.start()

    async def stop() -> None:
        await asyncio.to_thread(keeper.stop)

    server.on_stop(stop)
    return server
