"""C++ sources with a plain C interface, compiled into the cache once for this source, compiler and options.

For small cores that need neither torch nor this processor's special instructions; the model's kernels, which need both,
have a builder of their own (``engine/kernels/build.py``).
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from paceline.errors import PacelineError
from paceline.model_store import cache_dir

_OPTIONS = ("-O3", "-std=c++17", "-fPIC", "-shared")
DISABLE = "PACELINE_NO_COMPILER"
"""Environment variable: if set, nothing is compiled and nothing compiled is loaded."""
PREBUILT = "PACELINE_PREBUILT"
"""Environment variable: a directory of libraries that were compiled beforehand, for images without a compiler."""
_TIMEOUT_S = 120


class NotCompiledError(PacelineError):
    """There is no native code on this machine; the text says why. Everything works without it, slower."""


def find_compiler() -> str:
    """The C++ compiler of this machine. Raises NotCompiledError where there is none."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NotCompiledError("no C++ compiler at hand")
    return compiler


def load_compiled(source: Path) -> ctypes.CDLL:
    """The library made of ``source``, compiled now if nobody has yet. Raises NotCompiledError."""
    if os.environ.get(DISABLE):
        raise NotCompiledError(f"{DISABLE} is set")
    if (beforehand := os.environ.get(PREBUILT)) and (
        made := Path(beforehand) / _prebuilt_name(source)
    ).is_file():
        return ctypes.CDLL(str(made))
    compiler = find_compiler()
    directory = cache_dir() / "compiled"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        identity = "\n".join([source.read_text(encoding="utf-8"), version, os.uname().machine, *_OPTIONS])
        target = directory / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
        if not target.exists():
            directory.mkdir(parents=True, exist_ok=True)
            with (directory / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system when the process ends, however it ends
                if not target.exists():
                    _compile(compiler, source, target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None) or ""
        first = next((line for line in stderr.splitlines() if "error" in line), str(error))
        raise NotCompiledError(f"{source.name} cannot be compiled: {first.strip()}") from error


def prebuild(source: Path, directory: Path) -> Path:
    """Compile ``source`` into ``directory``, for a machine of the same kind without a compiler."""
    compiler = find_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _prebuilt_name(source)
    _compile(compiler, source, target)
    return target


def _prebuilt_name(source: Path) -> str:
    return f"{source.stem}-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"


def _compile(compiler: str, source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as work:
        made = Path(work) / target.name
        subprocess.run(
            [compiler, *_OPTIONS, str(source), "-o", str(made)],
            capture_output=True, text=True, check=True, timeout=_TIMEOUT_S,
        )  # fmt: skip
        made.rename(target)
