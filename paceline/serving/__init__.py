"""What every tier's gRPC server and client share: health, reflection, errors as rich statuses, drain, start-up.

A tier builds a ``TierServer``, adds its servicers to ``grpc_server`` and raises ``paceline.errors`` from its handlers;
a caller opens a channel with ``open_channel`` and gets the same errors back with ``error_from_rpc``.
"""

from paceline.serving.channel import open_channel
from paceline.serving.server import TierServer
from paceline.serving.status import error_from_rpc

__all__ = ["TierServer", "error_from_rpc", "open_channel"]
