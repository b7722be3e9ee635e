"""Whether what this container runs is well: exit code 0 when every /healthz answers 200.

    python deploy/health.py [URL ...]       default: $PACELINE_HEALTH, words separated by spaces

Only the standard library and no package of ours, because it runs every few seconds in every container.
"""

import http.client
import os
import sys
from urllib.parse import urlsplit

TIMEOUT_S = 3.0


def problem(url: str) -> str:
    """Why ``url`` is not well; empty: it is."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path or "/healthz")
        answer = connection.getresponse()
        return "" if answer.status == http.client.OK else answer.read(200).decode(errors="replace").strip()
    except OSError as error:
        return str(error)
    finally:
        connection.close()


def main() -> None:
    """Ask all of them; say what is wrong with those that are not well."""
    urls = sys.argv[1:] or os.environ.get("PACELINE_HEALTH", "").split()
    if not urls:
        sys.exit("no URL given, and PACELINE_HEALTH names none")
    wrong = [f"{url}: {words}" for url in urls if (words := problem(url))]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
