"""Records to files, on a thread of its own: nobody waits for a disk, what does not fit is dropped and counted.

    NAME-<time>-<process>-00000.jsonl     first line: the header (``kind`` says what a line is)
    NAME-<time>-<process>-00000.parquet   the same once the file is full or closed, where Parquet is asked for

A file is closed when it has reached its size; of a process's own files and those of processes that have ended the newest
stay. The files of another one that writes into the same directory are its own: it holds a lock on its last one.
"""

import contextlib
import fcntl
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from paceline.config import RecordsConfig
from paceline.records.parquet import Schema, for_the_owner, require_parquet, to_parquet

log = logging.getLogger(__name__)

Record = Mapping[str, Any]


class RecordWriter:
    """See the module. ``put`` may be called from any thread; ``close`` once.

    ``name`` is the files' and each record's ``kind``. ``header`` is the first line of each file. Raises ConfigError where
    Parquet is asked for and cannot be written; a directory that cannot be written to costs the records and is logged.
    """

    def __init__(
        self, config: RecordsConfig, name: str, *, header: Record, schema: Schema, section: str
    ) -> None:
        if config.parquet:
            require_parquet(f"{section}.parquet")
        self.dropped = 0
        """Records that found the queue full."""
        self.lost = 0
        """Records that could not be written."""
        self._config = config
        self._name = name
        self._header = header
        self._schema = schema
        self._prefix = f"{name}-{time.time_ns()}-{os.getpid()}"
        self._queue: queue.Queue[Callable[[], Record] | None] = queue.Queue(config.queue)
        self._dropped_said = 0
        self._number = 0
        self._path: Path | None = None
        self._file: IO[str] | None = None
        self._held: int | None = None
        self._size = 0
        self._complained = False
        self._thread = threading.Thread(target=self._run, name=f"records-{name}", daemon=True)
        self._thread.start()

    def put(self, record: Callable[[], Record]) -> None:
        """Write what ``record`` gives, which is called on the writer's thread. Never blocks."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, and end; what takes longer than ``timeout_s`` is given up."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self.dropped or self.lost:
            log.warning(
                "records are not complete",
                extra={"records": self._name, "dropped": self.dropped, "lost": self.lost},
            )

    # --- writer's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            self._write(record)
            if self._queue.empty():
                self._flush()
        self._finish_file()
        self._hold(None)

    def _write(self, record: Callable[[], Record]) -> None:
        try:
            if self._file is None:
                self._begin_file()
            if self.dropped > self._dropped_said:
                count, self._dropped_said = self.dropped - self._dropped_said, self.dropped
                self._line({"kind": "dropped", "count": count})
            self._line({"kind": self._name, **record()})
            if self._size >= self._config.file_mb * 1_000_000:
                self._finish_file()
        except Exception as error:  # a full disk, a record that is none: nobody else's matter
            self.lost += 1
            self._complain(error)

    def _begin_file(self) -> None:
        directory = Path(self._config.dir)
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{self._prefix}-{self._number:05}.jsonl"
        self._number += 1
        self._file = for_the_owner(self._path, "w")
        self._hold(os.dup(self._file.fileno()))
        self._size = 0
        self._line({"kind": "replica", **self._header})
        try:
            self._forget_old()
        except OSError as error:
            self._complain(error)

    def _line(self, entry: Record) -> None:
        assert self._file is not None, "a file has begun"
        self._size += self._file.write(_encoded(entry) + "\n")

    def _flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._complain(error)

    def _finish_file(self) -> None:
        file, path, self._file = self._file, self._path, None
        if file is None or path is None:
            return
        try:
            file.close()
            if self._config.parquet:
                to_parquet(path, self._name, self._schema)
        except Exception as error:
            self._complain(error)

    def _hold(self, descriptor: int | None) -> None:
        """Say to others that this writer lives: a lock on its last file, also while that is closed and no new one begun."""
        if descriptor is not None:
            with contextlib.suppress(OSError):  # a file system without locks: then nobody can take one either
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        if self._held is not None:
            os.close(self._held)
        self._held = descriptor

    def _forget_old(self) -> None:
        """By the time of the last change."""
        files = self._files()
        others = {path for path in files if _writer_of(path) != self._prefix}
        live = {_writer_of(path) for path in others if _held(path)}
        # A writer that began another file in the meantime holds that one only.
        live |= {_writer_of(path) for path in self._files() - files}
        old = [path for path in files if path != self._path and _writer_of(path) not in live]
        old.sort(key=lambda path: (_changed_ns(path), path))
        for path in old[: max(0, len(old) + 1 - self._config.files)]:
            for suffix in (".parquet", ".unfinished", ".jsonl"):
                path.with_suffix(suffix).unlink(missing_ok=True)

    def _files(self) -> set[Path]:
        shape = re.compile(rf"{re.escape(self._name)}-\d+-\d+-\d{{5,}}\.jsonl")
        return {path for path in Path(self._config.dir).iterdir() if shape.fullmatch(path.name)}

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            log.error("records cannot be written", extra={"records": self._name, "why": str(error)})


def _writer_of(path: Path) -> str:
    return path.name.rpartition("-")[0]


def _held(path: Path) -> bool:
    """Whether the process that writes it lives."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # held; or one cannot know
        return True
    return False


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another writer forgot it
        return 0


def _encoded(entry: Record) -> str:
    """JSON, lists element by element: one call for all of a long record would hold the interpreter for milliseconds."""
    return "{" + ",".join(f"{_json(key)}:{_value(value)}" for key, value in entry.items()) + "}"


def _value(value: object) -> str:
    return "[" + ",".join(map(_json, value)) + "]" if isinstance(value, list) else _json(value)


_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
