"""A finished file of records as Parquet: one row a record, lists and structures nested. pyarrow is an optional extra."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

from paceline.errors import ConfigError

Kind: TypeAlias = "type | list[Kind] | Mapping[str, Kind]"
"""``str``, ``int``, ``float``, ``bool``; ``[kind]`` is a list of it, ``{name: kind}`` a structure."""
Schema: TypeAlias = Mapping[str, Kind]
"""The fields of a record. A record may lack some: they are null."""


def require_parquet(setting: str) -> None:
    """Raises ConfigError that says what to install where Parquet cannot be written."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{setting} = true needs pyarrow, which is not installed here: pip install 'paceline[parquet]'"
        ) from error


def for_the_owner(path: Path, mode: str) -> IO[Any]:
    """A new file in place of what was at ``path``, which nobody else may read, whatever the process's mask says."""
    path.unlink(missing_ok=True)
    # Prompts may be in it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    return os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8")


def to_parquet(lines: Path, kind: str, schema: Schema) -> Path:
    """The records of ``kind`` in a JSONL file, as a Parquet file beside it. All other lines go into its metadata."""
    import pyarrow as pa
    from pyarrow import parquet

    records: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    with lines.open(encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            (records if entry["kind"] == kind else others).append(entry)
    fields = pa.schema([(name, _arrow(pa, one)) for name, one in schema.items()])
    table = pa.Table.from_pylist(records, schema=fields)
    table = table.replace_schema_metadata({"paceline": json.dumps(others)})
    target = lines.with_suffix(".parquet")
    unfinished = target.with_suffix(".unfinished")
    with for_the_owner(unfinished, "wb") as out:
        parquet.write_table(table, out)
    unfinished.rename(target)  # whoever finds it finds it whole
    return target


def _arrow(pa: Any, kind: Kind) -> Any:
    if isinstance(kind, list):
        return pa.list_(_arrow(pa, kind[0]))
    if isinstance(kind, Mapping):
        return pa.struct([(name, _arrow(pa, one)) for name, one in kind.items()])
    return {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}[kind]
