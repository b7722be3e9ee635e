"""``paceline`` as a user types it, against a real server."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import scripted_router
from typer.testing import CliRunner

from cluster.actor import TierActor, TierSpec
from cluster.cli import app
from paceline.config import ServerConfig, load_config
from paceline.serving import TierServer
from paceline.v1 import router_pb2_grpc

runner = CliRunner()


@contextlib.contextmanager
def served(servicer):
    """``servicer`` on a real socket, its loop in a thread; gives the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start():
        server = TierServer(ServerConfig(), services=[])
        router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server.grpc_server)
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield server.address
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(0.0), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "router.log"
    config = load_config(None, ["router.server.port=0"])
    actor = TierActor(TierSpec("router-0", "scripted_router:create_server", config, str(log)))
    yield actor.address()
    actor.stop(0.0)


def run(*arguments: str):
    return runner.invoke(app, list(arguments), catch_exceptions=False)


def test_generate_streams_text_and_says_one_line_of_figures(address):
    """Text on standard output, nothing else there; the figures on standard error."""
    result = run("generate", "sky", "--address", address, "--seed", "3")
    assert result.exit_code == 0
    assert result.stdout == "Blåbær [sky]\n"
    assert result.stderr.splitlines() == [
        (
            "speculative ngram k=4 · 9 (5 from memory) + 7 tokens · first after 0.06 s · 60.0 tokens/s · "
            "accepted 25%, 2.00 tokens a block · ended by length"
        )
    ]


def test_generate_reads_a_prompt_from_standard_input(address):
    """A dash stands for standard input."""
    result = runner.invoke(app, ["generate", "-", "-a", address, "--raw"], input="piped")
    assert result.stdout == "Blåbær [piped]\n"


def test_generate_stats_say_where_the_time_went(address):
    """With --stats: request, reason, rounds and every part of the time."""
    result = run("generate", "sky", "-a", address, "--stats", "--task", "coding")
    assert "request req-1, task coding" in result.stderr
    assert "3 rounds, 3 with a block: 3 of 12 draft tokens accepted" in result.stderr
    assert "decode 100.0 (draft 3.0, network 6.0, wait 0.0, verify 90.0, overhead 1.0)" in result.stderr


def test_a_request_that_was_plain_by_lot_says_so_and_how_to_speculate(address):
    """With --stats; --speculative is the way round, and it stands above the lot."""
    result = run("generate", "lot", "-a", address, "--stats")
    assert "Chance decided" in result.stderr
    assert "To speculate all the same: --speculative, or --k N." in result.stderr
    forced = run("generate", "lot", "-a", address, "--stats", "--speculative")
    assert "speculative ngram k=4" in forced.stderr
    assert "Chance decided" not in forced.stderr
    both = run("generate", "lot", "-a", address, "--plain", "--speculative")
    assert both.exit_code == 2


def test_plain_is_asked_for(address):
    """--plain reaches the server."""
    assert run("generate", "sky", "-a", address, "--plain").stderr.startswith("plain · ")


def test_wrong_fields_are_said_one_a_line(address):
    """Exit code 2, no traceback."""
    result = run("generate", "wrong", "-a", address)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["sampling.temperature: -1: at least 0", "stop[0]: empty"]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            ["--plain", "--k", "4"],
            ["--plain: means no drafter: leave out --speculative, --drafter, --k and --law"],
        ),
        (["--raw", "--system", "x"], ["--system: needs the chat template: leave out --raw"]),
        (["--seed", "-1"], ["sampling.seed: -1; expected 0 to 18446744073709551615"]),
        (
            ["--max-tokens", "-5", "--k", "4294967296", "--top-p", "3"],
            [
                "max_tokens: -5; expected 0 to 4294967295",
                "decoding.k: 4294967296; expected 0 to 4294967295",
                "sampling.top_p: 3.0; wrong",
            ],
        ),
        (
            ["--system", "\udcff", "--top-p", "3"],
            [
                "chat.messages: is no Unicode text: \\udcff (surrogates not allowed)",
                "sampling.top_p: 3.0; wrong",
            ],
        ),
    ],
)
def test_all_that_is_wrong_is_named_at_once(address, options, lines):
    """Contradicting options, numbers beyond the wire, and what the server knows besides: exit code 2, one a line."""
    result = run("generate", "sky", "-a", address, *options)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == lines
    assert result.stdout == ""


def test_what_is_known_to_be_wrong_is_said_without_a_server():
    """Nobody listens there: still the field, not the connection."""
    result = run("generate", "sky", "-a", "127.0.0.1:1", "--seed", "-1")
    assert result.exit_code == 2
    assert result.stderr.startswith("sampling.seed: -1")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["generate", "\udcff", "-a", "127.0.0.1:1"], "chat.messages: is no Unicode text"),
        (["generate", "a", "--tenant", "\udcff", "-a", "127.0.0.1:1"], "tenant: is no Unicode text"),
        (["trace", "\udcff", "-a", "127.0.0.1:1"], "paceline: what was given is no Unicode text"),
        (
            ["generate", "a", "-a", "127.0.0.1:99999"],
            "address: '127.0.0.1:99999'; expected host:port with a port",
        ),
    ],
)
def test_arguments_that_nothing_can_be_done_with_are_refused_in_words(arguments, field):
    """Bytes that are no text, an address that is none: exit code 2, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(field), result.stderr


def test_every_option_reaches_its_field():
    """Sampling, the system's turn, tenant and priority."""
    servicer = scripted_router.ScriptedRouter()
    with served(servicer) as address:
        options = (
            "--system Brief. --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1"
        )
        more = "--presence-penalty 0.2 --frequency-penalty 0.3 --tenant acme --priority -2 --seed 4"
        assert run("generate", "sky", "-a", address, *options.split(), *more.split()).exit_code == 0
    (request,) = servicer.requests
    assert [(one.role, one.content) for one in request.chat.messages] == [
        ("system", "Brief."),
        ("user", "sky"),
    ]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.9, 0.1)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.1, 0.2, 0.3)
    assert (request.tenant, request.priority, sampling.seed) == ("acme", -2, 4)


def test_json_is_the_last_line(address):
    """For programs: ids, plan, figures; the text stands before it."""
    result = run("generate", "sky", "-a", address, "--json")
    text, last = result.stdout.splitlines()
    assert text == "Blåbær [sky]"
    known = json.loads(last)
    assert known["token_ids"] == [0, 1, 2]
    assert known["request_id"] == "req-1"
    assert known["usage"] == {"prompt_tokens": 9, "completion_tokens": 7, "cached_prompt_tokens": 5}
    assert (known["plan"]["mode"], known["finish_reason"]) == ("speculative", "length")
    assert known["speculative"]["draft_acceptance_rate"] == 0.25
    assert known["timings"]["decode_s"] == 0.1


def test_failures_have_exit_codes(address):
    """3: not there or no room; 1: the server failed."""
    assert run("generate", "full", "-a", address).exit_code == 3
    broken = run("generate", "broken", "-a", address)
    assert broken.exit_code == 1
    assert broken.stdout == "Blå\n"
    assert broken.stderr.startswith("paceline: ")
    gone = run("info", "-a", "127.0.0.1:1")
    assert gone.exit_code == 3
    assert (
        "127.0.0.1:1: nobody listens there (is `paceline up` running?); worth another try in 1 s"
        in gone.stderr
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("command", [["generate", "sky"], ["info"]])
def test_a_full_disk_is_said_in_words(address, command):
    """Where standard output goes to a file: exit code 1, no traceback."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cluster", *command, "-a", address],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "paceline: cannot write: No space left on device\n"


def test_trace_draws_the_last_requests(address):
    """One page a request; an unknown id is an error."""
    result = run("trace", "--last", "2", "-a", address)
    assert result.exit_code == 0
    assert result.stdout.count("req-1 · qa · speculative ngram k=4") == 2
    assert result.stdout.count("decode 100.0 ms") == 2
    assert run("trace", "nobody", "-a", address).exit_code == 1


def test_info_says_what_is_served(address):
    """Model, drafters with their state, task types."""
    result = run("info", "-a", address)
    assert "tiny, float32 on cpu, context 256" in result.stdout
    assert "ngram (1), small (2, not there now)" in result.stdout


def test_version():
    """The version of the installed package."""
    assert run("--version").stdout.startswith("paceline 0.")


@pytest.mark.parametrize("start", [[], ["--start"]])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (None, "cannot read {path}: No such file or directory"),
        ('{"txt": "a"}', "{path}: line 1: txt: unknown field; did you mean text?"),
    ],
)
def test_check_reads_its_requests_first(tmp_path, monkeypatch, start, line, said):
    """A wrong file of requests is said before a server is asked or started for them."""
    monkeypatch.setattr("cluster.check_cli._started", lambda *_: pytest.fail("started a pair in vain"))
    path = tmp_path / "requests.jsonl"
    if line is not None:
        path.write_text(line + "\n")
    report = ["--report", str(tmp_path / "report")]
    done = run("check", str(path), *start, *report, "-a", "127.0.0.1:1")
    assert (done.exit_code, done.stderr.startswith("paceline: " + said.format(path=path))) == (2, True)


def test_up_refuses_wrong_settings():
    """Exit code 2, the key named, before anything is started."""
    result = run("up", "--set", "verify.kv_slotz=3")
    assert result.exit_code == 2
    assert "verify.kv_slotz" in result.stderr


def test_up_refuses_a_missing_file():
    """The file is named."""
    result = run("up", "--config", "nowhere.toml")
    assert result.exit_code == 2
    assert "nowhere.toml" in result.stderr


def test_the_command_line_starts_without_ray_and_torch():
    """Help is there at once: neither is imported."""
    code = (
        "import sys; sys.argv = ['paceline', 'generate', '--help']\n"
        "import cluster.cli, paceline.client\n"
        "try:\n    cluster.cli.main()\n"
        "finally:\n    assert not {'ray', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)  # usually 0.4 s
