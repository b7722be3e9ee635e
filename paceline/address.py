"""host:port, as people write it."""

LAST_PORT = 65535


def address_problem(address: str) -> str:
    """Why it cannot be called; empty where it can be."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or any(char.isspace() or not char.isprintable() for char in host):
        return "expected host:port"
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= LAST_PORT):
        return f"expected host:port with a port from 1 to {LAST_PORT}"
    return ""
