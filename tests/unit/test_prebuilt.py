"""Native code that was compiled beforehand, for images without a compiler."""

from pathlib import Path

import pytest

from paceline import compiled
from paceline.engine.kernels import build

SOURCE = 'extern "C" int answer() { return 42; }\n'


def test_a_source_compiled_beforehand_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PACELINE_PREBUILT names the directory; another source is not taken for it."""
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    made = compiled.prebuild(source, tmp_path / "native")
    assert made.exists()
    monkeypatch.setenv(compiled.PREBUILT, str(tmp_path / "native"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    assert compiled.load_compiled(source).answer() == 42
    source.write_text(SOURCE.replace("42", "43"))
    with pytest.raises(compiled.NotCompiledError):
        compiled.load_compiled(source)


def test_the_best_kernels_that_the_processor_can_run_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of processor gets its own, one that has none of the abilities gets none."""
    monkeypatch.setenv(compiled.PREBUILT, str(tmp_path))
    for level in build.LEVELS:
        (tmp_path / build._prebuilt_name(level)).touch()
    for level, (_, flags) in build.LEVELS.items():
        monkeypatch.setattr(build, "_processor", lambda flags=flags: "flags: " + " ".join(flags))
        assert build._prebuilt() == tmp_path / build._prebuilt_name(level)
    monkeypatch.setattr(build, "_processor", lambda: "flags: sse2")
    assert build._prebuilt() is None
    monkeypatch.delenv(compiled.PREBUILT)
    assert build._prebuilt() is None
