"""Channels between tiers."""

import grpc

from paceline.serving.status import error_from_rpc

__all__ = ["MAX_MESSAGE_BYTES", "error_from_rpc", "open_channel"]

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest message that a tier takes: a 10 MB prompt must reach validation to be refused in words."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # A peer whose machine is gone says nothing: ask every 10 s while a call is open, give up after 10 (the
    # second limit defaults to 60 s and covers every ping). A process that only holds its interpreter still answers.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A tier that came back is to be used again soon; the default backoff grows to two minutes. The minimum is how long a
    # connection may take: a peer that is busy or far away needs more than a moment for its first words.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A connection of its own for each channel: links and requests do not wait behind each other.
    ("grpc.use_local_subchannel_pool", 1),
    # Tiers talk to each other, never through the machine's web proxy.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to ``host:port``; the caller closes it. It connects when first used.

    Calls fail at once (UNAVAILABLE) while the peer is away; pass ``wait_for_ready=True`` and a timeout to wait.
    """
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
