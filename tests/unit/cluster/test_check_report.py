"""Where a check may write."""

import pytest

from cluster.check_cli import refuse_own_input
from paceline.errors import ConfigError


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".html"])
def test_a_report_never_replaces_the_requests(suffix, tmp_path, monkeypatch):
    """By whatever name, or link, the file of requests is called."""
    traffic = tmp_path / f"two{suffix}"
    traffic.write_text("{}\n", encoding="utf-8")
    (tmp_path / f"link{suffix}").symlink_to(traffic)
    monkeypatch.chdir(tmp_path)
    for name in ("two", "./two", f"two{suffix}", "link", str(tmp_path / "two")):
        with pytest.raises(ConfigError, match="name another"):
            refuse_own_input(traffic, tmp_path.joinpath(name))
    refuse_own_input(traffic, tmp_path / "three")
