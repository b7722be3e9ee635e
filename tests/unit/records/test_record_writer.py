"""Records on disk: rotation, what is dropped, Parquet, and that nobody waits."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from paceline.config import RecordsConfig
from paceline.errors import ConfigError
from paceline.records import RecordWriter

SCHEMA = {"number": int, "text": str, "rounds": [{"drafted": int, "seconds": float}]}


def writer(directory, **settings):
    config = RecordsConfig(dir=str(directory), **settings)
    return RecordWriter(config, "things", header={"who": "test"}, schema=SCHEMA, section="verify.records")


def lines(directory):
    """All entries of all files, in the files' order."""
    return [json.loads(line) for path in sorted(directory.glob("*.jsonl")) for line in path.open()]


def test_each_file_says_first_whose_it_is_and_then_holds_the_records(tmp_path):
    """A header, then one object a line with its kind; the file is its owner's alone."""
    records = writer(tmp_path / "new")
    records.put(lambda: {"number": 1, "rounds": [{"drafted": 4, "seconds": 0.25}]})
    records.put(lambda: {"number": 2, "rounds": []})
    records.close()
    assert lines(tmp_path / "new") == [
        {"kind": "replica", "who": "test"},
        {"kind": "things", "number": 1, "rounds": [{"drafted": 4, "seconds": 0.25}]},
        {"kind": "things", "number": 2, "rounds": []},
    ]
    (path,) = (tmp_path / "new").iterdir()
    assert path.stat().st_mode & 0o077 == 0


def test_a_full_file_is_followed_by_another_and_the_oldest_go(tmp_path):
    """Files stay near their size; the newest few stay, each with its header."""
    records = writer(tmp_path, file_mb=0.001, files=3)
    for number in range(40):
        records.put(lambda number=number: {"number": number, "text": "x" * 100})
    records.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 3
    assert all(path.stat().st_size < 1300 for path in paths)
    found = lines(tmp_path)
    assert sum(entry["kind"] == "replica" for entry in found) == 3
    numbers = [entry["number"] for entry in found if entry["kind"] == "things"]
    assert numbers == list(range(numbers[0], 40))


def test_files_of_other_names_are_left_alone(tmp_path):
    """Rotation counts its own kind only."""
    (tmp_path / "letters.jsonl").write_text("dear")
    (tmp_path / "other-1.jsonl").write_text("{}")
    records = writer(tmp_path, files=1)
    records.put(lambda: {"number": 1})
    records.close()
    assert (tmp_path / "letters.jsonl").exists()
    assert (tmp_path / "other-1.jsonl").exists()


def test_a_slow_disk_costs_records_and_nobodys_time(tmp_path):
    """Behind a full queue records are dropped at once, counted, and the file says how many are missing."""
    gate, inside = threading.Event(), threading.Event()

    def slow():
        inside.set()
        gate.wait(10)
        return {"number": 0}

    records = writer(tmp_path, queue=2)
    records.put(slow)
    inside.wait(10)
    began = time.monotonic()
    for number in range(1, 6):
        records.put(lambda number=number: {"number": number})
    assert time.monotonic() - began < 1.0
    assert records.dropped == 3
    gate.set()
    records.close()
    found = lines(tmp_path)
    assert [entry["number"] for entry in found if entry["kind"] == "things"] == [0, 1, 2]
    assert {"kind": "dropped", "count": 3} in found


def test_a_record_that_fails_and_a_directory_that_cannot_be_are_counted(tmp_path, caplog):
    """Neither ends the thread nor reaches whoever recorded; the log says it once."""
    (tmp_path / "file").write_text("in the way")
    records = writer(tmp_path / "file")
    records.put(lambda: {"number": 1})
    records.put(lambda: {"number": 1 / 0})
    records.close()
    assert records.lost == 2
    assert sum("cannot be written" in message for message in caplog.messages) == 1


def test_without_pyarrow_parquet_is_refused_in_words(tmp_path, monkeypatch):
    """At start, naming the setting and what to install."""
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"verify\.records\.parquet.*pip install 'paceline\[parquet\]'"):
        writer(tmp_path, parquet=True)


def test_a_finished_file_is_there_as_parquet_too(tmp_path):
    """The same records with their structure, the header in the metadata; fields that a record lacks are null."""
    parquet = pytest.importorskip("pyarrow.parquet")
    records = writer(tmp_path, parquet=True)
    records.put(lambda: {"number": 1, "text": "a", "rounds": [{"drafted": 4, "seconds": 0.25}]})
    records.put(lambda: {"number": 2, "rounds": []})
    records.close()
    (path,) = tmp_path.glob("*.parquet")
    table = parquet.read_table(path)
    assert table.to_pylist() == [
        {"number": 1, "text": "a", "rounds": [{"drafted": 4, "seconds": 0.25}]},
        {"number": 2, "text": None, "rounds": []},
    ]
    assert json.loads(table.schema.metadata[b"paceline"]) == [{"kind": "replica", "who": "test"}]


def test_nobody_else_may_read_a_file_or_its_parquet_copy(tmp_path, monkeypatch):
    """Whatever the process's mask says, and while it is being made; what was left of an earlier try is replaced."""
    pytest.importorskip("pyarrow")
    modes = {}
    old = os.umask(0o022)
    try:
        rename = Path.rename

        def seen(self: Path, target: Path) -> Path:
            modes[self.suffix] = self.stat().st_mode & 0o777
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", seen)
        records = writer(tmp_path, parquet=True)
        unfinished = tmp_path / f"{records._prefix}-00000.unfinished"
        unfinished.write_text("of an earlier try")
        unfinished.chmod(0o644)
        records.put(lambda: {"number": 1})
        records.close()
    finally:
        os.umask(old)
    modes |= {path.suffix: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {".unfinished": 0o600, ".parquet": 0o600, ".jsonl": 0o600}


def test_a_writer_deletes_no_file_of_another_that_lives(tmp_path):
    """Two replicas, one directory: the busy one's files take nothing from the other, whose process may end any time."""
    slow, busy = writer(tmp_path, files=1, file_mb=1e-6), writer(tmp_path, files=1)
    first = writer(tmp_path, files=1)
    for records, value in ((first, 0), (slow, 1), (busy, 2)):
        records.put(lambda value=value: {"number": value})
        wait_for(lambda value=value: value in values(tmp_path))
    assert values(tmp_path) == {0, 1, 2}, "the slow one's is closed, full; no other has begun"
    for value in range(3, 6):
        slow.put(lambda value=value: {"number": value})
        wait_for(lambda value=value: value in values(tmp_path))
    assert values(tmp_path) == {0, 2, 5}, "it deletes its own"
    first.put(lambda: {"number": 6})
    for records in (slow, first):
        records.close()
    assert values(tmp_path) == {0, 2, 5, 6}
    later = writer(tmp_path, files=2)
    later.put(lambda: {"number": 7})
    later.close()
    assert 7 in values(tmp_path)
    assert 2 in values(tmp_path), "its process lives"
    assert len(list(tmp_path.iterdir())) == 3, "of those whose process has ended the newest stay"
    busy.close()


def values(directory: Path) -> set[int]:
    try:
        return {line["number"] for line in lines(directory) if "number" in line}
    except FileNotFoundError:  # deleted between being listed and being read
        return values(directory)


def wait_for(true) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
