"""C++ sources with a plain C interface, compiled into the cache once for this source, compiler and options.

For small cores that need neither torch nor this processor's special instructions; the model's kernels, which need both,
have a builder of their own (``engine/kernels/build.py``).
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.errors import PacelineError
from paceline.model_store import cache_dir

# Without fused multiply-adds: what Python does with the same numbers must give the same to the last bit.
_OPTIONS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off")
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
    if beforehand := os.environ.get(PREBUILT):
        with contextlib.suppress(OSError):  # not there, or for another machine
            return ctypes.CDLL(str(Path(beforehand) / _prebuilt_name(source)))
    compiler = find_compiler()
    directory = cache_dir() / "compiled"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        identity = "\n".join([_text(source).decode("utf-8"), version, os.uname().machine, *_OPTIONS])
        target = directory / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
        return load_or_make(target, lambda: _compile(compiler, source, target))
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None) or ""
        first = next((line for line in stderr.splitlines() if "error" in line), str(error))
        raise NotCompiledError(f"{source.name} cannot be compiled: {first.strip()}") from error


def load_or_make(target: Path, make: Callable[[], None]) -> ctypes.CDLL:
    """The library ``target``, made now if it is not there or was cut short, by a power failure say.

    Several processes may ask at once: one makes it, the others wait. Raises OSError.
    """
    with contextlib.suppress(OSError):
        return ctypes.CDLL(str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system when the process ends, however it ends
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(target))
        make()
    return ctypes.CDLL(str(target))


def put_in_place(made: Path, target: Path) -> None:
    """Whole or not at all, even where the machine stops: a library cut short may end the process that loads it."""
    with made.open("rb") as stream:
        os.fsync(stream.fileno())
    made.rename(target)


def prebuild(source: Path, directory: Path) -> Path:
    """Compile ``source`` into ``directory``, for a machine of the same kind without a compiler."""
    compiler = find_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _prebuilt_name(source)
    _compile(compiler, source, target)
    return target


def _prebuilt_name(source: Path) -> str:
    return f"{source.stem}-{hashlib.sha256(_text(source)).hexdigest()[:16]}.so"


def _text(source: Path) -> bytes:
    """The source and the headers beside it."""
    return b"\n".join(path.read_bytes() for path in [source, *sorted(source.parent.glob("*.h"))])


def _compile(compiler: str, source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as work:
        made = Path(work) / target.name
        subprocess.run(
            [compiler, *_OPTIONS, str(source), "-o", str(made)],
            capture_output=True, text=True, check=True, timeout=_TIMEOUT_S,
        )  # fmt: skip
        put_in_place(made, target)
