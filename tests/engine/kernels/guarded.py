"""Looks at what kernels do in Triton's interpreter: where they read and write, how often, and whether their order matters.

A launch gets copies of its tensors in one piece of memory, far apart. Each address that a program reads or writes has to be an
element of one of them: what lies before, behind and between their rows is nobody's. Programs run in a random order, and the first
launch of each kernel runs in the grid's own order, too, which has to give the same bits.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

GUARD = 4096
"""Bytes between two tensors' memory: more than a row of a test has."""

BY_ADDRESS = {"_one_shot", "_two_shots", "_one_shot_norm"}
"""Kernels that get addresses of memory in tensors, and wait for programs of other processes."""


@dataclass(frozen=True)
class Launch:
    """A launch, with how often it read each element of its tensors."""

    kernel: str
    reads: dict[str, torch.Tensor]


class Guarded:
    """Memory of one launch. Behaves as the arguments' own, to which `give_back` copies it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
        self._places, end = dict[int, int](), GUARD
        for pointer, storage in storages.items():
            self._places[pointer] = end
            end += -(-storage.nbytes() // 64) * 64 + GUARD
        self._memory = torch.full((end,), 255, dtype=torch.uint8)
        self._mine = torch.zeros(end, dtype=torch.bool)
        self._storages = storages
        self._copy(into=True)

    def _copy(self, *, into: bool) -> None:
        for pointer, storage in self._storages.items():
            own = torch.empty(0, dtype=torch.uint8).set_(storage)
            place = self._memory[self._places[pointer] :][: len(own)]
            place.copy_(own) if into else own.copy_(place)

    def tensor(self, original: torch.Tensor) -> torch.Tensor:
        """Returns the copy of a tensor, whose elements may be read and written from now on."""
        at, itemsize = self._places[original.untyped_storage().data_ptr()], original.itemsize
        offset = at // itemsize + original.storage_offset()
        if original.numel():
            _bytes_of(self._mine, original, offset).fill_(True)
        return torch.empty(0, dtype=original.dtype).set_(self._memory.untyped_storage(), offset, original.size(), original.stride())

    def check(self, pointers: npt.NDArray[Any], mask: npt.NDArray[Any], size: int, what: str) -> npt.NDArray[np.int64]:
        """Returns the places of elements of `size` bytes, all of which have to be some tensor's."""
        live = np.broadcast_to(mask, pointers.shape).astype(bool)
        at = pointers[live].astype(np.int64) - self._memory.data_ptr()
        mine = self._mine.numpy()
        outside = (at < 0) | (at + size > len(mine))
        if outside.any() or not (mine[at].all() and mine[at + size - 1].all()):
            raise IndexError(f"{what} outside of its tensors")
        return at

    def bits(self) -> torch.Tensor:
        return self._memory.clone()

    def set_bits(self, bits: torch.Tensor) -> None:
        self._memory.copy_(bits)

    def give_back(self) -> None:
        self._copy(into=False)

    def counts(self, reads: npt.NDArray[np.int64], original: torch.Tensor) -> torch.Tensor:
        """Returns of `reads`, which are by byte, those of a tensor's elements."""
        at = self._places[original.untyped_storage().data_ptr()] // original.itemsize + original.storage_offset()
        return _bytes_of(torch.from_numpy(reads), original, at)[..., 0]

    def __len__(self) -> int:
        return len(self._memory)


def _bytes_of(by_byte: torch.Tensor, tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns a view [*size, itemsize] of values by byte. Elements that are the same by a stride of 0 are there once."""
    itemsize = tensor.itemsize
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.size(), tensor.stride(), strict=True)]
    return by_byte.as_strided((*sizes, itemsize), (*(itemsize * stride for stride in tensor.stride()), 1), offset * itemsize)


class Watch:
    """What the interpreter is patched with."""

    def __init__(self) -> None:
        self._memory: Guarded | None = None
        self._reads: npt.NDArray[np.int64] | None = None
        self._order: list[int] | None = None
        self.launches: list[Launch] | None = None

    def install(self, patch: Callable[[Any, str, Any], None]) -> None:
        from triton.runtime import interpreter

        builder = interpreter.InterpreterBuilder
        load, store, place = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx
        call = interpreter.GridExecutor.__call__

        def loaded(this: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self._met(pointers, mask, "a read", read=True)
            return load(this, pointers, mask, *rest)

        def stored(this: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._met(pointers, mask, "a write", read=False)
            return store(this, pointers, value, mask, *rest)

        def placed(this: Any, x: int, y: int, z: int) -> None:
            if self._order is not None:
                x, y, z = (int(each) for each in np.unravel_index(self._next(this, (x, y, z)), _dims(this)))
            place(this, x, y, z)

        def called(executor: Any, *args: Any, **named: Any) -> None:
            self._call(lambda *args, **named: call(executor, *args, **named), executor, args, named)

        patch(builder, "create_masked_load", loaded)
        patch(builder, "create_masked_store", stored)
        patch(builder, "set_grid_idx", placed)
        patch(interpreter.GridExecutor, "__call__", called)

    def _next(self, builder: Any, own: tuple[int, int, int]) -> int:
        """Returns which program runs in the place of another."""
        dims = _dims(builder)
        if not self._order:
            self._order = list(range(int(np.prod(dims))))
            random.Random(len(self._order)).shuffle(self._order)
        return self._order[int(np.ravel_multi_index(own, dims))]

    def _met(self, pointers: Any, mask: Any, what: str, *, read: bool) -> None:
        if self._memory is None:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        at = self._memory.check(pointers.data, mask.data, size, what)
        if read and self._reads is not None:
            for byte in range(size):
                np.add.at(self._reads, at + byte, 1)

    def _call(self, launch: Callable[..., None], executor: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        name = executor.fn.__name__
        given = dict(zip(executor.arg_names, args, strict=False)) | named
        tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
        if name in BY_ADDRESS or self._memory is not None:
            launch(*args, **named)
            return
        memory = Guarded([*tensors.values()])
        guarded = {key: memory.tensor(value) for key, value in tensors.items()}
        self._memory, self._reads = memory, None
        try:
            first = None
            if name not in _in_order:
                before = memory.bits()
                launch(**given | guarded)
                first = memory.bits()
                memory.set_bits(before)
            self._order = []
            if self.launches is not None:
                self._reads = np.zeros(len(memory), np.int64)
            launch(**given | guarded)
            assert first is None or torch.equal(first, memory.bits()), f"{name} depends on the order of its programs"
            _in_order.add(name)
            if self.launches is not None:
                assert self._reads is not None
                self.launches.append(Launch(name, {key: memory.counts(self._reads, each) for key, each in tensors.items()}))
        finally:
            self._memory = self._order = self._reads = None
        memory.give_back()

    @contextmanager
    def counted(self) -> Iterator[list[Launch]]:
        """Lists the launches within."""
        self.launches = []
        try:
            yield self.launches
        finally:
            self.launches = None


def _dims(builder: Any) -> tuple[int, ...]:
    return tuple(int(each) for each in builder.grid_dim)


_in_order: set[str] = set()
"""Kernels of which a launch gave the same in both orders, in this process."""


@contextmanager
def nothing_is_zero_by_chance() -> Iterator[None]:
    """Fills what is allocated and not initialised: NaN, and the largest of integers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
