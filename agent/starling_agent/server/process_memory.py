"""Memory of a server process: malloc's large blocks and Python's garbage collector."""

import ctypes
import gc

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES = 1 << 20


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


def freeze_objects() -> None:
    """Takes all objects of the start-up out of the collector's sight: walking them would interrupt streams.

    Objects frozen by an earlier call are collected first: an engine that was replaced is garbage by now.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
