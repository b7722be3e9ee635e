"""Every query of the dashboards, and every recorded series behind the alerts."""

import json
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[1]


def dashboard_queries() -> list[tuple[str, str]]:
    """(dashboard and panel, query), Grafana's interval variable filled in."""
    found = []
    for path in sorted((DEPLOY / "grafana/dashboards").glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in _panels(board["panels"]):
            found += [
                (f"{path.stem}/{panel['title']}", target["expr"].replace("$__rate_interval", "1m"))
                for target in panel.get("targets", ())
            ]
    return found


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules of ``kind``: record or alert."""
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def recording_rules() -> list[tuple[str, str]]:
    """(what it is, expression) of what alerts are decided from."""
    return [(rule["record"], rule["expr"]) for rule in rules("record")]


def _panels(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for panel in panels for one in (panel, *_panels(panel.get("panels", [])))]
