"""Lowers the priority of background threads and processes, for which no step waits."""

import os
import threading

NICENESS = 10


def lower_priority(process: int | None = None) -> None:
    """Makes the calling thread nicer, or the first thread of a process, and the threads and processes that it starts from now on.

    Only Linux has a niceness for each thread.
    """
    if hasattr(os, "sched_getaffinity"):
        thread = threading.get_native_id() if process is None else process
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
