"""The gates on planted pairs of runs: each fails for its own reason, and only then."""

import json
import random
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from planted import record
from typer.testing import CliRunner

from cluster.check_advice import advice
from cluster.check_page import as_json, html
from cluster.check_words import conclusion, facts, page_lines, rollout_lines
from cluster.cli import app
from gates.bootstrap import ratio_of_quantiles, ratio_of_sums
from gates.capacity import Memory
from gates.check import Facts, judge
from gates.check_ledger import judge_ledger
from gates.evidence import from_record
from gates.pairs import PairOfRuns, Verdict
from gates.traffic import read_traffic, spread

K = 4
ROOMY = Memory(24e9, 16e9, 131072, 2.5e9, 32768)
FACTS = Facts(
    model="m", precision="float32", device="cpu", numerics="deterministic", law="coupled", drafter="model", memory=ROOMY,
    sequences=32, traffic="planted.jsonl",
)  # fmt: skip


def run(rng, index, task, tokens, *, rate=None, round_s=0.052, same=True):
    """One request: ``rate`` None is plain. Depth is adaptive: where nothing is accepted rounds become plain soon."""
    ids = [(7 * index + j) % 997 for j in range(tokens)]
    told = record(random.Random(index), index, drafter="" if rate is None else "model", ids=ids)
    told["task_type"] = task
    if rate is not None:
        told["token_ids"] = ids if same else [*ids[:-1], 998]
        histogram, rounds, plain_rounds, left, zeros = [0] * (K + 1), 0, 0, tokens - 1, 0
        while left > 0:
            if zeros >= 3:
                plain_rounds, left = plain_rounds + 1, left - 1
                continue
            depth = 0
            while depth < K and rng.random() < rate:
                depth += 1
            zeros = 0 if depth else zeros + 1
            histogram[depth] += 1
            rounds, left = rounds + 1, left - depth - 1
        stats, spent = told["speculative"], told["timings"]
        accepted = sum(depth * count for depth, count in enumerate(histogram))
        stats |= {"num_rounds": rounds + plain_rounds, "num_spec_steps": rounds, "num_draft_tokens": rounds * K,
                  "num_accepted_draft_tokens": accepted, "acceptance_histogram": histogram}  # fmt: skip
        decode_s = (rounds * round_s + plain_rounds * 0.028) * rng.uniform(0.995, 1.005)
        spent |= {
            "decode_s": decode_s,
            "draft_s": rounds * (round_s - 0.028),
            "verify_s": (rounds + plain_rounds) * 0.028,
        }
    else:
        decode_s = (tokens - 1) * 0.028 * rng.uniform(0.995, 1.005)
        told["timings"] |= {"decode_s": decode_s, "verify_s": decode_s}
    told["timings"] |= {"time_to_first_token_s": 0.06 * rng.uniform(0.99, 1.01), "total_s": decode_s + 0.06}
    return from_record(told, index)


def pairs(rates, *, requests=300, tokens=80, round_s=0.052, same=True, seed=4):
    """``rates``: acceptance by task, or a function of the request's number."""
    rng = random.Random(seed)
    found = []
    for index in range(requests):
        task = sorted(rates)[index % len(rates)]
        rate = rates[task](index) if callable(rates[task]) else rates[task]
        length = tokens + rng.randrange(-8, 9)
        found.append(
            PairOfRuns(
                run(rng, index, task, length),
                run(rng, index, task, length, rate=rate, round_s=round_s, same=same),
                run(rng, index, task, length),
            )
        )
    return found


def verdicts(check):
    return check.memory.verdict, check.acceptance, check.tail.verdict


def test_a_good_pair_passes_all_gates():
    """Acceptance 0.8 everywhere: yes, and the page says what to roll out."""
    check = judge(pairs({"code": 0.8, "rag": 0.85}), FACTS)
    assert verdicts(check) == (Verdict.YES,) * 3
    assert check.holds
    assert [task.verdict for task in check.tasks] == [Verdict.YES] * 2
    assert check.tasks[0].measured
    assert check.tasks[0].needed == pytest.approx((52 / 28 - 1) / 4, abs=0.01)
    assert check.tasks[0].speed.low > 1.3
    assert conclusion(check).startswith("YES")
    assert "code and rag" in advice(check).words


def test_a_kv_budget_too_small_fails_memory_alone():
    """512 sequences of 130 tokens do not fit beside a drafter of 2.5 GB."""
    small = Facts(**{name: getattr(FACTS, name) for name in FACTS.__dataclass_fields__} | {"sequences": 512})
    check = judge(pairs({"code": 0.8}), small)
    assert verdicts(check) == (Verdict.NO, Verdict.YES, Verdict.YES)
    assert not check.holds
    assert check.memory.fit_after < check.memory.fit_before
    assert "memory fails" in conclusion(check)


def test_a_drafter_of_acceptance_03_fails_acceptance_alone():
    """The depth gives way, so the tail holds; the share is under break-even."""
    check = judge(pairs({"code": 0.3}, round_s=0.045, tokens=160), FACTS)
    assert verdicts(check) == (Verdict.YES, Verdict.NO, Verdict.YES)
    assert check.tasks[0].share.value == pytest.approx(0.106, abs=0.02)
    assert check.tasks[0].needed == pytest.approx((45 / 28 - 1) / 4, abs=0.01)
    assert check.tasks[0].verdict is Verdict.NO


def test_a_heavy_tail_fails_the_tail_alone():
    """One request in eleven takes 1.9 times as long, the mean is 1.6 times as fast: no."""
    slow = {"code": lambda index: 0.0 if index % 11 == 0 else 0.9}
    found = pairs(slow, requests=240)
    for index in range(0, 240, 11):
        worse = found[index].speculative
        for name in ("decode_ns", "total_ns"):
            worse.row[from_names(name)] = int(1.9 * found[index].plain.row[from_names(name)])
    check = judge(found, FACTS)
    assert verdicts(check) == (Verdict.YES, Verdict.YES, Verdict.NO)
    assert check.speed.low > 1.2
    assert "tail fails" in conclusion(check)


def from_names(name):
    from router.ledger.sums import AT

    return AT[name]


def test_a_tail_of_late_first_tokens_is_said_to_be_one():
    """Tokens come fast, the first one late: the advice is about prompts."""
    found = pairs({"code": 0.9}, tokens=20)
    for index, pair in enumerate(found):
        for name in ("ttft_ns", "total_ns"):
            pair.speculative.row[from_names(name)] += int(1e9) if index % 9 == 0 else 0
    check = judge(found, FACTS)
    assert check.tail.verdict is Verdict.NO
    assert "first token" in advice(check).words


def slowed(found, way, *, factor, names=("decode_ns", "total_ns"), indices=None):
    """Times of some of the requests, so much longer."""
    for index in range(len(found)) if indices is None else indices:
        row = getattr(found[index], way).row
        for name in names:
            row[from_names(name)] = int(factor * row[from_names(name)])
    return found


def test_what_plain_decoding_does_by_itself_is_not_held_against_the_drafter():
    """A first token that is late by 40 % is a no on a quiet machine; where plain decoding run twice differs by 60 %, it is not shown."""
    late = slowed(
        pairs({"code": 0.8}), "speculative", factor=1.4, names=("ttft_ns",), indices=range(0, 300, 9)
    )
    quiet = judge(late, FACTS)
    assert quiet.tail.failing == ("first token",)
    assert not quiet.noisy
    noisy = judge(slowed(late, "again", factor=1.6, names=("ttft_ns",), indices=range(0, 300, 9)), FACTS)
    assert noisy.tail.verdict is Verdict.OPEN
    assert noisy.tail.noisy == ("first token",)
    assert conclusion(noisy).startswith("TOO NOISY TO JUDGE: the same requests decoded plainly twice")
    assert "P99 of the first token by 6" in conclusion(noisy)
    assert "NOT SHOWN" in conclusion(noisy)
    assert "nothing else runs" in advice(noisy).words


def test_a_gain_smaller_than_the_noise_is_none():
    """Twice as fast, but plain decoding was three times as slow the second time: neither yes nor no, on the page's first line."""
    check = judge(slowed(pairs({"code": 0.8}), "again", factor=3.0), FACTS)
    assert [task.verdict for task in check.tasks] == [Verdict.OPEN]
    assert check.noisy
    assert not check.holds
    assert next(page_lines(check)).startswith("TOO NOISY TO JUDGE")
    assert "paceline-check" not in conclusion(check)
    assert json.loads(as_json(check))["outcome"] == "not shown"


def test_a_large_effect_stands_above_some_noise():
    """Plain decoding moved by a tenth; a pair that is twice as fast is still one."""
    check = judge(slowed(pairs({"code": 0.97}), "again", factor=1.1), FACTS)
    assert check.holds
    assert any("by up to 11%" in " ".join(words) or "10%" in " ".join(words) for words in facts(check))


@pytest.mark.parametrize(("requests", "verdict"), [(10, "not shown"), (298, "not shown"), (299, "yes")])
def test_a_tail_is_shown_by_299_requests(requests, verdict):
    """Of fewer the slowest lies below the 99th percentile too often (0.99^298 > 0.05); the page says how many are needed."""
    check = judge(pairs({"code": 0.8}, requests=requests), FACTS)
    assert check.tail.verdict.value == verdict
    assert check.holds == (verdict == "yes")
    if not check.holds:
        assert conclusion(check).startswith("NOT SHOWN")
        assert f"of the tail: {requests} requests, 299 are needed" in conclusion(check)


def test_a_handful_of_requests_is_no_broken_tail():
    """12 requests, the first token of one late: neither yes nor no."""
    found = slowed(pairs({"code": 0.8}, requests=12), "speculative", factor=3.0, names=("ttft_ns",))
    assert judge(found, FACTS).tail.verdict is Verdict.OPEN


def test_the_headline_names_the_line_that_failed_and_its_mark():
    """And each line of the gate says what is asked of it."""
    late = slowed(pairs({"code": 0.8}), "speculative", factor=1.5, names=("ttft_ns",))
    check = judge(late, FACTS)
    assert "tail fails (P99 of the first token is 1.5" in conclusion(check)
    assert "the mark is 1.05" in conclusion(check)
    page = "\n".join(page_lines(check))
    assert page.count("FAILS") == 1
    line = next(line for line in page.splitlines() if "FAILS" in line).split()
    assert line[:2] == ["first", "token"]
    assert " ".join(line).endswith("not shown > 1.05 0% FAILS"), line


def test_a_task_checked_alone_needs_other_requests():
    """Those that picked it flatter it."""
    check = judge(pairs({"code": 0.85, "creative_writing": 0.05}), FACTS)
    assert "on other requests" in advice(check).words
    assert "as a whole; code may pass alone" in conclusion(check)
    assert "nor for any task" in conclusion(judge(pairs({"qa": 0.05}), FACTS))


def test_a_good_task_beside_a_whole_that_fails_is_not_called_go():
    """It is faster, but waits for a check of it alone; the page, the figures and the terminal say so, with the command to type."""
    known = replace(
        FACTS,
        command=("paceline", "check", "my requests.jsonl", "--load", "4"),
        traffic_path="my requests.jsonl",
    )
    check = judge(pairs({"code": 0.85, "creative_writing": 0.05}), known)
    line = next(line for line in page_lines(check) if line.startswith("code "))
    assert line.endswith("not yet")
    assert '<td class="open">not yet: faster than plain decoding, but not all three gates hold</td>' in html(
        check
    )
    told = json.loads(as_json(check))
    assert {task["task"]: task["do"] for task in told["tasks"]} == {
        "code": "not yet",
        "creative_writing": "plain",
    }
    assert told["command"] == "paceline check OTHER.jsonl --load 4 --task code"
    for name in ("check", "4", "./-odd"):  # whatever the file is called like
        odd = replace(known, command=("paceline", "check", name, "--load", "4"), traffic_path=name)
        odd_check = judge(pairs({"code": 0.85, "creative_writing": 0.05}), odd)
        assert json.loads(as_json(odd_check))["command"] == told["command"]
    passed = judge(pairs({"code": 0.85}), known)
    assert next(line for line in page_lines(passed) if line.startswith("code ")).endswith("speculate")
    assert json.loads(as_json(passed))["command"] == "paceline rollout status"


def test_the_page_says_what_the_verdict_changes():
    """With the gate off nothing, and how to switch it on; of a pair that is gone nobody was told; simulated devices are called that."""
    found = pairs({"code": 0.8})

    def page_of(**known):
        check = judge(found, replace(FACTS, **known))
        assert max(map(len, [*page_lines(check), *rollout_lines(check)])) <= 80
        return " ".join(" ".join([*page_lines(check), *rollout_lines(check)]).split()), html(check)

    words, page = page_of(gated=False)
    assert "changes nothing by itself" in words
    assert "--set router.rollout.gate=on" in words
    assert "changes nothing by itself" in page
    assert "rollout status` shows how it goes" not in words
    assert "gate is on" in page_of(gated=True)[0]
    words, _ = page_of(started=True)
    assert "start one with `paceline up`" in words
    assert "nobody was told" in words
    words, page = page_of(started=True, simulated="8b+1b")
    assert "not what yours does" in words
    assert "simulated (8b+1b): no figure here is one of real hardware" in page
    words, _ = page_of(picked=("code",))
    assert "Only code was checked: if these very requests picked it, check others" in words
    assert "it is rolled out only if all three gates hold" in words
    assert "only code: where a check of these very requests picked it, they flatter it" in words


def test_the_margin_decides_and_is_printed():
    """A task with too few requests is called that, and not open."""
    check = judge(pairs({"code": 0.8}) + pairs({"qa": 0.8}, requests=4), FACTS)
    page = "\n".join(page_lines(check))
    assert "margin 0." in page
    assert "surely above 0" in page
    assert "too few (4 of 8)" in page
    assert "1 request:" not in page


def test_outputs_that_differ_let_nothing_through():
    """Under the coupled law with deterministic numerics one other token is one too many; under ratio it is not promised."""
    found = pairs({"code": 0.8}, same=False)
    assert not judge(found, FACTS).holds
    assert "differ" in conclusion(judge(found, FACTS))
    ratio = Facts(**{name: getattr(FACTS, name) for name in FACTS.__dataclass_fields__} | {"law": "ratio"})
    assert judge(found, ratio).holds


def test_tasks_are_judged_each_for_itself():
    """code is worth it, poetry is not; three requests of a third say nothing, and are not held against the rest."""
    found = pairs({"code": 0.85, "creative_writing": 0.05}) + pairs({"qa": 0.8}, requests=3)
    check = judge(found, FACTS)
    assert {task.task: task.verdict for task in check.tasks} == {
        "code": Verdict.YES,
        "creative_writing": Verdict.NO,
        "qa": Verdict.OPEN,
    }
    assert check.acceptance is Verdict.NO
    assert any("not judged" in note for note in check.notes)
    assert "--task for code" in advice(check).words


def test_what_nobody_told_is_not_shown():
    """Without the device's size memory is open, and open does not pass."""
    unknown = Facts(**{name: getattr(FACTS, name) for name in FACTS.__dataclass_fields__} | {"memory": None})
    check = judge(pairs({"code": 0.8}), unknown)
    assert check.memory.verdict is Verdict.OPEN
    assert "--verify names one" in " ".join(" ".join(page_lines(check)).split())
    assert not check.holds
    assert not judge([], FACTS).holds


def test_the_page_fits_80_columns_and_says_the_verdict_first():
    """The same words in HTML, which is well-formed and self-contained, and in JSON."""
    check = judge(pairs({"code": 0.85, "creative_writing": 0.05}), FACTS)
    lines = list(page_lines(check))
    assert lines[0].startswith("NO: acceptance fails")
    assert max(map(len, lines)) <= 80
    page = html(check)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count("<svg") == 2
    body = page[page.index("<body>") : page.index("</body>")] + "</body>"
    ET.fromstring(body.replace("<br>", "<br/>"))
    told = json.loads(as_json(check))
    assert told["holds"] is False
    assert told["acceptance"] == "no"
    assert told["tasks"][0]["speed"]["low"] > 1


def test_intervals_hold_what_they_promise():
    """The ratio of sums of 60 pairs lies within its 95 % interval in at least 180 of 200 samples (fewer: odds under 1 in 100)."""
    import numpy as np

    rng = np.random.default_rng(5)
    hits = 0
    for seed in range(200):
        plain = rng.lognormal(0, 0.4, 60)
        after = plain / 1.5 * rng.lognormal(0, 0.2, 60)
        found = ratio_of_sums(plain, after, seed=seed)
        hits += found.low <= 1.5 * np.exp(-0.02) <= found.high
    assert hits >= 180


def test_the_tail_of_equal_times_is_one():
    """And of none nothing is said."""
    import numpy as np

    times = np.linspace(1, 2, 200)
    found = ratio_of_quantiles(times, times, 0.99)
    assert (found.low, found.value, found.high) == (1.0, 1.0, 1.0)
    assert ratio_of_sums(np.array([1.0]), np.array([1.0])) is None
    assert ratio_of_sums(np.zeros(5), np.zeros(5)) is None


def test_traffic_comes_in_several_shapes():
    """Text, messages, turns of a benchmark; foreign categories are left to the router; a wrong line is named."""
    lines = [
        '{"text": "a", "task_type": "code", "max_tokens": 9}',
        "",
        '{"messages": [{"role": "user", "content": "b"}], "temperature": 0.5, "seed": 8}',
        '{"question_id": 81, "category": "writing", "turns": ["c", "d"]}',
    ]
    first, second, third = read_traffic(lines, ["code"])
    assert (first.messages, first.task, first.max_tokens) == ((("user", "a"),), "code", 9)
    assert (second.temperature, second.seed) == (0.5, 8)
    assert (third.key, third.task, third.messages) == ("81", "", (("user", "c"),))
    (fourth,) = read_traffic(['{"raw": "def f", "top_p": 0.9, "top_k": 40, "min_p": null, "stop": "END"}'])
    assert fourth.said() == {"text": "def f", "temperature": 0.0, "top_p": 0.9, "top_k": 40, "stop": ("END",)}
    assert second.said() == {"messages": (("user", "b"),), "temperature": 0.5, "stop": ()}
    with pytest.raises(ValueError, match="line 1: no prompt"):
        read_traffic(["{}"])
    assert [asked.key for asked in spread([first, second, third, first], 2)] == [first.key, third.key]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a", "task_typ": "code"}', "line 1: task_typ: unknown field; did you mean task_type?"),
        ('{"text": "a", "temprature": 1}', "line 1: temprature: unknown field; did you mean temperature?"),
        ('{"text": "a", "task_type": "coding"}', r"line 1: task_type: 'coding'; .*did you mean code\?"),
        ('{"text": "a", "max_tokens": "9"}', "line 1: max_tokens: '9'; expected a whole number from 1 on"),
        ('{"text": "a", "max_tokens": 0}', "line 1: max_tokens: 0"),
        ('{"text": "a", "temperature": -1}', "line 1: temperature: -1; expected a number >= 0"),
        ('{"text": "a", "temperature": NaN}', "line 1: temperature: nan; expected a number >= 0"),
        ('{"text": "a", "temperature": 1' + 400 * "0" + "}", "line 1: temperature: 1000"),
        ('{"raw": "a", "top_p": 1.5}', r"line 1: top_p: 1.5; expected a number in \(0, 1\]"),
        ('{"raw": "a", "top_k": 4294967296}', "line 1: top_k: 4294967296; expected a whole number"),
        ('{"raw": "a", "stop": ["", "b"]}', "line 1: stop: ''; expected text"),
        (f'{{"raw": "a", "stop": {json.dumps(["a"] * 17)}}}', "line 1: stop: 17 texts; expected at most 16"),
        (f'{{"raw": "a", "stop": "{"a" * 2000}"}}', "line 1: stop: 2000 characters; expected at most 1024"),
        ('{"raw": "a", "stop": "\\ud83d"}', "line 1: stop: half of a character"),
        ('{"text": "\\ud83d a"}', "line 1: text: half of a character"),
        ('{"turns": [""]}', "line 1: turns: empty"),
        ('{"messages": [{"role": "user", "content": ""}]}', r"line 1: messages\[0\].content: empty"),
        ('{"raw": "a", "text": "b"}', "line 1: raw: there is text already"),
        ('{"raw": ["a"]}', r"line 1: raw: \['a'\]; expected text"),
        ('{"text": "a", "seed": true}', "line 1: seed: True"),
        ('{"text": 5}', "line 1: text: 5; expected text"),
        ('{"text": "a", "prompt": "b"}', "line 1: prompt: there is text already"),
        (
            '{"messages": [{"role": "usr", "content": "a"}]}',
            r"messages\[0\].role: 'usr'; .*did you mean user\?",
        ),
        ("[1]", "line 1: expected an object"),
        ("{", "line 1: "),
        ('{"text": ' + 100_000 * "[", "line 1: "),
    ],
)
def test_what_is_not_understood_is_refused(line, words):
    """With line, field and the nearest name: a slip would change what is measured."""
    with pytest.raises(ValueError, match=words):
        read_traffic([line], ["code", "qa"])


def test_two_requests_of_one_id_are_refused():
    """The records are put together by it."""
    with pytest.raises(ValueError, match="line 2: id: 4 is that of line 1 already"):
        read_traffic(['{"text": "a", "id": 4}', '{"text": "b", "id": 4}'])


def test_a_ledger_is_judged_by_its_own_bounds():
    """What the canary's or the holdout's lot parted: the good one passes acceptance, the slow one does not; P99 of 400 is not shown."""
    from planted import planted

    verdict = {}
    for name in ("healthy", "slow"):
        world = planted(name)
        rows = [(group, row) for group, _, row in world.rows()]
        holdout = [*json.loads(world.holdout()), ["code", "auto", "length", [[600, 400]]]]
        check = judge_ledger(rows, json.dumps(holdout), FACTS)
        verdict[name] = check.acceptance
        assert check.tail.verdict is (Verdict.OPEN if name == "healthy" else Verdict.NO)
        assert check.memory.length > 100
        assert not check.holds
        assert max(map(len, page_lines(check))) <= 80
        assert html(check)
    assert verdict == {"healthy": Verdict.YES, "slow": Verdict.NO}


def test_a_heavy_tail_of_a_ledger_is_a_no():
    """400 requests are too few for bounds of P99, and enough for counting those beyond it."""
    from planted import planted

    world = planted("tail")
    rows = [(group, row) for group, _, row in world.rows()]
    check = judge_ledger(rows, world.holdout(), FACTS)
    assert check.tail.verdict is Verdict.NO
    assert [task.verdict for task in check.tasks] == [Verdict.NO]
    assert any("tail of code" in note for note in check.notes)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, "either a file of requests or --ledger"),
        (["x.jsonl", "--simulate", "8b+1b"], 2, "need --start"),
        (["--ledger", "nowhere.sqlite"], 2, "no such file"),
        (["--ledger", "nowhere.sqlite", "--report", "theirs"], 2, "records of another check lie there"),
        (["x.jsonl", "--address", "127.0.0.1:1"], 2, "cannot read x.jsonl"),
        (["good.jsonl", "--address", "127.0.0.1:1"], 3, "nobody listens there"),
    ],
)
def test_wrong_input_has_an_exit_status_of_its_own(arguments, status, words, tmp_path, monkeypatch):
    """2 is wrong input, 3 nobody there; 1 is kept for gates that do not hold."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.jsonl").write_text("{}\n")
    (tmp_path / "good.jsonl").write_text('{"text": "a"}\n')
    done = CliRunner().invoke(app, ["check", *arguments])
    assert done.exit_code == status, done.output
    assert words in " ".join(done.output.split())


def test_records_are_for_their_owner_only(tmp_path):
    """Token ids are as good as text to who has the tokenizer."""
    from cluster.options import write_file

    path = tmp_path / "records.jsonl"
    path.write_text("old")
    write_file(path, "new", private=True)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)


async def test_a_task_is_looked_for_where_the_router_tells_it_too(monkeypatch):
    """A request that names none is asked for one token, plainly, and goes where the router puts it."""
    from cluster import check_run
    from gates.traffic import Asked

    async def task_of(client, asked, tenant):
        return "code" if "def" in asked.messages[0][1] else "qa"

    monkeypatch.setattr(check_run, "_task_of", task_of)
    said = [("a", "code"), ("def b", ""), ("c", ""), ("d", "qa")]
    requests = [Asked(text, (("user", text),), task) for text, task in said]
    found = await check_run.of_tasks(None, requests, ["code"], load=2, progress=lambda _: None)
    assert [(one.key, one.task) for one in found] == [("a", "code"), ("def b", "")]


async def test_plain_runs_lie_on_either_side_of_the_speculative_one(monkeypatch):
    """Which of the two counts takes turns; the third is the one that tells the noise."""
    from cluster import check_run
    from gates.traffic import Asked

    asked_for = []

    async def one(client, asked, way, tenant, max_tokens, drafter):
        asked_for.append(way)
        told = record(random.Random(1), 1, drafter="m" if way == "speculative" else "", ids=[1] * 9)
        told["plan"] |= {"drafter_version": "1"}
        return told | {"key": asked.key, "again": way == "again"}

    monkeypatch.setattr(check_run, "_one", one)
    requests = [Asked(str(number), (("user", "a"),)) for number in range(12)]
    said = []
    runs = await check_run.run_pairs(
        None, requests, load=1, repeats=1, max_tokens=9, drafter="", progress=said.append
    )
    assert said[1] == "request 6 of 12, each plainly, speculatively, plainly again; about 0 s left"
    turns = asked_for[2:]  # the warm-up
    assert [turns[first] for first in range(0, 36, 6)] == [
        "again", "speculative", "plain", "plain", "speculative", "again",
    ]  # fmt: skip
    assert all(pair.again is not None and pair.again.again for pair in runs.pairs)
    assert len(runs.records) == 36


def test_the_command_for_another_check_asks_for_the_same_tasks():
    """Who checked one task on a noisy machine is not told to check all of them."""
    known = replace(FACTS, command=("paceline", "check", "a"), traffic_path="a", picked=("code",))
    check = judge(pairs({"code": 0.8}, requests=12), known)
    assert advice(check).command == "paceline check OTHER.jsonl --task code --repeats 3"


def test_a_noisy_check_is_not_sent_round_in_circles():
    """Repeats are advised once; where they were made already, quiet and more requests are."""
    late = slowed(
        pairs({"code": 0.8}, requests=60),
        "speculative",
        factor=1.4,
        names=("ttft_ns",),
        indices=range(0, 60, 3),
    )
    found = slowed(late, "again", factor=1.6, names=("ttft_ns",), indices=range(0, 60, 3))
    known = replace(
        FACTS, command=("paceline", "check", "mine.jsonl", "--report", "mine"), traffic_path="mine.jsonl"
    )
    first = judge(found, known)
    assert first.noisy
    assert advice(first).command == "paceline check OTHER.jsonl --report mine --repeats 3"
    again = advice(judge(found, replace(known, repeats=3)))
    assert "Repeating did not help" in again.words
    assert again.command == "paceline check OTHER.jsonl --report mine --repeats 3"
    assert "299 requests" in again.words


def test_a_round_that_seems_faster_than_a_step_is_no_reserve():
    """Break-even is never below nothing: the margin is at most the accepted share."""
    found = pairs({"code": 0.3}, round_s=0.026)
    task = judge(found, FACTS).tasks[0]
    assert task.needed == 0.0
    assert task.margin.value == pytest.approx(task.share.value)


def test_a_full_device_that_gives_less_is_said_in_the_first_lines():
    """All gates hold, and yet the drafter's memory costs more than it gains where memory is what is short."""
    check = judge(pairs({"code": 0.8}), FACTS)
    assert check.holds
    assert check.memory.tokens_ratio < 1
    assert "a device that is full gives 0." in conclusion(check)
