"""Settings: files, overrides, and errors that name the key, the value and what would be right."""

from pathlib import Path

import pytest

from paceline.config import PacelineConfig, load_config
from paceline.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "topology.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_the_defaults_hold():
    """No file and no overrides: the documented defaults, with three different ports."""
    config = load_config()
    assert config == PacelineConfig()
    assert len({tier.server.port for tier in (config.router, config.verify, config.draft)}) == 3


def test_a_file_sets_what_it_names_and_nothing_else(tmp_path):
    """Sections and nested tables are read; the rest keeps its defaults."""
    path = written(
        tmp_path,
        """
        [model]
        name = "some/dir"
        dtype = "float32"
        [verify]
        kv_slots = 4
        draft_endpoints = ["127.0.0.1:1", "127.0.0.1:2"]
        [draft.drafters.small]
        kind = "model"
        layers = 3
        model = { name = "other/dir" }
        [router.plans.code]
        mode = "speculative"
        k = 8
        [cluster.verify]
        replicas = 2
        """,
    )
    config = load_config(path)
    assert (config.model.name, config.model.dtype, config.model.device) == ("some/dir", "float32", "auto")
    assert config.verify.kv_slots == 4
    assert config.verify.draft_endpoints == ("127.0.0.1:1", "127.0.0.1:2")
    small = config.draft.drafters["small"]
    assert (small.kind, small.layers) == ("model", 3)
    assert small.model is not None
    assert small.model.name == "other/dir"
    assert config.router.plans["code"].k == 8
    assert config.cluster.verify.replicas == 2
    assert config.cluster.draft.replicas == 1


def test_overrides_win_over_the_file(tmp_path):
    """section.key=value in TOML notation; a bare word is a string; the later one wins."""
    path = written(tmp_path, "[verify]\nkv_slots = 4\n[router]\nresume_s = 5\n")
    config = load_config(
        path,
        [
            "verify.kv_slots=9",
            "verify.server.port=1234",
            "model.name=smollm2",
            "model.device='cpu'",
            "verify.draft_endpoints=['a:1','b:2']",
            "router.plans.code.mode=plain",
            "verify.kv_slots=11",
        ],
    )
    assert config.verify.kv_slots == 11
    assert config.verify.server.port == 1234
    assert config.verify.server.address == "127.0.0.1:1234"
    assert (config.model.name, config.model.device) == ("smollm2", "cpu")
    assert config.verify.draft_endpoints == ("a:1", "b:2")
    assert config.router.plans["code"].mode == "plain"
    assert config.router.resume_s == 5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("verify.kv_slot=3", ["verify.kv_slot", "3"]),
        ("telemetry.sampel_ratio=0.5", ["telemetry.sampel_ratio"]),
        ("nosuch.key=1", ["nosuch"]),
        ("verify.kv_slots=0", ["verify.kv_slots", "0", "greater than or equal to 1"]),
        ("verify.server.port=70000", ["verify.server.port", "70000"]),
        ("telemetry.sample_ratio=1.5", ["telemetry.sample_ratio", "1.5"]),
        ("telemetry.sample_ratio=nan", ["telemetry.sample_ratio"]),
        ("router.resume_s=inf", ["router.resume_s"]),
        ("model.dtype=float16", ["model.dtype", "float16", "bfloat16"]),
        ("verify.kv_slots=many", ["verify.kv_slots", "many"]),
        (
            "draft.drafters.x={kind='model', prompt_tokens=-1}",
            ["draft.drafters.x.prompt_tokens", "-1", "greater than or equal to 0"],
        ),
        ("draft.drafters.x.kind=oracle", ["draft.drafters.x.kind", "oracle", "ngram"]),
        ("router.plans.code.k=65", ["router.plans.code.k", "65"]),
        (
            "router.guard.on_acceptance=0.4",
            ["router.guard", "on_acceptance 0.4 is below off_acceptance 0.55"],
        ),
        ("router.server.metrics_port=70000", ["  router.server.metrics_port = 70000: ", "65535", "auto"]),
        ("router.server.metrics_port=none", ["  router.server.metrics_port = 'none': ", '"off"']),
        ("router.server.metrics_port=true", ["  router.server.metrics_port = True: "]),
        ("router.guard.off_speed=1.5", ["router.guard", "on_speed 1.02 is below off_speed 1.5"]),
        ("verify.draft_endpoints=['a:1','b']", ["verify.draft_endpoints.1", "'b'", "host:port"]),
        ("router.verify_endpoints=['a:99999']", ["router.verify_endpoints.0", "'a:99999'", "1 to 65535"]),
        ("router.verify_endpoints=['a:0']", ["router.verify_endpoints.0", "1 to 65535"]),
        ("router.verify_endpoints=['a b:1']", ["router.verify_endpoints.0", "host:port"]),
        ("router.verify_endpoints=['http://a:1']", ["router.verify_endpoints.0", "host:port"]),
        ("router.ledger.endpoint=':1'", ["router.ledger.endpoint", "host:port"]),
    ],
)
def test_wrong_settings_are_refused_in_words(override, words):
    """Unknown keys, wrong types, values out of range: the error names the key, the value and what would be right."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    for word in words:
        assert word in str(caught.value)


def test_addresses_of_all_kinds_are_taken():
    """Names, numbers, IPv6; a ledger's may be empty."""
    endpoints = ("draft:7442", "a.b-c.example:65535", "10.0.0.1:1", "[::1]:7440", "::1:7440")
    config = load_config(None, [f"verify.draft_endpoints={list(endpoints)}", "router.ledger.endpoint=''"])
    assert config.verify.draft_endpoints == endpoints


def test_all_mistakes_are_named_at_once():
    """Nobody has to start five times to find five mistakes."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["verify.kv_slots=0", "router.resume_s=-1", "modle.name=x"])
    for key in ("verify.kv_slots", "router.resume_s", "modle"):
        assert key in str(caught.value)


@pytest.mark.parametrize("override", ["verify.kv_slots", "=3", ".x=3", "verify.=3", "model.name.x=3"])
def test_overrides_of_the_wrong_form_are_refused(override):
    """An override without key, with an empty part, or through a value: ConfigError with the override in it."""
    with pytest.raises(ConfigError, match="override"):
        load_config(None, ["model.name=a", override])


def test_a_missing_or_broken_file_is_a_config_error(tmp_path):
    """No such file, not TOML, not UTF-8."""
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(written(tmp_path, "[verify\n"))
    (tmp_path / "latin.toml").write_bytes(b'[model]\nname = "\xe9"\n')
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(tmp_path / "latin.toml")


def test_settings_are_frozen():
    """No config is changed after start."""
    config = load_config()
    with pytest.raises(ValueError, match="frozen"):
        config.verify.kv_slots = 3  # type: ignore[misc]


def test_every_setting_is_printed():
    """The lines printed at start name every leaf, sorted."""
    lines = load_config(None, ["verify.kv_slots=5"]).to_toml_lines()
    assert lines == sorted(lines)
    assert "verify.kv_slots = 5" in lines
    assert 'verify.server.host = "127.0.0.1"' in lines
    assert 'draft.drafters.ngram.kind = "ngram"' in lines
    assert len(lines) == len(set(lines))


def test_a_tier_prints_its_own_sections_only():
    """What is not its business is left out."""
    lines = load_config().to_toml_lines(sections=("model", "verify", "telemetry"))
    assert {line.split(".")[0] for line in lines} == {"model", "verify", "telemetry"}


def test_the_printed_settings_are_a_file_that_gives_them_again(tmp_path):
    """Quotes, backslashes, control characters, odd names of drafters, lists and truth values survive."""
    config = load_config(
        None,
        [
            "draft.drafters={ 'a.b \"' = { kind = 'model', model = { name = 'x' } } }",
            'model.name="a\\u007f\\t\\"ø"',
            "verify.draft_endpoints=['a:1','b:2']",
            "cluster.verify.resources={}",
        ],
    )
    assert load_config(written(tmp_path, "\n".join(config.to_toml_lines()))) == config


def test_what_differs_from_the_defaults_is_told_apart():
    """Nothing without settings, one line for each that was set."""
    assert load_config().changed_toml_lines() == []
    assert load_config(None, ["verify.kv_slots=5"]).changed_toml_lines() == ["verify.kv_slots = 5"]


def test_an_entry_of_ones_own_is_told_by_what_was_set():
    """A drafter and a plan have defaults of their own, which nobody set; what holds in another base is left out, too."""
    own = load_config(
        None,
        [
            "draft.drafters={mine={kind='random',max_match=9}}",
            "router.plans.code={mode='plain',reason='why'}",
        ],
    )
    plan = ['router.plans.code.mode = "plain"', 'router.plans.code.reason = "why"']
    drafter = ['draft.drafters.mine.kind = "random"', "draft.drafters.mine.max_match = 9"]
    assert own.changed_toml_lines() == [*drafter, *plan]
    assert own.changed_toml_lines(own) == []


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("verify.kv_slot=3", "verify.kv_slots"),
        ("verfy.kv_slots=3", "verify"),
        ("kv_slots=3", "verify.kv_slots"),
        ("router.port=3", "router.server.port"),
        ("draft.drafters.x={kind='ngram', min_mach=3}", "draft.drafters.x.min_match"),
        ("router.plans.code={mode='plain', drafer='x'}", "router.plans.code.drafter"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_nearest_one(override, meant):
    """A slip of the finger, a section left out, a level left out."""
    with pytest.raises(ConfigError, match=f"no such setting; did you mean {meant}\\?"):
        load_config(None, [override])


def test_no_guess_is_made_where_nothing_is_near():
    """A wrong hint is worse than none."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["nosuch.key=1"])
    assert "did you mean" not in str(caught.value)


def test_the_distilled_drafter_goes_with_its_target():
    """The default target drafts with the model distilled for it; another target, or drafters named, do without."""
    assert load_config().draft.drafters["cascade"].members == ("suffix", "backoff", "distilled")
    assert "distilled" not in load_config(None, ["model.name=other"]).draft.drafters
    assert set(load_config(None, ["draft.drafters={ngram={kind='ngram'}}"]).draft.drafters) == {"ngram"}
    assert "distilled" in load_config(None, ["draft.kv_slots=3"]).draft.drafters


def test_paths_are_those_of_where_the_settings_were_read(tmp_path, monkeypatch):
    """Ray starts tiers elsewhere; empty stays empty."""
    monkeypatch.chdir(tmp_path)
    table = "draft.drafters={b={kind='backoff', table='table'}}"
    named = [
        'verify.records.dir="here"',
        'draft.scores.dir="~/there"',
        "verify.depth_log=log",
        "router.ledger.path=l.sqlite",
    ]
    config = load_config(None, [*named, table])
    assert config.verify.records.dir == str(tmp_path / "here")
    assert config.draft.scores.dir == str(Path.home() / "there")
    assert config.verify.depth_log == str(tmp_path / "log")
    assert config.router.ledger.path == str(tmp_path / "l.sqlite")
    assert config.draft.drafters["b"].table == str(tmp_path / "table")
    default = load_config()
    assert (default.verify.records.dir, default.verify.depth_log, default.router.ledger.path) == ("", "", "")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("verify.kv_slots=true", "verify.kv_slots = True: expected a number"),
        ('verify.stall_s="10"', "verify.stall_s = '10': expected a number"),
        ("model.threads=99999999999999999999", "model.threads"),
        ("router.keep_requests=99999999999999999999", "router.keep_requests"),
        ("router.default_max_tokens=99999999999999999999", "router.default_max_tokens"),
        (
            'router.ledger.path="a\\u0000b"',
            "router.ledger.path = 'a\\\\x00b': holds a NUL character",
        ),
    ],
)
def test_what_nobody_can_work_with_is_refused_by_name(override: str, words: str) -> None:
    """Before anything starts: no number in quotes or by chance, none beyond what can be counted, no broken text."""
    with pytest.raises(ConfigError, match=words):
        load_config(None, [override])
