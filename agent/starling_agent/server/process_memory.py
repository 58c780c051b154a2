"""Memory of a server process: malloc's large blocks and Python's garbage collector."""

import ctypes
import gc

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES = 1 << 20
_COLLECTED_AT = (20_000, 2, 10)
"""Objects more than at the last collection that start one of new objects; how many of these start one of young ones, and of all.

A step with a token for each of 1,000 streams makes some 8,000 objects and drops them again: no garbage in cycles. With Python's own
700 a quarter of the processor time went into looking for some, in pauses up to 0.3 s. Young objects are looked at in small parts.
"""


def give_large_blocks_back() -> bool:
    """Has malloc map blocks from 1 MiB on by themselves, so that they go back to the system when freed.

    By default glibc raises that bound to the largest block that was freed, up to 32 MiB. Large bodies then lie in its heap, where
    a small block behind them keeps them. Returns False where the C library has no such setting (musl, macOS).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES))


def collect_rarely() -> None:
    """Takes the objects of the start-up out of the collector's sight, and has it look at others rarely: this interrupts streams.

    Objects that an earlier call took out are collected first: an engine that was replaced is garbage by now.
    """
    gc.set_threshold(*_COLLECTED_AT)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
