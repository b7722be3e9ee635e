"""The ledger as a tier of its own, for routers that share one: keeper, guard and holdout behind gRPC."""

import asyncio

from paceline.config import PacelineConfig
from paceline.serving.server import TierServer
from paceline.v1 import ledger_pb2_grpc
from router.ledger.remote import SERVICE, LedgerService
from router.ledger_set_up import open_keeper


async def create_server(config: PacelineConfig) -> TierServer:
    """The writer of the ledger, ready to start."""
    keeper = open_keeper(config.router)
    server = TierServer(config.router.ledger.server, services=[SERVICE], section="router.ledger.server")
    ledger_pb2_grpc.add_LedgerServiceServicer_to_server(LedgerService(keeper), server.grpc_server)
    keeper.start()

    async def stop() -> None:
        await asyncio.to_thread(keeper.stop)

    server.on_stop(stop)
    return server
