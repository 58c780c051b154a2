"""etcd, the API server and the controllers: the part of a cluster that needs no root and no network of its own."""

import contextlib
import json
import secrets
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starling_cluster import access, certificates, processes
from starling_cluster.certificates import Certificates
from starling_cluster.errors import HarnessError
from starling_cluster.place import Place

SERVICES = "10.96.0.0/16"
FIRST_SERVICE = "10.96.0.1"
PORTS = range(20_000, 29_000)
ISSUER = "https://kubernetes.default.svc.cluster.local"


@dataclass(frozen=True)
class Endpoint:
    """Where the API server listens."""

    address: str
    port: int

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.port}"


def free_port(address: str = "127.0.0.1") -> int:
    """One that the kernel gives nobody who wants any, so what is free now still is when a program takes it."""
    while True:
        port = secrets.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((address, port))
            return port


def start(place: Place, kube: Path, endpoint: Endpoint, nodes: range = range(0)) -> Certificates:
    """Starts etcd and the API server; returns when it answers."""
    made = certificates.make(place, ["127.0.0.1", endpoint.address, FIRST_SERVICE])
    tokens = access.write_all(place, made, endpoint.url, nodes)
    place.make("bin")
    place.kubectl.symlink_to(kube)
    etcd = _start_etcd(place, kube)
    options = {
        "etcd-servers": etcd,
        "bind-address": endpoint.address,
        "advertise-address": endpoint.address,
        "secure-port": str(endpoint.port),
        "tls-cert-file": made.file("api.crt"),
        "tls-private-key-file": made.file("api.key"),
        "token-auth-file": str(tokens),
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "allow-privileged": "true",
        "service-cluster-ip-range": SERVICES,
        "service-account-issuer": ISSUER,
        "service-account-key-file": made.file("accounts.key"),
        "service-account-signing-key-file": made.file("accounts.key"),
        "kubelet-preferred-address-types": "InternalIP",
        "kubelet-client-certificate": made.file("kubelet-client.crt"),
        "kubelet-client-key": made.file("kubelet-client.key"),
        # A listener on loopback is no address that Endpoints may hold; without nodes nobody needs them.
        "endpoint-reconciler-type": "lease" if nodes else "none",
    }
    processes.spawn(place, "kube-apiserver", [str(kube), "kube-apiserver", *flags(options)], urgent=True)
    log = place.directory / "log" / "kube-apiserver.log"
    processes.wait_for(f"the API server at {endpoint.url}", lambda: answers(place, "get", "--raw", "/readyz"), log)
    return made


def start_controllers(place: Place, kube: Path, made: Certificates, more: dict[str, str] | None = None) -> None:
    """The controllers behind StatefulSets, garbage collection, service accounts and the rest."""
    options = {
        **_client(place, access.CONTROLLERS),
        "service-account-private-key-file": made.file("accounts.key"),
        "root-ca-file": made.file("ca.crt"),
        "use-service-account-credentials": "true",
        # Its default is a folder of the machine, and it makes it.
        "flex-volume-plugin-dir": str(place.directory / "plugins"),
        # A silent node is noticed after ten seconds, not fifty.
        "node-monitor-grace-period": "10s",
        "node-monitor-period": "1s",
        # Autoscalers look after two seconds, not 15.
        "horizontal-pod-autoscaler-sync-period": "2s",
        # By default they make 20 objects a second.
        "kube-api-qps": "100",
        "kube-api-burst": "200",
        **(more or {}),
    }
    processes.spawn(place, "kube-controller-manager", [str(kube), "kube-controller-manager", *flags(options)], urgent=True)
    log = place.directory / "log" / "kube-controller-manager.log"
    processes.wait_for("the service account `default`", lambda: answers(place, "get", "serviceaccount", "default"), log)


def start_scheduler(place: Place, kube: Path) -> None:
    processes.spawn(place, "kube-scheduler", [str(kube), "kube-scheduler", *flags(_client(place, access.SCHEDULER))])


def flags(options: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def kubectl(place: Place, *arguments: str, document: list[dict[str, Any]] | None = None) -> str:
    """Its output. `document` is a list of objects for its standard input."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": document}) if document else None
    done = _run_kubectl(place, arguments, text)
    if done.returncode != 0:
        raise HarnessError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def answers(place: Place, *arguments: str) -> bool:
    """Whether a kubectl command succeeds."""
    return _run_kubectl(place, arguments, None).returncode == 0


def _run_kubectl(place: Place, arguments: tuple[str, ...], text: str | None) -> subprocess.CompletedProcess[str]:
    cache = place.directory / "kubectl-cache"
    command = [str(place.kubectl), f"--kubeconfig={place.kubeconfig}", f"--cache-dir={cache}", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def _client(place: Place, user: str) -> dict[str, str]:
    """A program that serves nothing itself, so that several clusters need no ports for it, and is the only one of its kind."""
    path = str(access.kubeconfig(place, user))
    names = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return {**dict.fromkeys(names, path), "leader-elect": "false", "secure-port": "0"}


def _start_etcd(place: Place, kube: Path) -> str:
    """Returns its URL. What it stores need not survive the machine, so it never waits for the disk."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    urls = {"listen-client-urls": client, "advertise-client-urls": client, "listen-peer-urls": peer}
    cluster = {"initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}", "log-level": "warn"}
    command = [str(kube), "etcd", *flags({"data-dir": str(place.directory / "etcd"), **urls, **cluster}), "--unsafe-no-fsync"]
    processes.spawn(place, "etcd", command, urgent=True)
    return client
