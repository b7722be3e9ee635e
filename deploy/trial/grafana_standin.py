"""Stands in for Grafana where its image cannot be had: reads what Grafana would be provisioned with, and says so.

Exits with a message where a dashboard or a provisioning file cannot be read.
"""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

_ROOT = Path("/etc/grafana")


def main() -> None:
    """Until the container is stopped."""
    sources = yaml.safe_load((_ROOT / "provisioning/datasources/sources.yaml").read_text())["datasources"]
    yaml.safe_load((_ROOT / "provisioning/dashboards/dashboards.yaml").read_text())
    boards = [json.loads(path.read_text())["title"] for path in sorted(_ROOT.glob("dashboards/*.json"))]
    said = json.dumps({"sources": [one["name"] for one in sources], "dashboards": boards}).encode()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Nothing."""

    ThreadingHTTPServer(("0.0.0.0", 3000), Answers).serve_forever()


if __name__ == "__main__":
    main()
