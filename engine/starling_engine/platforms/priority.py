"""Threads for which no step waits let those go first that steps wait for."""

import os
import threading

NICENESS = 10


def lower_priority() -> None:
    """Makes the calling thread, and those that it starts from now on, nicer. Only Linux has a niceness for each thread."""
    if hasattr(os, "sched_getaffinity"):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
