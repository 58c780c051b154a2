"""Keeps the nodes' packet filters as the cluster's NetworkPolicies say: a program of the harness, as a network plugin's is."""

import base64
import json
import queue
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from starling_cluster import access, processes
from starling_cluster.network import NAMESPACES, Network
from starling_cluster.place import Place
from starling_cluster.policies import Object, Seen, ruleset

NAME = "policies"
WATCHED = {
    "policies": "/apis/networking.k8s.io/v1/networkpolicies",
    "pods": "/api/v1/pods",
    "namespaces": "/api/v1/namespaces",
}
TOGETHER_SECONDS = 0.05
"""Changes that come together are one new set of rules."""
AGAIN_SECONDS = 0.5


def start(place: Place, net: Network, numbers: range) -> None:
    """In the background, until the cluster is taken down."""
    main = Path(__file__).parents[1]
    command = [sys.executable, str(main), "policies", str(place.directory), str(net.index), str(len(numbers))]
    processes.spawn(place, NAME, command, urgent=True)


def enforce(place: Place, net: Network, numbers: range) -> None:
    """Follows the objects for ever, and gives every node the rules that they mean."""
    server = Server(place)
    changed: queue.Queue[None] = queue.Queue()
    views = {kind: View(server, path, changed) for kind, path in WATCHED.items()}
    for view in views.values():
        threading.Thread(target=view.follow, daemon=True).start()
    there = ""
    while True:
        changed.get()
        time.sleep(TOGETHER_SECONDS)
        while not changed.empty():
            changed.get_nowait()
        if all(view.complete for view in views.values()):
            wanted = ruleset(Seen(**{kind: view.objects() for kind, view in views.items()}))
            if wanted != there:
                for number in numbers:
                    _apply(net, number, wanted)
                there = wanted


def _apply(net: Network, number: int, rules: str) -> None:
    command = ["nsenter", f"--net={NAMESPACES / net.name(number)}", "nft", "-f", "-"]
    done = subprocess.run(command, input=rules, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{net.name(number)}: {done.stderr}\n{rules}", file=sys.stderr, flush=True)


class Server:
    """The API server, asked as the administrator."""

    def __init__(self, place: Place) -> None:
        config = json.loads(access.kubeconfig(place, access.ADMIN).read_text())
        cluster = config["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._url: str = cluster["server"]
        self._token: str = config["users"][0]["user"]["token"]
        self._trust = ssl.create_default_context(cadata=authority)

    def lines(self, path: str) -> Iterator[Object]:
        """Each line of the answer, as it comes. Raises `OSError` when the server does not answer."""
        request = urllib.request.Request(self._url + path, headers={"Authorization": f"Bearer {self._token}"})
        with urllib.request.urlopen(request, context=self._trust, timeout=330) as answer:
            for line in answer:
                yield json.loads(line)


class View:
    """All objects of one kind, as of now."""

    def __init__(self, server: Server, path: str, changed: "queue.Queue[None]") -> None:
        self.complete = False
        self._server = server
        self._path = path
        self._changed = changed
        self._objects: dict[str, Object] = {}

    def objects(self) -> tuple[Object, ...]:
        return tuple(self._objects.copy().values())

    def follow(self) -> None:
        """Lists, then watches, and begins again whenever the watch ends."""
        while True:
            try:
                (listed,) = self._server.lines(self._path)
                self._objects = {one["metadata"]["uid"]: one for one in listed["items"]}
                self.complete = True
                self._changed.put(None)
                self._watch(listed["metadata"]["resourceVersion"])
            except (OSError, ValueError):
                time.sleep(AGAIN_SECONDS)

    def _watch(self, version: str) -> None:
        for event in self._server.lines(f"{self._path}?watch=true&timeoutSeconds=300&resourceVersion={version}"):
            if event["type"] == "ERROR":
                return
            one = event["object"]
            if event["type"] == "DELETED":
                self._objects.pop(one["metadata"]["uid"], None)
            else:
                self._objects[one["metadata"]["uid"]] = one
            self._changed.put(None)
