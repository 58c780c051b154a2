"""Memory of large bodies goes back to the system once they are answered."""

import ctypes

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_LARGE_BYTES = 1 << 20


def give_large_blocks_back() -> bool:
    """Has blocks from 1 MiB on mapped by themselves, and so unmapped when they are freed.

    By itself glibc raises that bound to the largest block that was freed, up to 32 MiB: from then on bodies lie in its heap, where
    whatever small stands behind them keeps them in memory. False where the C library has no such setting (musl, macOS).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES))
