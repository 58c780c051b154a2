"""Takes a cluster down, whoever made it and wherever that run died. Everything is found by name or mark, nothing by memory."""

import functools
import os
import shutil
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from starling_cluster import cache, cgroups, kernel_settings, network, place, processes
from starling_cluster.errors import HarnessError
from starling_cluster.network import Network
from starling_cluster.place import Place

CNI_RESULTS = Path("/var/lib/cni/results")
CONTAINER_LOGS = Path("/var/log/containers")
SOCKETS = (Path("/run/containerd/s"), Path("/var/lib/kubelet/device-plugins"))


def take_down(target: Place) -> None:
    """Ends all processes, unmounts, removes the network and the folder. Twice does no harm."""
    with _alone():
        _take_down(target)


def take_down_dead() -> None:
    """Takes down the clusters of this machine that nobody can want any more."""
    with _alone():
        folders = {process.cluster for process in processes.running()} | {folder for folder in _bridges().values() if folder}
        for folder in sorted(folders):
            if place.is_dead(Place(folder)):
                _take_down(Place(folder))
    # Under the lock of those who make bridges, so that one without a name is not merely one that is being made.
    with cache.lock(network.LOCK):
        for index, owner in _bridges().items():
            if owner is None:
                network.remove(Network(index))


def _alone() -> AbstractContextManager[None]:
    """One at a time: the watcher of a dead run, and the run after it, both find the same things to remove."""
    return cache.lock(cache.folder() / "sweep.lock")


def _take_down(target: Place) -> None:
    networks = [Network(index) for index, folder in _bridges().items() if folder == target.directory]
    # Kubelets and containerd go with the marked ones, so that nothing starts a container again.
    processes.kill_all(lambda: processes.of_cluster(target))
    for owned in networks:
        processes.kill_all(functools.partial(cgroups.members, owned.every_name))
    _unmount(target.directory)
    for owned in networks:
        cgroups.remove(owned.every_name)
        network.remove(owned)
    if networks:
        _remove_traces(target.directory)
        if not _bridges():
            kernel_settings.put_back()
    _remove_folder(target)


def _bridges() -> dict[int, Path | None]:
    """None for an ordinary user, who has none and can remove none."""
    return network.bridges() if os.geteuid() == 0 and shutil.which("ip") else {}


def _unmount(folder: Path) -> None:
    """Deepest first; lazily, for a process that is being reaped may still hold one. Volumes are bind mounts of others' files,
    so the folder must not be removed while one is left.
    """
    for point in sorted(_mounts(folder), reverse=True):
        subprocess.run(["umount", "--lazy", point], check=False)
    if left := _mounts(folder):
        raise HarnessError(f"these mounts stay: {', '.join(left)}; unmount them, then `down {folder}` again")


def _mounts(folder: Path) -> list[str]:
    points = (line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
    # The kernel writes spaces and the like as octal escapes.
    names = [point.encode().decode("unicode_escape") for point in points]
    return [name for name in names if name.startswith(f"{folder}/")]


def _remove_traces(folder: Path) -> None:
    """What containerd and kubelet leave in folders that they do not let one choose."""
    for link in _entries(CONTAINER_LOGS):
        if link.is_symlink() and str(link.readlink()).startswith(f"{folder}/"):
            link.unlink()
    for result in _entries(CNI_RESULTS):
        if f'"{folder}/' in result.read_text():
            result.unlink()
    listening = Path("/proc/net/unix").read_text()
    for socket in (entry for top in SOCKETS for entry in _entries(top)):
        if socket.is_socket() and str(socket) not in listening:
            socket.unlink()


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _remove_folder(target: Place) -> None:
    """The record last: without it a folder is not known to be a cluster's, and would not be removed the next time."""
    if not target.record.exists():
        return
    for path in target.directory.iterdir():
        if path == target.record:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    target.record.unlink()
    target.directory.rmdir()
