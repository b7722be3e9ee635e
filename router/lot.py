"""Lots that are drawn without a random number: the same request draws the same lot in every router, whatever happens."""

import hashlib


def drawn(request_id: str, purpose: str, share: float, key: str = "") -> bool:
    """Whether ``request_id`` is among ``share`` of all requests. Two purposes, or two keys, draw independently."""
    digest = hashlib.blake2b(
        request_id.encode(), digest_size=8, key=key.encode()[:64], person=purpose.encode()[:16]
    )
    return int.from_bytes(digest.digest(), "big") < share * 2**64
