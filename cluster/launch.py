"""The only place that knows every service: starts the tiers under Ray, waits for them, takes them down again.

    with running_cluster(load_config()) as cluster:
        ... cluster.router_address ...

Ray places and restarts; no byte of a request passes through it.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.actor import HOST_NAME, TIER_CLASSES, TierSpec
from cluster.progress import Progress
from cluster.session import LaunchError, cause, is_alive, ray_module, ray_session, work_directory
from cluster.topology import (
    Replica,
    available_cores,
    check_ports,
    chooses_ports,
    draft_replicas,
    ledger_replicas,
    router_replicas,
    shared_gpu_bundles,
    verify_replicas,
    with_free_ports,
)
from paceline import few_wakes
from paceline.config import PacelineConfig
from paceline.model_store import resolve_model_dir
from paceline.serving.server import CANNOT_LISTEN
from paceline.v1 import router_pb2, router_pb2_grpc

FACTORIES = {
    "draft": "draft_service.service:create_server",
    "verify": "verify_service.service:create_server",
    "router": "router.service:create_server",
    "ledger": "router.ledger.service:create_server",
}

POLL_S = 0.1
SAY_S = 0.5
LINK_S = 10.0
"""Longest wait for the drafters to be linked once all tiers serve."""
LOG_TAIL_LINES = 12
LOG_LINE_CHARACTERS = 300
PORT_ATTEMPTS = 3
"""Tries with other ports when one that was chosen here is taken before its tier listens."""
SETTINGS_FILE = "settings.toml"
NO_PROXY = (("grpc.enable_http_proxy", 0),)

PASSED_ENVIRONMENT = ("OTEL_", "PACELINE_", "HF_")
"""Variables that begin like this reach every tier, on other nodes too."""


class PortTakenError(LaunchError):
    """A tier found its port taken, or its address not of this machine."""


@dataclass(slots=True)
class Tier:
    """A replica that was started, and its actor."""

    replica: Replica
    handle: Any
    address: str
    log_path: Path | None


@dataclass(slots=True)
class Cluster:
    """A running stack. Owned by ``running_cluster``."""

    tiers: list[Tier] = field(default_factory=list)
    log_dir: Path | None = None
    """Where the tiers log, one file each, and all settings in SETTINGS_FILE; None on a joined cluster, whose nodes keep
    their own logs."""
    drain_s: float = 0.0
    """Longest time that requests in flight get at the end."""
    served: bool = False
    """Whether all tiers have served: from then on there may be requests to drain."""
    gpu_groups: list[Any] = field(default_factory=list)
    """Placement group i holds verify replica i and draft replica i."""

    def addresses(self, tier: str) -> tuple[str, ...]:
        """host:port of every replica of ``tier`` (draft, verify, router, ledger)."""
        return tuple(one.address for one in self.tiers if one.replica.tier == tier)

    @property
    def router_address(self) -> str:
        """What clients call: the first router."""
        return self.addresses("router")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The replicas, in the order they were started."""
        return tuple(one.replica.name for one in self.tiers)

    def pid(self, name: str) -> int:
        """Process of a replica, for example draft-0; waits for it while Ray restarts it."""
        return int(ray_module().get(self._tier(name).handle.pid.remote()))

    def pids(self, *, timeout_s: float | None = None) -> dict[str, int]:
        """Process of every replica that answers within ``timeout_s``. Raises LaunchError when Ray gave one up."""
        ray = ray_module()
        asked = {one.handle.pid.remote(): one for one in self.tiers}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
        pids = {}
        for ref in answered:
            try:
                pids[asked[ref].replica.name] = int(ray.get(ref))
            except ray.exceptions.RayError as error:
                raise LaunchError(_failure(asked[ref], cause(error))) from error
        return pids

    def log_tail(self, name: str, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines that a replica logged; empty when its log is on another node."""
        return _tail(self._tier(name).log_path, lines)

    def wait_serving(self, *, timeout_s: float, progress: Progress | None = None) -> None:
        """Until every replica's health is SERVING. Raises LaunchError naming those that are not."""
        wait_serving(self.tiers, timeout_s=timeout_s, progress=progress)

    def _tier(self, name: str) -> Tier:
        for one in self.tiers:
            if one.replica.name == name:
                return one
        raise KeyError(f"no replica {name!r}; there are {', '.join(self.names)}")


@contextlib.contextmanager
def running_cluster(
    config: PacelineConfig, *, progress: Progress | None = None, keep_logs: bool = False
) -> Iterator[Cluster]:
    """The whole stack, healthy; on leaving, requests are drained and everything that was started here is gone.

    With ``keep_logs`` the tiers' logs stay (``log_dir``). ``progress`` is told in words, again and again, what is
    being waited for. Raises ConfigError for a topology that cannot be and LaunchError when a tier does not come up
    within ``cluster.ready_s``.
    """
    say = progress or (lambda _text: None)
    local = not config.cluster.ray_address
    if local:
        _find_models(config, say)
    drains = (config.draft.server.drain_s, config.verify.server.drain_s, config.router.server.drain_s)
    with contextlib.ExitStack() as stack:
        log_dir = stack.enter_context(work_directory(keep_logs=keep_logs)) if local else None
        check_ports(_plan(with_free_ports(config) if local else config), local=local)
        say("starting Ray" if local else f"joining Ray at {config.cluster.ray_address}")
        stack.enter_context(ray_session(config.cluster, log_dir))
        cluster = Cluster(log_dir=log_dir, drain_s=max(drains))
        try:
            _bring_up(config, cluster, local=local, say=say)
            say("")
            yield cluster
        except KeyboardInterrupt:
            say("interrupted: taking down what was started")
            raise
        finally:
            _take_down(cluster, local=local)


def _bring_up(config: PacelineConfig, cluster: Cluster, *, local: bool, say: Progress) -> None:
    """Start every tier and wait for it; again with other ports where one that was chosen here is taken meanwhile."""
    for attempt in range(1, PORT_ATTEMPTS + 1):
        try:
            _bring_up_once(with_free_ports(config) if local else config, cluster, local=local, say=say)
            return
        except PortTakenError:
            if attempt == PORT_ATTEMPTS or not (local and chooses_ports(config)):
                raise
            say("a port was taken meanwhile: again with others")
            _take_down(cluster, local=local)


def _bring_up_once(config: PacelineConfig, cluster: Cluster, *, local: bool, say: Progress) -> None:
    deadline = time.monotonic() + config.cluster.ready_s
    if cluster.log_dir:
        settings = "\n".join(config.to_toml_lines())
        (cluster.log_dir / SETTINGS_FILE).write_text(settings + "\n", encoding="utf-8")
    cluster.gpu_groups = [
        ray_module().util.placement_group([bundle]) for bundle in shared_gpu_bundles(config)
    ]
    if local:
        planned = _plan(config)
        check_ports(planned, local=True)
        for replica in planned:
            cluster.tiers.append(_start(replica, cluster))
    else:
        _start_in_order(config, cluster)
    wait_serving(cluster.tiers, timeout_s=deadline - time.monotonic(), progress=say)
    cluster.served = True
    _await_drafters(cluster, set(config.draft.drafters), say)


def _find_models(config: PacelineConfig, say: Progress) -> None:
    """Before anything is started: a model that is not there is a ConfigError, a hub model is fetched here and now."""
    wanted = [config.model, *(one.model for one in config.draft.drafters.values() if one.model is not None)]
    for name in {model.name: None for model in wanted}:
        say(f"model {name}")
        resolve_model_dir(name)


def _plan(config: PacelineConfig) -> tuple[Replica, ...]:
    """Every replica, as if all were on this machine."""
    cores = available_cores()
    drafts = draft_replicas(config, cores=cores)
    verifies = verify_replicas(config, draft_addresses=[one.local_address for one in drafts], cores=cores)
    ledgers = ledger_replicas(config)
    routers = router_replicas(
        config,
        verify_addresses=[one.local_address for one in verifies],
        ledger_addresses=[one.local_address for one in ledgers],
    )
    return (*drafts, *verifies, *ledgers, *routers)


def _start_in_order(config: PacelineConfig, cluster: Cluster) -> None:
    """On a joined cluster a tier's addresses are known only when Ray has placed it: draft, then verify, then router."""

    def start(replicas: Sequence[Replica]) -> list[str]:
        tiers = [_start(replica, cluster) for replica in replicas]
        cluster.tiers.extend(tiers)
        for tier in tiers:
            tier.address = _first_answer(tier, config.cluster.ready_s)
        return [tier.address for tier in tiers]

    cores = available_cores()
    drafts = start(draft_replicas(config, cores=cores))
    verifies = start(verify_replicas(config, draft_addresses=drafts, cores=cores))
    ledgers = start(ledger_replicas(config))
    start(router_replicas(config, verify_addresses=verifies, ledger_addresses=ledgers))


def _first_answer(tier: Tier, timeout_s: float) -> str:
    ray = ray_module()
    try:
        return str(ray.get(tier.handle.address.remote(), timeout=timeout_s))
    except ray.exceptions.GetTimeoutError as error:
        raise LaunchError(
            f"{tier.replica.name} was not placed or did not start within {timeout_s:.0f} s; does the cluster have "
            f"the resources {tier.replica.placement.resources or 'it asks for'}?"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise LaunchError(f"{tier.replica.name} failed to start:\n{cause(error)}") from error


def _start(replica: Replica, cluster: Cluster) -> Tier:
    """Asks Ray for the replica's actor; does not wait for it."""
    log_dir = cluster.log_dir
    log_path = log_dir / f"{replica.name}.log" if log_dir else None
    if log_dir:
        section, _, _ = replica.section.partition(".")
        lines = replica.config.to_toml_lines(sections=("model", section, "telemetry"))
        (log_dir / f"{replica.name}.settings").write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = TierSpec(replica.name, FACTORIES[replica.tier], replica.config, str(log_path or ""))
    actor = ray_module().remote(TIER_CLASSES[replica.tier])
    handle = actor.options(
        num_cpus=replica.placement.num_cpus,
        num_gpus=replica.placement.num_gpus,
        resources=replica.placement.resources,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=4,  # `pid` is answered while `stop` drains
        runtime_env={"env_vars": _environment(replica.threads)},
        scheduling_strategy=_strategy(replica, cluster),
    ).remote(spec)
    return Tier(replica, handle, replica.local_address, log_path)


def _strategy(replica: Replica, cluster: Cluster) -> Any:
    """The pair's placement group where a GPU is shared, else Ray's default."""
    if replica.tier in ("router", "ledger") or replica.index >= len(cluster.gpu_groups):
        return None
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(
        placement_group=cluster.gpu_groups[replica.index], placement_group_bundle_index=0
    )


def _environment(threads: int) -> dict[str, str]:
    """What must be set before torch and gRPC are imported, and what the user set for our processes.

    Ray sets OMP_NUM_THREADS=1 itself. Passive waiting: an engine that spins between two steps slows the other tiers
    on the same cores 3-5 times.
    """
    passed = {
        key: value
        for key, value in os.environ.items()
        if key.startswith(PASSED_ENVIRONMENT) and key != HOST_NAME
    }
    own = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {few_wakes.VARIABLE: os.environ.get(few_wakes.VARIABLE, few_wakes.VALUE)} | passed | own


def wait_serving(tiers: Sequence[Tier], *, timeout_s: float, progress: Progress | None = None) -> None:
    """Until the health of every one of ``tiers`` is SERVING.

    Two things are watched at once, a constructor that fails and a health service that is not there yet, so this
    asks every 0.1 s instead of waiting for one of them.
    """
    ray = ray_module()
    started = time.monotonic()
    said_at = 0.0
    created = {tier.replica.name: tier.handle.ready.remote() for tier in tiers}
    missing = {tier.replica.name: tier for tier in tiers}
    with contextlib.ExitStack() as stack:
        channels = {
            name: stack.enter_context(grpc.insecure_channel(tier.address, options=NO_PROXY))
            for name, tier in missing.items()
        }
        while True:
            for name, tier in list(missing.items()):
                done, _ = ray.wait([created[name]], timeout=0)
                if done:
                    try:
                        ray.get(created[name])
                    except ray.exceptions.RayError as error:
                        reason = cause(error)
                        kind = PortTakenError if CANNOT_LISTEN in reason else LaunchError
                        raise kind(_failure(tier, reason)) from error
                    if _is_serving(channels[name]):
                        del missing[name]
            if not missing:
                return
            elapsed = time.monotonic() - started
            if elapsed > timeout_s:
                up = len(tiers) - len(missing)
                reasons = [_failure(tier, "not SERVING yet") for tier in missing.values()]
                raise LaunchError(
                    f"{up} of {len(tiers)} tiers are up after {elapsed:.0f} s; missing:\n"
                    + "\n".join(reasons)
                )
            if progress and elapsed - said_at >= SAY_S:
                progress(f"waiting for {', '.join(map(_with_activity, missing.values()))}")
                said_at = elapsed
            time.sleep(POLL_S)


def _with_activity(tier: Tier) -> str:
    """The tier, and what it said last in its log: ``verify-0 (loading the model)``."""
    found = re.search(r' msg=("(?:[^"\\]|\\.)*"|\S+)', _tail(tier.log_path, 1))
    doing = found[1].strip('"') if found else "starting"
    return f"{tier.replica.name} ({doing})"


def _await_drafters(cluster: Cluster, expected: set[str], say: Progress) -> None:
    """Until every router has heard of every drafter, so that the first request can be speculative.

    Not an error when they do not come: the draft tier is disposable, requests are decoded plainly without it.
    """
    deadline = time.monotonic() + LINK_S
    for address in cluster.addresses("router"):
        with grpc.insecure_channel(address, options=NO_PROXY) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            while missing := expected - _available_drafters(stub):
                if time.monotonic() > deadline:
                    say(
                        f"drafters not linked yet: {', '.join(sorted(missing))}; decoding plainly until they are"
                    )
                    return
                time.sleep(POLL_S)


def _available_drafters(stub: router_pb2_grpc.RouterServiceStub) -> set[str]:
    try:
        info = stub.GetServerInfo(router_pb2.GetServerInfoRequest(), timeout=2.0)
    except grpc.RpcError:
        return set()
    return {drafter.name for drafter in info.drafters if drafter.available}


def _is_serving(channel: grpc.Channel) -> bool:
    try:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _failure(tier: Tier, reason: str) -> str:
    text = f"{tier.replica.name} ({tier.address}): {reason}"
    if tier.log_path is None:
        return text
    tail = _tail(tier.log_path, LOG_TAIL_LINES) or "nothing yet"
    return f"{text}\n  last lines of {tier.log_path}:\n{_indent(tail)}"


def _tail(path: Path | None, lines: int) -> str:
    if path is None or not path.exists():
        return ""
    last = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return "\n".join(line.partition(" exc=")[0][:LOG_LINE_CHARACTERS] for line in last)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _take_down(cluster: Cluster, *, local: bool) -> None:
    """Drains router, then verify, then draft, and ends their processes; without a drain where not all ever served."""
    ray = ray_module()
    pids: list[int] = []
    for tier_name in ("router", "ledger", "verify", "draft"):
        tiers = [one for one in cluster.tiers if one.replica.tier == tier_name]
        try:
            with contextlib.suppress(ray.exceptions.RayError):  # a tier that has died has nothing to drain
                if cluster.served:
                    pids += _drain(tiers)
        finally:  # an interrupted drain, too, ends what it drained
            for one in tiers:
                ray.kill(one.handle, no_restart=True)
    for group in cluster.gpu_groups:
        ray.util.remove_placement_group(group)
    cluster.tiers, cluster.gpu_groups, cluster.served = [], [], False
    if local:
        _await_end(pids, timeout_s=5.0)


def _drain(tiers: Sequence[Tier]) -> list[int]:
    """Waits for the tiers' requests; gives the processes that answered."""
    ray = ray_module()
    alive = [one.handle.pid.remote() for one in tiers]
    known, _ = ray.wait(alive, num_returns=len(alive), timeout=1.0) if alive else ([], [])
    pids: list[int] = ray.get(known)
    if tiers and len(known) == len(tiers):
        stopping = [one.handle.stop.remote() for one in tiers]
        drain_s = max(one.replica.server.drain_s for one in tiers)
        ray.wait(stopping, num_returns=len(stopping), timeout=drain_s + 5.0)
    return pids


def _await_end(pids: Sequence[int], *, timeout_s: float) -> None:
    """Until these processes of ours are gone; what is left then is killed."""
    deadline = time.monotonic() + timeout_s
    left = [pid for pid in pids if is_alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if is_alive(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
