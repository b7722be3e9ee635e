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


def test_an_image_whose_kernels_do_not_fit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image has no compiler on purpose: what is wrong is that the kernels it brought are for another processor."""
    monkeypatch.setattr(build, "_loaded", [])
    monkeypatch.delenv(compiled.DISABLE, raising=False)
    monkeypatch.setenv(compiled.PREBUILT, str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)

    def reason() -> str:
        with pytest.raises(compiled.NotCompiledError) as raised:
            build.load_library()
        return str(raised.value)

    monkeypatch.setattr(build, "_processor", lambda: "flags: " + " ".join(build.LEVELS["avx2"][1]))
    assert (
        reason() == "PACELINE_PREBUILT has no kernels for this source and processor; no C++ compiler at hand"
    )
    library = tmp_path / build._prebuilt_name("avx2")
    library.touch()
    assert reason() == f"{library} cannot be loaded; no C++ compiler at hand"
    flags = sorted(build.LEVELS["avx2"][1] - {"avx2", "fma"})
    monkeypatch.setattr(build, "_processor", lambda: "flags: " + " ".join(flags))
    assert reason().startswith(
        "PACELINE_PREBUILT has no kernels for this processor, which has no avx2, fma; "
    )
    monkeypatch.delenv(compiled.PREBUILT)
    assert reason() == "no C++ compiler at hand"


def test_a_library_that_was_cut_short_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a full disk or a power failure: the next start compiles it anew instead of failing for good."""
    source = tmp_path / "answer.cpp"
    source.write_text(SOURCE)
    monkeypatch.delenv(compiled.PREBUILT, raising=False)
    monkeypatch.delenv(compiled.DISABLE, raising=False)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    try:
        compiled.find_compiler()
    except compiled.NotCompiledError as error:
        pytest.skip(str(error))
    for number, rest in enumerate((b"", b"\x7fELF", b"no library at all")):
        source.write_text(f"{SOURCE}// {number}\n")
        with monkeypatch.context() as patch, pytest.raises(compiled.NotCompiledError):
            patch.setattr(compiled, "_compile", lambda _c, _s, target, rest=rest: target.write_bytes(rest))
            compiled.load_compiled(source)
        assert compiled.load_compiled(source).answer() == 42
    beforehand = tmp_path / compiled._prebuilt_name(source)
    beforehand.write_bytes(b"for another machine")
    monkeypatch.setenv(compiled.PREBUILT, str(tmp_path))
    assert compiled.load_compiled(source).answer() == 42


def test_kernels_that_were_cut_short_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same; those that an image brought along are passed over."""
    library = Path(build.load_library().functions._name)
    cache = tmp_path / "kernels"
    cache.mkdir()
    (cache / library.name).touch()

    def copied(compiler: str, options: list[str], target: Path) -> None:
        target.write_bytes(library.read_bytes())

    for name, value in (("_loaded", []), ("_compile", copied), ("_prebuilt", lambda: cache / library.name)):
        monkeypatch.setattr(build, name, value)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert build.load_library().functions.paceline_can_attend(64)
