"""No agent outlives `starling up`, also when that is killed: the kernel sends the agents SIGTERM then."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """Runs in the child, between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
