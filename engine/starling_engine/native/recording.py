"""Records the native kernels that a piece of work calls, to call them again in one go.

A recording has the addresses of what was read and written, so its inputs must lie where they lay, and nothing else may compute:
new tensors get memory of the recording's own, views are free, rows are copied by a kernel, and all other operations are refused.
"""

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from starling_engine.native import elementwise_ops
from starling_engine.native.bindings import SIGNATURES, library, loaded, standing_for
from starling_engine.native.weight_memory import lines, shaped

aten = torch.ops.aten
VIEWS = (
    *(aten.view.default, aten.slice.Tensor, aten.detach.default, aten.alias.default, aten.select.int, aten.unsqueeze.default),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.expand.default),
)
COPIES, COPIED = (aten.contiguous.default, aten.clone.default), (torch.float32, torch.bfloat16)
MAYBE_VIEWS = (aten.flatten.using_ints, aten.reshape.default, aten.to.dtype)
"""Operations that copy where that cannot be a view."""


class NotRecordable(Exception):
    """The work called what cannot be called again."""


class Scratch:
    """Memory for what recorded work computes: recordings share it, since one at a time is replayed."""

    def __init__(self, size: int) -> None:
        """Reserves `size` bytes. The system gives them when they are written."""
        self._memory = torch.empty(size, dtype=torch.uint8)
        self._used = 0

    def restart(self) -> None:
        """Gives the same memory again."""
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor that begins at a cache line. Raises NotRecordable where there is no room."""
        size = lines(shape, dtype)
        if self._used + size > len(self._memory):
            raise NotRecordable(f"for more than {len(self._memory)} bytes")
        found = self._memory[self._used : self._used + size]
        self._used += size
        return shaped(found, shape, dtype)


class Recording:
    """Calls of kernels, in order."""

    def __init__(self) -> None:
        self._words = array("q")
        self.count = 0

    def add(self, function: int, arguments: Sequence[int]) -> None:
        self._words.extend((function, len(arguments), *arguments))
        self.count += 1

    def replay(self) -> None:
        """Makes the calls."""
        library().starling_replay(self._words.buffer_info()[0], self.count)


def record(work: Callable[[], Any], scratch: Scratch) -> tuple[Recording, Any]:
    """Records what the work calls, and then makes the calls. Returns the recording and what each replay writes again.

    Raises NotRecordable as soon as the work calls something else. Nothing has been called then: a recurrent state takes each token
    in once, so that work that is half done could not begin anew.
    """
    scratch.restart()
    recording = Recording()
    with standing_for(_Noting(recording)), _Allocations(scratch):
        found = work()
    recording.replay()
    return recording, found


class _Noting:
    """The library, whose functions note their arguments and do nothing."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __getattr__(self, name: str) -> Callable[..., None]:
        again = getattr(loaded(), f"{name}_again", None)
        if again is None:
            raise NotRecordable(name)
        address = ctypes.cast(again, ctypes.c_void_p).value
        assert address is not None

        def call(*arguments: float | None) -> None:
            self._recording.add(address, [_word(each, kind) for each, kind in zip(arguments, SIGNATURES[name], strict=True)])

        return call


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Gives scratch for new tensors, and refuses what computes."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self._scratch = scratch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler around `__torch_dispatch__`, which takes 4 s."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.empty.memory_format:
            return self._scratch.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if func is aten.empty_like.default:
            return self._scratch.empty(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if func in VIEWS:
            return func(*args, **kwargs)
        if func in COPIES and args[0].dtype in COPIED and args[0].dim() == 2 and args[0].stride(1) == 1:
            with self:  # what the copy allocates is the recording's, too
                return elementwise_ops.multiple(args[0], 1.0)
        if func in MAYBE_VIEWS:
            found = func(*args, **kwargs)
            if found.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr():
                return found
        raise NotRecordable(str(func))


def _word(argument: float | None, kind: str) -> int:
    """Returns the word of an argument, whose kind is a letter of `SIGNATURES`."""
    if kind in "fd":
        assert argument is not None
        return int(struct.unpack("q", struct.pack("d", argument))[0])
    return 0 if argument is None else int(argument)
