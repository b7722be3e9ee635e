"""Ports, endpoints and threads of every replica, from one settings tree."""

import socket
from pathlib import Path

import pytest

import cluster
from cluster.topology import (
    available_cores,
    check_ports,
    draft_replicas,
    ledger_replicas,
    router_replicas,
    shared_gpu_bundles,
    verify_replicas,
    with_free_ports,
)
from paceline.config import load_config
from paceline.errors import ConfigError

MODEL_DRAFTER = "draft.drafters.small={ kind = 'model', model = { name = 'x' } }"


def test_replicas_take_consecutive_ports():
    """Replica i of a tier listens on the tier's port + i."""
    config = load_config(None, ["cluster.draft.replicas=3", "draft.server.port=9000"])
    assert [one.server.port for one in draft_replicas(config, cores=2)] == [9000, 9001, 9002]
    assert [one.name for one in draft_replicas(config, cores=2)] == ["draft-0", "draft-1", "draft-2"]


def test_endpoints_reach_the_tier_above():
    """Every verify replica links to every draft replica, every router knows every verify replica."""
    config = load_config(None, ["cluster.verify.replicas=2"])
    verifies = verify_replicas(config, draft_addresses=["a:1", "b:2"], cores=2)
    assert all(one.config.verify.draft_endpoints == ("a:1", "b:2") for one in verifies)
    (router,) = router_replicas(config, verify_addresses=[one.local_address for one in verifies])
    assert router.config.router.verify_endpoints == ("127.0.0.1:7441", "127.0.0.1:7442")


def test_a_tier_keeps_its_port_when_other_server_settings_are_given():
    """Setting only drain_s or host does not move a tier to port 0."""
    config = load_config(
        None, ["verify.server.drain_s=1", "router.server.drain_s=1", "draft.server.drain_s=1"]
    )
    assert [config.router.server.port, config.verify.server.port, config.draft.server.port] == [
        7440,
        7441,
        7442,
    ]
    assert config.verify.server.drain_s == 1


def test_a_wildcard_host_is_called_by_loopback():
    """A tier that listens everywhere is called on 127.0.0.1 by its neighbours on this machine."""
    config = load_config(None, ["draft.server.host=0.0.0.0"])
    assert draft_replicas(config, cores=1)[0].local_address == "127.0.0.1:7442"


def test_cores_are_shared_by_the_processes_that_run_a_model():
    """An ngram draft tier leaves all cores to verify; a model drafter takes an equal share."""
    plain = load_config()
    assert draft_replicas(plain, cores=4)[0].threads == 1
    assert verify_replicas(plain, draft_addresses=[], cores=4)[0].config.model.threads == 4
    shared = load_config(None, [MODEL_DRAFTER])
    draft = draft_replicas(shared, cores=4)[0]
    assert draft.threads == 2
    model = draft.config.draft.drafters["small"].model
    assert model is not None
    assert model.threads == 2
    assert verify_replicas(shared, draft_addresses=[], cores=4)[0].config.model.threads == 2


def test_threads_said_by_the_user_stay():
    """model.threads wins over the share, and so does what Ray reserves."""
    config = load_config(None, ["model.threads=3"])
    assert verify_replicas(config, draft_addresses=[], cores=8)[0].threads == 3
    reserved = load_config(None, ["cluster.verify.num_cpus=5"])
    assert verify_replicas(reserved, draft_addresses=[], cores=8)[0].threads == 5


def test_threads_never_fall_below_one():
    """More engines than cores: one thread each."""
    config = load_config(None, [MODEL_DRAFTER, "cluster.verify.replicas=4"])
    assert verify_replicas(config, draft_addresses=[], cores=2)[0].threads == 1
    assert available_cores() >= 1


def test_port_zero_becomes_a_free_port_for_every_replica():
    """Free ports are chosen before anything starts, and no two tiers get the same."""
    config = load_config(
        None,
        ["draft.server.port=0", "verify.server.port=0", "router.server.port=0", "cluster.draft.replicas=2"],
    )
    config = with_free_ports(config)
    replicas = (
        *draft_replicas(config, cores=1),
        *verify_replicas(config, draft_addresses=[], cores=1),
        *router_replicas(config, verify_addresses=[]),
    )
    ports = [one.server.port for one in replicas]
    assert len(set(ports)) == 4
    assert 0 not in ports
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(not first <= port <= last for port in ports)  # no outgoing connection gets one of them
    check_ports(replicas, local=True)


def test_port_zero_needs_a_local_ray():
    """On another node nobody can know which port is free: refused in words."""
    with pytest.raises(ConfigError, match="fixed port"):
        draft_replicas(load_config(None, ["draft.server.port=0"]), cores=1)


def test_two_replicas_on_one_port_are_refused_by_name():
    """verify-1 would take the draft tier's default port: the error names both and says what to set."""
    config = load_config(None, ["cluster.verify.replicas=2"])
    replicas = (*draft_replicas(config, cores=1), *verify_replicas(config, draft_addresses=[], cores=1))
    with pytest.raises(
        ConfigError, match=r"draft-0 and verify-1 both listen on port 7442.*verify\.server\.port"
    ):
        check_ports(replicas, local=False)


def test_a_port_of_another_program_is_refused_before_anything_starts():
    """The error names the replica and the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = load_config(None, [f"draft.server.port={port}"])
        with pytest.raises(ConfigError, match=f"draft-0: 127.0.0.1:{port} is in use"):
            check_ports(draft_replicas(config, cores=1), local=True)


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1"])
@pytest.mark.parametrize("port", [0, 7999])
def test_a_host_that_is_not_here_is_not_called_a_busy_port(host, port):
    """Whether a name that nobody knows or another machine's address; with a port of one's own and with any."""
    config = load_config(None, [f"draft.server.host={host}", f"draft.server.port={port}"])
    with pytest.raises(ConfigError, match=f"server.host = '{host}': .*expected an address of this machine"):
        check_ports(draft_replicas(with_free_ports(config), cores=1), local=True)


def test_a_run_of_ports_beyond_the_last_is_refused():
    """65535 is the last port."""
    config = load_config(None, ["draft.server.port=65535", "cluster.draft.replicas=2"])
    with pytest.raises(ConfigError, match="65536"):
        draft_replicas(config, cores=1)


def test_a_pair_that_shares_a_gpu_gets_one_bundle():
    """Two fractions may land on two GPUs; one bundle cannot."""
    config = load_config(
        None,
        [
            "cluster.verify={ num_gpus = 0.7, num_cpus = 2, replicas = 2 }",
            "cluster.draft={ num_gpus = 0.3, resources = { rack = 1 } , replicas = 2 }",
        ],
    )
    assert shared_gpu_bundles(config) == ({"GPU": 1.0, "CPU": 2.0, "rack": 1.0},) * 2
    whole = load_config(None, ["cluster.verify.num_gpus=1", "cluster.draft.num_gpus=1"])
    assert shared_gpu_bundles(whole) == ()
    assert shared_gpu_bundles(load_config()) == ()


def test_the_example_topology_is_the_default():
    """cluster/topologies/local.toml loads, and says in words what the defaults are."""
    path = Path(cluster.__file__).parent / "topologies" / "local.toml"
    assert load_config(path) == load_config()


def test_a_shared_ledgers_port_is_named_as_it_is_set():
    """Its section stands below the router's."""
    config = load_config(None, ["cluster.router.replicas=2", "router.ledger.server.port=7440"])
    replicas = [*ledger_replicas(config), *router_replicas(config, verify_addresses=[])]
    with pytest.raises(ConfigError, match=r"router-0 both listen on port 7440.*set router\.server\.port"):
        check_ports(replicas, local=False)
    with pytest.raises(ConfigError, match=r"ledger-0 both listen on port 7440.*router\.ledger\.server\.port"):
        check_ports(replicas[::-1], local=False)


def test_several_routers_share_one_ledger():
    """A tier of its own that all of them know; a single router keeps its own, and one that is named is used."""
    two = with_free_ports(load_config(None, ["cluster.router.replicas=2", "router.ledger.server.port=0"]))
    (ledger,) = ledger_replicas(two)
    routers = router_replicas(two, verify_addresses=[], ledger_addresses=[ledger.local_address])
    assert ledger.server.port not in {0, *(one.server.port for one in routers)}
    assert {one.config.router.ledger.endpoint for one in routers} == {ledger.local_address}
    assert not ledger_replicas(load_config())
    named = load_config(None, ["cluster.router.replicas=2", "router.ledger.endpoint=there:1"])
    assert not ledger_replicas(named)
    assert router_replicas(named, verify_addresses=[])[0].config.router.ledger.endpoint == "there:1"
