"""Cases one after the other: one that fails is a row that says so, and the next one runs, also after a fault of the device."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from bench.gpu.keep import keep_failure
from bench.gpu.table import Row


class Named(Protocol):
    @property
    def what(self) -> str: ...


C = TypeVar("C", bound=Named)


class DeviceFault(Exception):
    """The device does nothing more for this process; `done` cases are behind it. Another process may go on with the next one."""

    def __init__(self, what: str, done: int) -> None:
        super().__init__(f"the device is lost to this process since {what!r}; another one goes on")
        self.done = done


def each_case(cases: Sequence[C], run: Callable[[C], Iterator[Row]], skip: int = 0) -> Iterator[Row]:
    """The rows of all cases but the first `skip`. Raises DeviceFault, or SystemExit at the end where a case failed."""
    failed = []
    for done, case in enumerate(cases[skip:], skip + 1):
        try:
            yield from run(case)
        except Exception as error:  # whatever a kernel does, the next one is run
            keep_failure(case.what, traceback.format_exc())
            yield Row(case.what, "failed")
            if isinstance(error, torch.AcceleratorError):
                raise DeviceFault(case.what, done) from error
            failed.append(case.what)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"failed, and why is in failures.txt: {'; '.join(failed)}")
