"""Brings a cluster up, step by step."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

from starling_cluster import cache, control_plane, go_builds, kernel_settings, nodes, packages, place, sweep, watch
from starling_cluster.control_plane import Endpoint
from starling_cluster.errors import HarnessError
from starling_cluster.network import Network
from starling_cluster.place import Mode, Owner, Place, State


def up_apiserver(target: Place, controllers: bool, owner: Owner | None) -> None:
    """etcd and the API server on free ports of loopback; with `controllers` also what makes StatefulSets' pods."""
    packages.require(packages.CONTROL_PLANE, root=False)
    with _begin(target, "apiserver", owner) as begun:
        kube = go_builds.build_kube()
        endpoint = Endpoint("127.0.0.1", control_plane.free_port())
        made = control_plane.start(target, kube, endpoint)
        if controllers:
            control_plane.start_controllers(target, kube, made)
        dataclasses.replace(begun, ready=True, server=endpoint.url).write(target)


def up_nodes(target: Place, count: int, owner: Owner | None) -> None:
    """A whole cluster: the control plane, DNS, and nodes that run pods."""
    packages.require(packages.NODES, root=True)
    with _begin(target, "nodes", owner) as begun:
        kube = go_builds.build_kube()
        kernel_settings.note()
        endpoint, index = nodes.start_all(target, kube, count)
        dataclasses.replace(begun, ready=True, server=endpoint.url, nodes=count, network=index).write(target)


def down(target: Place) -> None:
    sweep.take_down(target)
    sweep.take_down_dead()


def network_of(target: Place) -> Network:
    """Raises `HarnessError` for a folder in which no cluster with nodes is up."""
    found = _state(target)
    assert found.network is not None
    return Network(found.network)


def nodes_of(target: Place, only: int | None = None) -> range:
    """The numbers of its nodes, or the one that is asked for. Raises `HarnessError` where there is none."""
    found = _state(target)
    if only is None:
        return range(1, found.nodes + 1)
    if not 1 <= only <= found.nodes:
        raise HarnessError(f"N must be 1 to {found.nodes}, got {only}")
    return range(only, only + 1)


def _state(target: Place) -> State:
    found = place.read(target)
    if found is None or not found.ready or found.network is None:
        raise HarnessError(f"no cluster with nodes runs in {target.directory}")
    return found


@contextmanager
def _begin(target: Place, mode: Mode, owner: Owner | None) -> Iterator[State]:
    """Sweeps what dead runs left, claims the folder, and takes down what was made when a step fails."""
    sweep.take_down_dead()
    _claimable(target)
    target.directory.mkdir(parents=True, exist_ok=True)
    with cache.lock(target.directory):
        begun = State(mode, owner=owner)
        begun.write(target)
        if owner is not None:
            watch.start(target)
        try:
            yield begun
        except BaseException:
            sweep.take_down(target)
            raise


def _claimable(target: Place) -> None:
    if not target.directory.exists() or not any(target.directory.iterdir()):
        return
    if place.read(target) is None:
        raise HarnessError(f"DIR must be new or empty, {target.directory} holds other files")
    if not place.is_dead(target):
        raise HarnessError(f"a cluster runs in {target.directory}; `down {target.directory}` ends it")
    sweep.take_down(target)
