"""Lowers the priority of background threads and processes, for which no step waits."""

import math
import os
import threading
import time
from pathlib import Path

NICENESS = 10
MAX_NICENESS = 19
WEIGHT_RATIO = 1.25
"""A thread that is nicer by one gets so many times less of a processor that others want, too."""
AUTOGROUP = Path("/proc/self/autogroup")
"""The niceness of the calling process's session; see "The autogroup feature" in sched(7)."""
TRIES, PAUSE_SECONDS = 10, 0.1
"""The kernel takes a session's niceness from ordinary users once in a tenth of a second, from all of them together."""


def lower_priority(process: int | None = None) -> None:
    """Makes the calling thread nicer, or the first thread of a process, and the threads and processes that it starts from now on.

    Only Linux has a niceness for each thread.
    """
    if hasattr(os, "sched_getaffinity"):
        thread = threading.get_native_id() if process is None else process
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def lower_priority_of_session() -> None:
    """Makes the session nicer that the calling process leads, so that its threads' niceness counts beside those of other sessions.

    Linux shares processors among sessions first, unless control groups do that, as in containers. A thread's niceness then counts
    within its session alone: without this, a nice process takes half of a core, or more, from the steps of another session.
    """
    if not AUTOGROUP.exists() or os.getsid(0) != os.getpid():
        return
    for _ in range(TRIES):
        try:
            AUTOGROUP.write_text(str(session_niceness(len(os.sched_getaffinity(0)))))
        except BlockingIOError:
            time.sleep(PAUSE_SECONDS)
        except OSError:  # a sandbox may forbid it
            return
        else:
            return


def session_niceness(processors: int) -> int:
    """Returns the niceness at which a session of one thread takes from another session what a thread with `NICENESS` would.

    The other session has one thread for each of the `processors`, and these divide its weight.
    """
    return min(MAX_NICENESS, NICENESS + round(math.log(processors, WEIGHT_RATIO)))
