"""Takes a cluster down when the process for which it runs has ended, however it ended."""

import os
import select
import sys
from pathlib import Path

from starling_cluster import place, processes, sweep
from starling_cluster.place import Place

NAME = "watch"


def start(target: Place) -> None:
    """In the background, marked as the cluster's own, so that `down` ends it too."""
    main = Path(__file__).parents[1]
    processes.spawn(target, NAME, [sys.executable, str(main), "watch", str(target.directory)])


def wait_and_take_down(target: Place) -> None:
    """Sleeps until the owner ends."""
    state = place.read(target)
    if state is None or state.owner is None:
        return
    try:
        descriptor = os.pidfd_open(state.owner.pid)
    except ProcessLookupError:
        descriptor = None
    if descriptor is not None and state.owner.lives:
        select.select([descriptor], [], [])
    sweep.take_down_dead()
