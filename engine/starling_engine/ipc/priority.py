"""Lowers the priority of background threads and processes, for which no step waits."""

import os
import threading

NICENESS = 10


def lower_priority() -> None:
    """Makes the calling thread nicer, and the threads and processes that it starts from now on.

    Only Linux has a niceness for each thread.
    """
    if hasattr(os, "sched_getaffinity"):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
