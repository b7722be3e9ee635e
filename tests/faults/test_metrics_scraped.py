"""What every tier's /metrics says after real requests, scraped over HTTP."""

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stack import Stack, running_stack, stack_config

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def fetch(address: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=5) as reply:
        return reply.read().decode()


async def scrape(address: str) -> Samples:
    text = await asyncio.to_thread(fetch, address)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(
        value
        for (found, have), value in samples.items()
        if found == name and labels.items() <= dict(have).items()
    )


async def load(stack: Stack) -> None:
    """Six speculative requests of 24 tokens and a plain one of 8.

    Two of them look up in the verify tier itself, so that blocks are verified however late a busy machine makes the link.
    """
    for number in range(4):
        await stack.generate(
            text="abc abc abc abc", max_tokens=24, temperature=0.0, drafter="model", k=3, seed=number
        )
    for _ in range(2):
        await stack.generate(text="abc abc abc abc", max_tokens=24, temperature=0.0, drafter="ngram", k=3)
    await stack.generate(text="abc abc", max_tokens=8, temperature=0.0)


async def test_an_operator_sees_acceptance_drafts_tail_and_running_with_one_grep(
    pair: tuple[Path, Path],
) -> None:
    """``curl ... | grep -E 'spec_accept|spec_draft|p99|num_running'`` finds all four, at the router and at verify."""
    async with running_stack(stack_config(*pair)) as stack:
        await load(stack)
        for server in (stack.router, stack.verify):
            text = await asyncio.to_thread(fetch, server.metrics_address)
            lines = [
                line
                for line in text.splitlines()
                if re.search("spec_accept|spec_draft|p99|num_running", line) and not line.startswith("#")
            ]
            for wanted in ("spec_accept", "spec_draft", "p99", "num_running"):
                assert any(wanted in line for line in lines), (server.address, wanted, lines)
        text = await asyncio.to_thread(fetch, stack.draft.metrics_address)
        for wanted in ("spec_draft", "p99", "num_running"):
            assert wanted in text


async def test_the_sums_agree_with_the_replies_and_between_the_tiers(pair: tuple[Path, Path]) -> None:
    """Rounds, drafted and accepted tokens are counted alike in both tiers; accepted never exceeds drafted."""
    async with running_stack(stack_config(*pair)) as stack:
        await load(stack)
        router = await scrape(stack.router.metrics_address)
        verify = await scrape(stack.verify.metrics_address)
        draft = await scrape(stack.draft.metrics_address)
    drafted = total(verify, "paceline_spec_decode_num_draft_tokens_total")
    accepted = total(verify, "paceline_spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= drafted
    assert total(router, "paceline_spec_draft_tokens_total") == drafted
    assert total(router, "paceline_spec_accepted_tokens_total") == accepted
    assert total(verify, "paceline_spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert total(router, "paceline_spec_accepted_tokens_per_pos_total") == accepted
    assert total(draft, "paceline_spec_draft_tokens_total") > 0
    assert total(router, "paceline_rounds_total") == total(verify, "paceline_engine_rounds_total")
    assert total(router, "paceline_tokens_total", direction="output") == 6 * 24 + 8
    assert total(verify, "paceline_engine_output_tokens_total") == 6 * 24 + 8
    assert total(router, "paceline_requests_total", outcome="length") == 7
    assert total(verify, "paceline_engine_sequences_ended_total", how="length") == 7
    assert total(router, "gen_ai_server_request_duration_seconds_count", paceline_mode="speculative") == 6
    assert total(router, "gen_ai_server_time_per_output_token_seconds_count") == 7
    assert total(router, "paceline_num_running") == total(router, "paceline_num_waiting") == 0
    assert total(verify, "paceline_engine_kv_usage_peak_ratio") > 0
    for samples in (router, verify, draft):
        assert not [name for (name, _), value in samples.items() if value != value]


async def test_the_parts_of_rounds_sum_to_what_the_replies_say(pair: tuple[Path, Path]) -> None:
    """draft + network + wait + verify in the metrics is the request's decode time, to a millisecond."""
    async with running_stack(stack_config(*pair)) as stack:
        answer = await stack.generate(text="abc abc abc", max_tokens=24, drafter="model", k=3, seed=1)
        router = await scrape(stack.router.metrics_address)
    parts_s = total(router, "paceline_round_seconds_total")
    assert parts_s == pytest.approx(answer.finished.timings.decode_s, abs=2e-3)


async def test_off_means_that_nothing_listens_and_nothing_is_counted(pair: tuple[Path, Path]) -> None:
    """``metrics_port = "off"`` leaves no endpoint and no meter."""
    off = [f'{tier}.server.metrics_port="off"' for tier in ("router", "verify", "draft")]
    async with running_stack(stack_config(*pair, off)) as stack:
        await stack.generate(text="abc", max_tokens=4)
        assert [server.metrics_address for server in (stack.router, stack.verify, stack.draft)] == [
            "",
            "",
            "",
        ]


async def test_a_metrics_port_that_is_taken_is_said_with_the_setting(pair: tuple[Path, Path]) -> None:
    """The second process says which setting to change, and does not come up half."""
    from paceline.errors import ConfigError
    from router.service import create_server

    async with running_stack(stack_config(*pair)) as stack:
        port = stack.router.metrics_address.rpartition(":")[2]
        second = await create_server(stack_config(*pair, [f"router.server.metrics_port={port}"]))
        try:
            with pytest.raises(ConfigError, match=r"router\.server\.metrics_port"):
                await second.start()
        finally:
            await second.stop(0)


async def test_every_query_of_dashboards_and_alerts_names_what_the_tiers_offer(
    pair: tuple[Path, Path],
) -> None:
    """Each metric exists in a real scrape, with each label that the query groups or filters by."""
    from deploy.trial.promql import dashboard_queries, recording_rules

    async with running_stack(stack_config(*pair, ["router.holdout=0.5"])) as stack:
        await load(stack)
        for number in range(12):  # as the router decides: some are held out
            await stack.generate(text=f"abc {number}", mode=None, task_type="rewriting", max_tokens=24)
        offered: dict[str, set[str]] = {"up": {"job", "tier", "instance"}}
        for server in (stack.router, stack.verify, stack.draft):
            for name, labels in await scrape(server.metrics_address):
                offered.setdefault(name, {"job", "tier", "instance"}).update(key for key, _ in labels)
    # Known only after minutes, or where a rollout, a guard or a comparison has begun.
    offered.setdefault("paceline_holdout_p99_ratio", set()).update({"task_type", "metric", "bound"})
    offered.setdefault("paceline_guard_state", set()).update({"task_type", "drafter", "state"})
    for where, query in dashboard_queries() + recording_rules():
        names = set(
            re.findall(
                r"\b(?:paceline|gen_ai|process)_\w+|\bup\b", re.sub(r"\{[^}]*\}|\([^()]*_mode\)", "", query)
            )
        )
        names -= {"paceline_mode"}
        assert names, where
        for name in names:
            assert name in offered, f"{where}: {name}"
        wanted = set(re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", query))
        for group in re.findall(r"\bby \(([^)]*)\)", query):
            wanted |= {label.strip() for label in group.split(",")}
        for label in wanted:
            assert any(label in offered[name] for name in names), f"{where}: {label}"
