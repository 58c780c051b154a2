"""Breaks a node of a running cluster, and mends it."""

import functools

from starling_cluster import cgroups, cluster, go_builds, kubelet, network, processes, proxy, runtime
from starling_cluster.errors import HarnessError
from starling_cluster.network import Network
from starling_cluster.place import Place


def kill_kubelet(target: Place, number: int) -> None:
    """Its containers run on, and nobody reports them: the node is NotReady ten seconds later."""
    _network(target, number)
    _end(target, kubelet.name(number))


def start_kubelet(target: Place, number: int) -> None:
    net = _network(target, number)
    _refuse_if_running(target, kubelet.name(number))
    kubelet.start(target, go_builds.build_kube(), net, number)


def stop_node(target: Place, number: int) -> None:
    """As if its power were cut: no program, no container, no network."""
    net = _network(target, number)
    network.switch(net, number, "down")
    for program in (kubelet.name(number), proxy.name(number), runtime.name(number)):
        _end(target, program)
    processes.kill_all(functools.partial(cgroups.members, net.name(number)))


def start_node(target: Place, number: int) -> None:
    """Power again: kubelet finds its containers dead, and starts those that it still should run."""
    net = _network(target, number)
    _refuse_if_running(target, runtime.name(number))
    network.switch(net, number, "up")
    runtime.start(target, net, number)
    runtime.wait_until_answering(target, number)
    kube = go_builds.build_kube()
    kubelet.start(target, kube, net, number)
    proxy.start(target, kube, net, number)


def _network(target: Place, number: int) -> Network:
    cluster.nodes_of(target, number)
    return cluster.network_of(target)


def _refuse_if_running(target: Place, program: str) -> None:
    if processes.of_cluster(target, program):
        raise HarnessError(f"{program} runs already")


def _end(target: Place, program: str) -> None:
    processes.kill_all(functools.partial(processes.of_cluster, target, program))
