"""The harness's commands: their words, and what each calls."""

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from starling_cluster import builder, cluster, enforcement, faults, gateway_crds, go_builds, packages, place, watch
from starling_cluster.errors import HarnessError
from starling_cluster.network import Network
from starling_cluster.place import Owner, Place


def main() -> int:
    try:
        options = _parser().parse_args()
        options.run(options)
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class _Group:
    """Commands that share a parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(self, name: str, text: str, run: Callable[[Namespace], None]) -> argparse.ArgumentParser:
        parser = self._commands.add_parser(name, help=text, description=text)
        parser.set_defaults(run=run)
        return parser

    def of_cluster(self, name: str, text: str, run: Callable[[Namespace], None]) -> argparse.ArgumentParser:
        parser = self.add(name, text, run)
        parser.add_argument("directory", metavar="DIR", type=place.parse, help="the cluster's folder")
        return parser

    def group(self, name: str, text: str) -> "_Group":
        return _Group(self._commands.add_parser(name, help=text, description=text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python e2e/cluster", description="Run a real Kubernetes on this machine.")
    commands = _Group(parser)
    commands.add("setup", "install what nodes and images need (Debian, Ubuntu)", lambda _: packages.install())
    commands.add("build", "build Kubernetes into the cache, if it is not there", lambda _: print(go_builds.build_kube()))
    commands.add("helm", "build Helm into the cache, if it is not there; prints its path", lambda _: print(go_builds.build_helm()))
    commands.add("crds", "download HTTPRoute's and InferencePool's CRDs; prints their paths", _print_crds)
    _add_apiserver(commands.group("apiserver", "etcd and an API server, without nodes and without root"))
    _add_nodes(commands)
    _add_images(commands.group("image", "build images and bring them to nodes"))
    watching = "take DIR down when its owner ends (`up --owner` starts it)"
    commands.of_cluster("watch", watching, lambda options: watch.wait_and_take_down(options.directory))
    enforcing = commands.of_cluster("policies", "enforce NetworkPolicies on the nodes of DIR (`up` starts it)", _enforce)
    enforcing.add_argument("network", metavar="INDEX", type=int, help="the number of its network")
    enforcing.add_argument("nodes", metavar="COUNT", type=int)
    return parser


def _print_crds(_: Namespace) -> None:
    print(*gateway_crds.download(), sep="\n")


def _add_apiserver(commands: _Group) -> None:
    up = commands.of_cluster("up", "start it; DIR/kubeconfig is the administrator's", _apiserver_up)
    up.add_argument("--controllers", action="store_true", help="also the controller manager: StatefulSets, garbage collection, ...")
    _add_owner(up)
    commands.of_cluster("down", "end it and remove DIR", _down)


def _add_nodes(commands: _Group) -> None:
    up = commands.of_cluster("up", "start a cluster with nodes; DIR/kubeconfig is the administrator's", _up)
    up.add_argument("--nodes", type=int, default=2, metavar="COUNT", help="2 by default")
    _add_owner(up)
    commands.of_cluster("down", "end the cluster of DIR, remove DIR, and sweep what dead runs left", _down)
    for name, text, run in (
        ("kill-kubelet", "kill -9 the kubelet of node N; its containers run on", faults.kill_kubelet),
        ("start-kubelet", "start it again", faults.start_kubelet),
        ("stop-node", "cut the power of node N: programs, containers and network", faults.stop_node),
        ("start-node", "power again", faults.start_node),
    ):
        _add_fault(commands, name, text, run)


def _add_fault(commands: _Group, name: str, text: str, run: Callable[[Place, int], None]) -> None:
    parser = commands.of_cluster(name, text, lambda options: run(options.directory, options.node))
    parser.add_argument("node", metavar="N", type=int, help="1 for the node n1")


def _add_images(commands: _Group) -> None:
    build = commands.add("build", "build a Dockerfile of the checkout", _image_build)
    build.add_argument("directory", metavar="DIR", type=place.parse, nargs="?", help="load it into the nodes of this cluster too")
    build.add_argument("--tag", required=True, help="such as localhost/starling-agent:dev")
    build.add_argument("--file", "-f", type=Path, required=True, help="the Dockerfile")
    build.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="may be given more than once")
    load = commands.of_cluster("load", "bring an image of podman's to every node", _image_load)
    load.add_argument("image", metavar="IMAGE", help="such as localhost/starling-agent:dev")
    load.add_argument("--node", type=int, metavar="N", help="to this node only: images of torch take minutes")
    commands.add("base", "make the base image, if it is not there; prints its name", lambda _: print(builder.make_base()))


def _add_owner(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--owner", type=int, metavar="PID", help="take the cluster down when this process has ended")


def _apiserver_up(options: Namespace) -> None:
    cluster.up_apiserver(options.directory, options.controllers, _owner(options))
    print(f"export KUBECONFIG={options.directory.kubeconfig}")


def _up(options: Namespace) -> None:
    cluster.up_nodes(options.directory, options.nodes, _owner(options))
    print(f"export KUBECONFIG={options.directory.kubeconfig}")


def _down(options: Namespace) -> None:
    cluster.down(options.directory)


def _owner(options: Namespace) -> Owner | None:
    return None if options.owner is None else Owner.of(options.owner)


def _image_build(options: Namespace) -> None:
    builder.build(options.tag, options.file, options.build_arg)
    if options.directory is not None:
        builder.load(options.directory, options.tag, cluster.nodes_of(options.directory))


def _image_load(options: Namespace) -> None:
    builder.load(options.directory, options.image, cluster.nodes_of(options.directory, options.node))


def _enforce(options: Namespace) -> None:
    enforcement.enforce(options.directory, Network(options.network), range(1, options.nodes + 1))
