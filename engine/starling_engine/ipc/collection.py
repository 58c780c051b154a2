"""Says when Python may collect garbage beside a device's work.

While a step is recorded it must not: what a collection finalises, an older recording or a kernel's module, calls the device, and
that call ends the recording. Once a process serves, what it holds stays, and to look through it again costs tens of milliseconds.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Nothing is collected within, whatever thread allocates."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_everything() -> None:
    """Collects also what is frozen: what a model that is dropped leaves lies there."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()


def freeze_heap() -> None:
    """Collects once; what is left is never looked at again. Called when a process is ready to serve."""
    gc.collect()
    gc.freeze()


def freeze_again() -> None:
    """Freezes also what came since the heap was frozen, as a model that a waking rank has made. Else does nothing."""
    if gc.get_freeze_count():
        freeze_heap()
