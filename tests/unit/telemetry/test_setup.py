"""Where spans go: configuration, then environment, else nowhere."""

import pytest

from paceline.config import TelemetryConfig
from paceline.errors import ConfigError
from paceline.telemetry import Telemetry
from paceline.telemetry.export import parse_endpoint


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def setup(endpoint=""):
    return Telemetry.setup(TelemetryConfig(otlp_endpoint=endpoint), service_name="s", instance_id="i")


def test_without_an_endpoint_nothing_is_set_up():
    """The default is silence."""
    assert not setup().enabled


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_the_environment_names_the_endpoint_where_the_settings_do_not(name, monkeypatch):
    """Both standard variables work."""
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    telemetry = setup()
    assert telemetry.enabled
    telemetry.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "target", "secure"),
    [
        ("http://127.0.0.1:4317", "127.0.0.1:4317", False),
        ("http://jaeger:4317/", "jaeger:4317", False),
        ("https://otel.example:443", "otel.example:443", True),
        ("127.0.0.1:4317", "127.0.0.1:4317", False),
        ("http://collector", "collector:4317", False),
        ("http://[::1]:5", "[::1]:5", False),
    ],
)
def test_endpoints_are_read_as_the_standard_says(endpoint, target, secure):
    """Scheme decides about TLS, the default port is 4317."""
    assert parse_endpoint(endpoint) == (target, secure)


@pytest.mark.parametrize(
    "endpoint", ["http://", "ftp://x:1", "http://x:notaport", "http://x:4318/v1/traces", ":4317"]
)
def test_an_endpoint_that_cannot_be_meant_is_a_wrong_setting(endpoint):
    """The operator is told at start, not by missing traces."""
    with pytest.raises(ConfigError, match="trace endpoint"):
        setup(endpoint)
