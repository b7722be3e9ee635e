"""What the verify tier records of its requests is read by the diagnosis."""

import asyncio
import time

import pytest
from stack import running_stack

from cluster.diagnose_cli import evidence_of
from cluster.simulated import simulated
from gates.diagnose import diagnose
from gates.evidence import from_records
from paceline.config import load_config
from paceline.errors import ConfigError

PORTS = ["draft.server.port=0", "verify.server.port=0", "router.server.port=0"]


async def test_records_of_a_replica_are_evidence(tmp_path):
    """Rounds, tokens and numerics come through; plain and speculative runs of one request are known for a pair."""
    records = [
        f'verify.records.dir="{tmp_path}"',
        "verify.records.token_ids=true",
        "simulation.time_scale=0.02",
    ]
    config = load_config(None, [*simulated("8b+1b"), *PORTS, *records])
    async with running_stack(config) as stack:
        for index in range(3):
            request = {"text": f"Rider {index}", "max_tokens": 40, "seed": index}
            await stack.generate(**request)
            await stack.generate(**request, drafter="simulated", k=4)
    deadline = time.monotonic() + 20
    while True:  # the writer has a thread of its own
        lines = [line for path in tmp_path.glob("requests-*.jsonl") for line in path.read_text().splitlines()]
        if len(lines) >= 7 or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    evidence = from_records(lines)
    assert len(evidence.seen) == 6
    assert {one.numerics for one in evidence.seen} == {"deterministic"}
    assert len({one.key for one in evidence.seen}) == 3
    (found,) = diagnose(evidence).pictures
    assert sum(found.blocks.values()) > 20
    assert diagnose(evidence).findings == ()
    for index, part in enumerate((lines[:4], lines[4:])):
        (tmp_path / f"requests-{index}.jsonl").write_text("\n".join([*part, ""]))
    for path in tmp_path.glob("requests-*.jsonl"):
        if path.stem not in ("requests-0", "requests-1"):
            path.unlink()
    assert evidence_of(None, tmp_path, {}).times == evidence.times
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="no file there that verify"):
        evidence_of(None, tmp_path / "none", {})
