"""The names are one list without twins."""

from paceline.telemetry import names


def test_no_name_stands_for_two_things():
    """Each constant has a value of its own; attributes of ours live in our namespace."""
    constants = {key: value for key, value in vars(names).items() if key.isupper()}
    attributes = {
        key: value
        for key, value in constants.items()
        if not key.startswith(("SERVICE_", "SPAN_")) and key != "PROVIDER"
    }
    assert len(set(attributes.values())) == len(attributes)
    for key, value in attributes.items():
        ours = not key.startswith(("GEN_AI_", "ERROR_"))
        assert value.startswith("paceline.") == ours, key
    for prefix in ("SERVICE_", "SPAN_"):
        values = [value for key, value in constants.items() if key.startswith(prefix)]
        assert len(set(values)) == len(values)


def test_conventional_names_are_the_conventions():
    """GenAI attributes are those of OpenTelemetry's own list."""
    from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes

    known = {
        v for module in (gen_ai_attributes, error_attributes) for v in vars(module).values() if type(v) is str
    }
    for key, value in vars(names).items():
        if key.startswith(("GEN_AI_", "ERROR_")):
            assert value in known, key
