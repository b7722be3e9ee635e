"""From one settings tree to one entry per replica: where it listens, whom it calls, how many CPU threads it gets.

Nothing is started here and Ray is not imported. Replica i of a tier with a fixed port listens on port + i; port 0
means any free port, chosen before anything starts because a replica must come back on the same one. Such ports lie
outside the range from which the system gives ports to outgoing connections: one of those took a chosen port once,
before the tier was there. What is left of the race is the launcher's: it tries again with other ports.
"""

import errno
import math
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import ModelConfig, PacelineConfig, ServerConfig, TierPlacement
from paceline.errors import ConfigError

FIRST_PORT = 10_000
"""Chosen ports lie above: below are the well-known ones, ours too."""

_NOT_HERE = (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_AGAIN)
"""What the system says of a host that it does not know, or that is another machine."""

WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]", "")


@dataclass(frozen=True, slots=True)
class Replica:
    """One process to start."""

    tier: str
    """draft, verify, router or ledger."""
    index: int
    config: PacelineConfig
    """The whole tree, this replica's own section resolved."""
    server: ServerConfig
    placement: TierPlacement
    threads: int
    """CPU threads of its engine, 1 where it has none."""

    @property
    def name(self) -> str:
        """Shown to people."""
        return f"{self.tier}-{self.index}"

    @property
    def section(self) -> str:
        """Where its settings stand."""
        return "router.ledger" if self.tier == "ledger" else self.tier

    @property
    def local_address(self) -> str:
        """host:port as seen from this machine."""
        host = "127.0.0.1" if self.server.host in WILDCARD_HOSTS else self.server.host
        return f"{host}:{self.server.port}"


def draft_replicas(config: PacelineConfig, *, cores: int) -> tuple[Replica, ...]:
    """The draft tier. Only drafters that run a model get more than one thread."""
    placement = config.cluster.draft
    drafts = any(drafter.kind == "model" for drafter in config.draft.drafters.values())
    threads = _threads(config, placement, cores) if drafts else 1
    drafters = {
        name: drafter.model_copy(update={"model": _with_threads(drafter.model, threads)})
        if drafter.model is not None
        else drafter
        for name, drafter in config.draft.drafters.items()
    }
    return tuple(
        Replica(
            "draft",
            index,
            config.model_copy(
                update={"draft": config.draft.model_copy(update={"server": server, "drafters": drafters})}
            ),
            server,
            placement,
            threads,
        )
        for index, server in enumerate(_servers(config.draft.server, placement))
    )


def verify_replicas(
    config: PacelineConfig, *, draft_addresses: Sequence[str], cores: int
) -> tuple[Replica, ...]:
    """The verify tier; each replica links to every draft replica."""
    placement = config.cluster.verify
    threads = config.model.threads or _threads(config, placement, cores)
    return tuple(
        Replica(
            "verify",
            index,
            config.model_copy(
                update={
                    "model": _with_threads(config.model, threads),
                    "verify": config.verify.model_copy(
                        update={"server": server, "draft_endpoints": tuple(draft_addresses)}
                    ),
                }
            ),
            server,
            placement,
            threads,
        )
        for index, server in enumerate(_servers(config.verify.server, placement))
    )


def router_replicas(
    config: PacelineConfig, *, verify_addresses: Sequence[str], ledger_addresses: Sequence[str] = ()
) -> tuple[Replica, ...]:
    """The router tier; each replica knows every verify replica, and the ledger that they share."""
    placement = config.cluster.router
    ledger = config.router.ledger
    if ledger_addresses:
        ledger = ledger.model_copy(update={"endpoint": ledger_addresses[0]})
    return tuple(
        Replica(
            "router",
            index,
            config.model_copy(
                update={
                    "router": config.router.model_copy(
                        update={
                            "server": server,
                            "verify_endpoints": tuple(verify_addresses),
                            "ledger": ledger,
                        }
                    )
                }
            ),
            server,
            placement,
            1,
        )
        for index, server in enumerate(_servers(config.router.server, placement))
    )


def ledger_replicas(config: PacelineConfig) -> tuple[Replica, ...]:
    """The ledger's one writer, where several routers share one; a single router keeps its own."""
    if not shares_ledger(config):
        return ()
    server = config.router.ledger.server
    return (Replica("ledger", 0, config, server, TierPlacement(), 1),)


def shares_ledger(config: PacelineConfig) -> bool:
    """Whether a ledger is to be started beside the routers."""
    return config.cluster.router.replicas > 1 and not config.router.ledger.endpoint


def shared_gpu_bundles(config: PacelineConfig) -> tuple[dict[str, float], ...]:
    """Bundle i is what verify replica i and draft replica i need together, if they are to share one GPU.

    Ray may put two fractions on two GPUs of a node; a bundle of one placement group stays on one. Empty when the two
    shares do not add up to one GPU or less: whole GPUs need no pairing.
    """
    verify, draft = config.cluster.verify, config.cluster.draft
    if not (verify.num_gpus and draft.num_gpus) or verify.num_gpus + draft.num_gpus > 1:
        return ()
    bundle = {"GPU": verify.num_gpus + draft.num_gpus, "CPU": verify.num_cpus + draft.num_cpus}
    for placement in (verify, draft):
        for name, amount in placement.resources.items():
            bundle[name] = bundle.get(name, 0.0) + amount
    bundle = {name: amount for name, amount in bundle.items() if amount}
    return (bundle,) * min(verify.replicas, draft.replicas)


def with_free_ports(config: PacelineConfig) -> PacelineConfig:
    """``config`` with every port 0 replaced by a run of ports, free now, as long as the tier has replicas."""
    update = {}
    taken: set[int] = set()
    for tier in ("draft", "verify", "router"):
        section = getattr(config, tier)
        if section.server.port == 0:
            port = _free_run(section.server.host, getattr(config.cluster, tier).replicas, taken)
            server = section.server.model_copy(update={"port": port, **_any_metrics_port(section.server)})
            update[tier] = section.model_copy(update={"server": server})
    if shares_ledger(config) and config.router.ledger.server.port == 0:
        ledger = config.router.ledger
        port = _free_run(ledger.server.host, 1, taken)
        server = ledger.server.model_copy(update={"port": port, **_any_metrics_port(ledger.server)})
        ledger = ledger.model_copy(update={"server": server})
        update["router"] = update.get("router", config.router).model_copy(update={"ledger": ledger})
    return config.model_copy(update=update)


def _any_metrics_port(server: ServerConfig) -> dict[str, int]:
    """Beside a port that is chosen nobody knows what the port 2000 above is used for."""
    return {"metrics_port": 0} if server.metrics_port == "auto" else {}


def chooses_ports(config: PacelineConfig) -> bool:
    """Whether any tier's port is left to us."""
    return any(getattr(config, tier).server.port == 0 for tier in ("draft", "verify", "router"))


def check_ports(replicas: Sequence[Replica], *, local: bool) -> None:
    """Raises ConfigError where two replicas want one port, or (``local``) another program has it."""
    owner: dict[tuple[str, int], str] = {}
    for replica in replicas:
        key = (replica.server.host, replica.server.port)
        if key in owner:
            raise ConfigError(
                f"{owner[key]} and {replica.name} both listen on port {replica.server.port}: replica i of a tier "
                f"takes port + i; set {replica.section}.server.port further away, or to 0"
            )
        owner[key] = replica.name
        if local and not _is_free(*key):
            raise ConfigError(
                f"{replica.name}: {replica.server.address} is in use (another `paceline up`?); "
                f"set {replica.section}.server.port to another port, or to 0 for any free one"
            )
    _check_metrics_ports(replicas, owner, local=local)


def _check_metrics_ports(
    replicas: Sequence[Replica], owner: dict[tuple[str, int], str], *, local: bool
) -> None:
    for replica in replicas:
        port = replica.server.metrics_on
        if not port:
            continue
        key = (replica.server.host, port)
        taken = owner.get(key) or ("another program" if local and not _is_free(*key) else "")
        if taken:
            raise ConfigError(
                f"{replica.name}: port {port}, where its /metrics would be, is taken by {taken}; "
                f'set {replica.section}.server.metrics_port to another port, to 0 for any free one, or to "off"'
            )
        owner[key] = f"{replica.name}'s /metrics"


def available_cores() -> int:
    """CPU cores this process may use: affinity, and the quota of its control group where one is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):  # no control group, or "max": no quota
        pass
    return max(cores, 1)


def _threads(config: PacelineConfig, placement: TierPlacement, cores: int) -> int:
    """What Ray reserves, else an equal share of the cores for every process that runs a model.

    A two-thread engine beside another busy one on two cores is 3-5 times slower than two of one thread each.
    """
    if placement.num_cpus >= 1:
        return int(placement.num_cpus)
    engines = config.cluster.verify.replicas
    if any(drafter.kind == "model" for drafter in config.draft.drafters.values()):
        engines += config.cluster.draft.replicas
    return max(1, cores // engines)


def _with_threads(model: ModelConfig, threads: int) -> ModelConfig:
    return model if model.threads else model.model_copy(update={"threads": threads})


def _servers(server: ServerConfig, placement: TierPlacement) -> list[ServerConfig]:
    if server.port == 0:
        raise ConfigError("port 0 needs a local Ray: on a joined cluster every tier has a fixed port")
    last = server.port + placement.replicas - 1
    if last > 65535:
        raise ConfigError(f"port {server.port} and {placement.replicas} replicas: the last port is {last}")
    fixed = server.metrics_port if isinstance(server.metrics_port, int) and server.metrics_port else None
    return [
        server.model_copy(
            update={"port": server.port + index}
            | ({"metrics_port": fixed + index} if fixed is not None else {})
        )
        for index in range(placement.replicas)
    ]


def _free_run(host: str, length: int, taken: set[int]) -> int:
    lowest, highest = _quiet_ports()
    for _ in range(200):
        first = lowest + secrets.randbelow(highest - lowest)
        ports = range(first, first + length)
        if taken.isdisjoint(ports) and ports[-1] <= highest and all(_is_free(host, port) for port in ports):
            taken.update(ports)
            return first
    raise ConfigError(f"no {length} free ports in a row on {host}")


def _quiet_ports() -> tuple[int, int]:
    """First and last of the longer run of ports that the system does not use for outgoing connections."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        first, last = map(int, text.split())
    except (OSError, ValueError):  # another system: the range that IANA names
        first, last = 49152, 65535
    runs = [(FIRST_PORT, first - 1), (last + 1, 65535)]
    longest = max(runs, key=lambda run: run[1] - run[0])
    return longest if longest[1] - longest[0] > 1000 else (FIRST_PORT, 65535)


def _is_free(host: str, port: int) -> bool:
    """Raises ConfigError where ``host`` is no address of this machine: no port of it would do."""
    try:
        with socket.create_server((host or "", port)):
            return True
    except OSError as error:
        if error.errno in _NOT_HERE:
            raise ConfigError(
                f"server.host = {host!r}: {error.strerror}; expected an address of this machine"
            ) from error
        return False
