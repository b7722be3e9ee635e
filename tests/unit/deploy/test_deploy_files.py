"""The files of the stack of containers agree with each other and with the tools that read them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.trial.engine import THIRD
from deploy.trial.promql import dashboard_queries, rules
from deploy.trial.promtool import promtool
from paceline.config import load_config

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = shutil.which("docker-compose", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")


def compose() -> dict:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("files", [["docker-compose.yml"], ["docker-compose.yml", "compose.gpu.yaml"]])
def test_docker_compose_accepts_the_files(files: list[str]) -> None:
    """``docker compose config -q`` needs no engine."""
    arguments = [part for name in files for part in ("-f", name)]
    done = subprocess.run(
        [COMPOSE, *arguments, "config", "-q"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_port_is_published_on_loopback_only() -> None:
    """Nobody else's machine can reach the stack."""
    ports = [port for service in compose()["services"].values() for port in service.get("ports", ())]
    assert len(ports) >= 7
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_service_restarts_and_has_limits() -> None:
    """A container that dies comes back; none can take the machine's memory."""
    for name, service in compose()["services"].items():
        assert service["restart"] == ("no" if name == "prepare" else "unless-stopped")
        assert {"memory", "pids"} <= set(service["deploy"]["resources"]["limits"])
        assert service["cap_drop"] == ["ALL"]


def test_the_settings_of_the_stack_are_valid_and_place_each_tier() -> None:
    """Each tier wants the resource of its name, and some node offers it under the name that others call it by."""
    config = load_config(ROOT / "deploy/compose.toml")
    services = compose()["services"]
    for tier in ("draft", "verify", "router"):
        assert getattr(config.cluster, tier).resources == {tier: 1.0}
        assert services[tier]["command"][-2:] == ["join", tier]
        assert services[tier]["environment"]["PACELINE_HOST_NAME"] == tier
        assert (
            f":{getattr(config, tier).server.metrics_on}/" in services[tier]["environment"]["PACELINE_HEALTH"]
        )


def test_prometheus_scrapes_the_port_of_each_tier() -> None:
    """One target a tier, at the port where its metrics are."""
    config = load_config(ROOT / "deploy/compose.toml")
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert {target for one in scraped["static_configs"] for target in one["targets"]} == {
        f"{tier}:{getattr(config, tier).server.metrics_on}" for tier in ("router", "verify", "draft")
    }


def test_down_has_the_time_that_a_drain_takes() -> None:
    """The head waits for every tier's drain before its container is killed."""
    config = load_config(ROOT / "deploy/compose.toml")
    drains = sum(getattr(config, tier).server.drain_s for tier in ("draft", "verify", "router"))
    assert drains < int(compose()["services"]["head"]["stop_grace_period"].removesuffix("s"))


def test_the_trial_stands_in_for_the_images_that_compose_names() -> None:
    """Same names and versions."""
    services = compose()["services"]
    for name, image in THIRD.items():
        assert services[name]["image"].endswith(f":-{image}}}")


def test_every_alert_has_a_runbook_and_a_test() -> None:
    """A page that exists, and a case that makes it fire."""
    tested = (ROOT / "deploy/prometheus/alerts_test.yml").read_text()
    index = (ROOT / "docs/runbooks/README.md").read_text()
    for alert in rules("alert"):
        assert (ROOT / alert["annotations"]["runbook"]).exists(), alert["alert"]
        assert f"alertname: {alert['alert']}" in tested
        assert alert["alert"] in index
        assert alert["labels"]["severity"] in {"warning", "critical"}


def test_the_alerts_do_what_they_say() -> None:
    """promtool's unit tests of the rules."""
    tool = promtool()
    if tool is None:
        pytest.skip("promtool cannot be had here: the alerts' unit tests were not run")
    for arguments in (
        ["check", "rules", "deploy/prometheus/alerts.yml"],
        ["test", "rules", "deploy/prometheus/alerts_test.yml"],
        ["check", "config", "--syntax-only", "deploy/prometheus/prometheus.yml"],
    ):
        done = subprocess.run([tool, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_dashboards_are_what_grafana_reads() -> None:
    """Three of them, each panel with a query, on the provisioned source; unique ids."""
    sources = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/sources.yaml").read_text())
    known = {source["uid"] for source in sources["datasources"]}
    boards = [json.loads(path.read_text()) for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")]
    assert {board["title"] for board in boards} == {
        "Is speculation paying?",
        "Where does a round's time go?",
        "Fleet",
    }
    for board in boards:
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        for panel in board["panels"]:
            assert panel["targets"]
            assert {target["datasource"]["uid"] for target in panel["targets"]} <= known
    assert len(dashboard_queries()) > 40
