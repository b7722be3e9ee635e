"""Compiles the native kernels into the cache, once for this source, compiler and processor.

An image that has no compiler brings them along, compiled for a few kinds of processor (``prebuild``).

A plain C interface instead of a Python extension: the compiler takes seconds, not half a minute, and the result
depends neither on Python nor on torch.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.compiled import (
    DISABLE,
    PREBUILT,
    NotCompiledError,
    find_compiler,
    load_or_make,
    put_in_place,
)
from paceline.model_store import cache_dir

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("lean.cpp")
_SOURCES = (_SOURCE, *sorted(_SOURCE.parent.glob("*.h")))
_OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread")
_TIMEOUT_S = 300
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "avx512-vnni": (("-march=x86-64-v4", "-mavx512vnni"), _V4 | {"avx512_vnni"}),
    "avx512": (("-march=x86-64-v4",), _V4),
    "avx2": (("-march=x86-64-v3",), _V3),
}
"""Kinds of processor that prebuilt kernels are for, the best first: compiler's options, and flags that it must have."""


class Library:
    """The loaded kernels and the name under which equality of bits is promised."""

    def __init__(self, path: Path, functions: ctypes.CDLL) -> None:
        self.functions = functions
        level, _, digest = path.stem.removeprefix("lean-").rpartition("-")
        self.name = " ".join(filter(None, ("native kernels", level, digest[:12])))


_loaded: list[Library] = []


def load_library() -> Library:
    """The kernels, compiled now if nobody has yet. Raises NotCompiledError."""
    if os.environ.get(DISABLE):
        raise NotCompiledError(f"{DISABLE} is set")
    if not _loaded:
        try:
            _loaded.append(_beforehand() or _built())
        except NotCompiledError as error:
            if remark := _none_beforehand():
                raise NotCompiledError(f"{remark}; {error}") from error
            raise
    return _loaded[0]


def prebuild(directory: Path) -> list[Path]:
    """Compile for every kind of processor into ``directory``, which an image names in PACELINE_PREBUILT."""
    compiler = find_compiler()
    if platform.machine() != "x86_64":
        return []  # other processors: torch operations, until somebody measures kernels there
    directory.mkdir(parents=True, exist_ok=True)
    common = [option for option in _OPTIONS if not option.startswith("-march")]

    def make(level: str) -> Path:
        target = directory / _prebuilt_name(level)
        _compile(compiler, [*common, *LEVELS[level][0], "-ffp-contract=off"], target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # each waits for a compiler
        return list(threads.map(make, LEVELS))


def _beforehand() -> Library | None:
    path = _prebuilt()
    if path is not None:
        with contextlib.suppress(OSError):  # cut short: as if it were not there
            return Library(path, ctypes.CDLL(str(path)))
    return None


def _prebuilt() -> Path | None:
    """What an image brought along for this very source and this processor; None: nothing."""
    directory = os.environ.get(PREBUILT)
    if not directory:
        return None
    flags = set(_processor().split())
    for level, (_, needed) in LEVELS.items():
        path = Path(directory) / _prebuilt_name(level)
        if needed <= flags and path.exists():
            return path
    return None


def _none_beforehand() -> str:
    """Why nothing that an image brought along was taken; empty where it brought nothing."""
    if not os.environ.get(PREBUILT):
        return ""
    path = _prebuilt()
    if path is not None:
        return f"{path} cannot be loaded"
    lacking = ", ".join(sorted(_V3 - set(_processor().split())))
    processor = f"this processor, which has no {lacking}" if lacking else "this source and processor"
    return f"{PREBUILT} has no kernels for {processor}"


def _prebuilt_name(level: str) -> str:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in _SOURCES)
    return f"lean-{level}-{hashlib.sha256(sources.encode()).hexdigest()[:16]}.so"


def _built() -> Library:
    compiler = find_compiler()
    options = [*_OPTIONS, f"-ffp-contract={'off' if _fuses_explicitly() else 'fast'}"]
    directory = cache_dir() / "kernels"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        identity = "\n".join(
            [*(path.read_text(encoding="utf-8") for path in _SOURCES), version, *options, _processor()]
        )
        target = directory / f"lean-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
        return Library(target, load_or_make(target, lambda: _compile(compiler, options, target)))
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiledError(f"the kernels cannot be built: {_reason(error)}") from error


def _compile(compiler: str, options: list[str], target: Path) -> None:
    _log.info("compiling kernels", extra={"compiler": compiler, "target": str(target)})
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as work:
        made = Path(work) / target.name
        subprocess.run(
            [compiler, *options, str(_SOURCE), "-o", str(made)],
            capture_output=True, text=True, check=True, timeout=_TIMEOUT_S,
        )  # fmt: skip
        put_in_place(made, target)
    _log.info("compiled kernels", extra={"seconds": round(time.monotonic() - start, 1)})


def _fuses_explicitly() -> bool:
    """Whether the source says itself where multiplication and addition are one operation."""
    return set(_processor().split()) >= _V3


def _processor() -> str:
    """Kind and abilities of the processor: what -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    wanted = (
        "vendor_id",
        "cpu family",
        "model",
        "stepping",
        "flags",
        "Features",
        "CPU implementer",
        "CPU part",
    )
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return "\n".join(
        [platform.machine(), *(f"{k.strip()}{v}" for k, v in found.items() if k.strip() in wanted)]
    )


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return lines[0].strip() if lines else "the compiler failed"
    return str(error)
