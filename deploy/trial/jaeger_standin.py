"""Stands in for Jaeger where its image cannot be had: takes spans by OTLP on 4317, shows them as JSON on 16686.

    GET /api/services                         {"data": [service names]}
    GET /api/traces/<trace id>                {"data": [{"traceID": ..., "spans": [...]}]}
    GET /api/traces?service=...&limit=...     the newest traces of a service

A small part of what Jaeger's own API answers, enough to see that a trace of three services arrives.
"""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from paceline.testing.collector import OtlpCollector, SeenSpan

_collector = OtlpCollector(port=4317, host="0.0.0.0")


def _traces(service: str, limit: int) -> list[dict[str, object]]:
    found: dict[str, list[SeenSpan]] = {}
    for span in _collector.spans:
        found.setdefault(span["trace_id"], []).append(span)
    chosen = [spans for spans in found.values() if not service or any(s["service"] == service for s in spans)]
    return [_trace(spans) for spans in chosen[-limit:]]


def _trace(spans: list[SeenSpan]) -> dict[str, object]:
    return {
        "traceID": spans[0]["trace_id"],
        "spans": [
            {
                "spanID": s["span_id"],
                "parent": s["parent_id"],
                "operationName": s["name"],
                "service": s["service"],
                "duration": s["end"] - s["start"],
                "tags": dict(s["attributes"]),
            }
            for s in spans
        ],
    }


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        data: object
        if parts.path == "/api/services":
            data = sorted({span["service"] for span in _collector.spans})
        elif parts.path.startswith("/api/traces/"):
            wanted = parts.path.rpartition("/")[2]
            spans = [span for span in _collector.spans if span["trace_id"] == wanted]
            data = [_trace(spans)] if spans else []
        elif parts.path == "/api/traces":
            data = _traces(query.get("service", [""])[0], int(query.get("limit", ["20"])[0]))
        else:
            data = "this stands in for Jaeger"
        body = json.dumps({"data": data}, default=str).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing."""


async def main() -> None:
    """Until the container is stopped."""
    server = ThreadingHTTPServer(("0.0.0.0", 16686), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    async with _collector:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
