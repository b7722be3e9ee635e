"""The check against a running pair of simulated devices: measured, judged, told to the router."""

import asyncio
import json
import time

from stack import running_stack

from cluster.check_cli import checked, lines_of, tell
from cluster.check_words import page_lines
from cluster.simulated import simulated
from gates.diagnose import diagnose
from gates.evidence import from_records
from gates.pairs import Verdict
from paceline.config import load_config

PORTS = ["draft.server.port=0", "verify.server.port=0", "router.server.port=0", "router.holdout=0"]


async def test_a_pair_is_checked_on_a_file_of_requests(tmp_path):
    """Outputs are the same, the good task is told from the bad one, memory is that of the pair's table; the records are read
    by the diagnosis, and the router hears who did not pass."""
    traffic = tmp_path / "traffic.jsonl"
    rows = [{"text": f"The wind {i}", "task_type": "code", "max_tokens": 30} for i in range(12)]
    rows[0] = {"raw": "The wind", "top_p": 0.9, "task_type": "code", "max_tokens": 30}
    rows += [{"text": f"A riddle {i}", "task_type": "qa", "max_tokens": 30} for i in range(12)]
    traffic.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "simulation.time_scale=0.2",
        "simulation.agreement_by_word={riddle=0.0}",
        "simulation.agreement=0.95",
    ]
    config = load_config(None, [*simulated("8b+1b"), *PORTS, *settings])
    async with running_stack(config) as stack:
        found, records = await checked(
            stack.router.address, stack.verify.address, traffic, lines_of(traffic), [], 0, 4, 30, "", lambda _: None,
            {"sequences": 0, "device_gb": 0.0, "price": 2.0, "repeats": 1},
        )  # fmt: skip
        said = await tell(stack.router.address, found)
        deadline = time.monotonic() + 20
        while not (told := (await stack.client.rollout()).rollouts) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
    assert found.same == found.requests == 24
    assert (found.facts.law, found.facts.numerics, found.facts.drafter) == (
        "coupled",
        "deterministic",
        "simulated",
    )
    assert found.memory.verdict is Verdict.YES
    assert 0 < found.memory.fit_after < found.memory.fit_before
    tasks = {task.task: task for task in found.tasks}
    assert tasks["code"].acceptance is Verdict.YES or tasks["code"].noisy  # on a busy machine it is not shown
    assert tasks["code"].acceptance is not Verdict.NO
    assert tasks["qa"].acceptance is Verdict.NO
    assert found.acceptance is Verdict.NO
    assert not found.holds
    assert "qa did not pass" in said
    assert [(one.task, one.stage) for one in told if one.task == "qa"] == [("qa", "unchecked")]
    assert max(map(len, page_lines(found))) <= 80
    assert len(records) == 72  # plain, speculative, plain again
    assert diagnose(from_records(json.dumps(record) for record in records)).speculative == 24
