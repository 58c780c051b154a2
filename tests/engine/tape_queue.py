"""Recordings as a GPU makes them: calls on tensors, which a replay makes again. No Python runs then, and no host is asked.

`InlineQueue` runs a recorded step's Python again, and so finds values of the host that a graph would not see. Of what it has not
allocated, a graph knows addresses alone: so a tape holds none of that memory, and garbage is collected between calls of the queue.
"""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from starling_engine.platforms.device_queue import DeviceEvent, Replay
from starling_engine.platforms.interpreted import InlineQueue
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.engine.late_device import READS

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "lift_fresh", "equal", "is_nonzero"}
"""Operations that wait for the device, or copy what the host has made meanwhile."""

BY_THE_HOST = ("numpy", "__array__", "data_ptr")
"""Methods of a tensor with which the host reads it in place, as our own code in C++ does."""

POISON = 255
"""Of each byte: NaN in every type of numbers with a point, and -1 in the others."""


COLLECTED = 0.5
"""Share of the queue's calls before which garbage is collected."""


class TapeQueue(InlineQueue):
    """Keeps recordings as tapes. What they allocate is poison outside of a replay, as another one may use the memory.

    Collects garbage by chance, but not in a recording, where nothing may: AssertionError if Python could.
    """

    def __init__(self) -> None:
        self.replays = 0
        self.collections = 0
        self._chance = random.Random(0)

    def record_event(self) -> DeviceEvent:
        self._collect()
        return super().record_event()

    def capture(self, work: Callable[[], None]) -> Replay:
        assert not gc.isenabled(), "what a collection finalises would end the recording"
        tape = Tape()
        with tape.recording():
            work()

        def replay() -> None:
            self._collect()
            self.replays += 1
            tape.replay()

        return replay

    def _collect(self) -> None:
        if self._chance.random() < COLLECTED:
            self.collections += 1
            gc.collect()


class Outside:
    """A tensor in memory that a recording has not allocated, and does not hold: who else does has to outlive it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype, self._view = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self) -> torch.Tensor:
        storage = self._storage()
        assert storage is not None, "a recording reads or writes memory that nobody holds any more"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class Tape:
    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._own: list[torch.Tensor] = []
        """Tensors that were allocated in the recording."""
        self._own_memory: set[int] = set()
        """Their storages."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Notes the calls within, and makes none of them: as on a GPU, nothing has happened then but that memory is allocated."""
        from triton.runtime.interpreter import InterpretedFunction

        def launch(kernel: Any, *args: Any, **options: Any) -> None:
            self.add(run, (kernel, *args), options)

        run = InterpretedFunction.run
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(InterpretedFunction, "run", launch))
            for name in (*READS, *BY_THE_HOST):
                stack.enter_context(mock.patch.object(torch.Tensor, name, _refused(name)))
            stack.enter_context(_Noted(self))
            yield

    def replay(self) -> None:
        for call in self._calls:
            call()
        for tensor in self._own:
            _poison(tensor)

    def add(self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], made: Any = None) -> None:
        """Notes a call, whose results go to the tensors `made`."""
        args, named = tree_map(self._held, args), tree_map(self._held, named)

        def again() -> None:
            found = function(*tree_map(_given_back, args), **tree_map(_given_back, named))
            if made is not None:
                for target, source in zip(tree_leaves(made), tree_leaves(found), strict=True):
                    target.copy_(source)

        self._calls.append(again)

    def allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        _poison(tensor)
        self._own.append(tensor)
        self._own_memory.add(tensor.untyped_storage()._cdata)
        return tensor

    def _held(self, value: Any) -> Any:
        inside = not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata in self._own_memory
        return value if inside else Outside(value)


class _Noted(TorchDispatchMode):
    """Writes torch's operations on a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        named, name = kwargs or {}, func.overloadpacket.__name__
        assert name not in WAITING, f"{name} in a recording waits for the device, or copies from the host"
        with self:
            parts = func.decompose(*args, **named)
        if parts is not NotImplemented:
            return parts
        if func.is_view or name == "_unsafe_view":
            return func(*args, **named)
        if "empty" in name:
            return self._tape.allocate(func(*args, **named))
        changed = [value for spec, value in _given(func, args, named) if spec.alias_info is not None and spec.alias_info.is_write]
        if changed:
            self._tape.add(func, args, named)
            return changed[0] if len(changed) == 1 else tuple(changed)
        outputs = func(*tree_map(_as_meta, args), **tree_map(_as_meta, named) | _on_meta(func))
        made = tree_map(lambda output: self._tape.allocate(_empty_as(output)), outputs)
        self._tape.add(func, args, named, made)
        return made


def _given(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for at, spec in enumerate(func._schema.arguments):
        if at < len(args):
            yield spec, args[at]
        elif spec.name in named:
            yield spec, named[spec.name]


def _on_meta(func: Any) -> dict[str, Any]:
    return {"device": torch.device("meta")} if any(spec.name == "device" for spec in func._schema.arguments) else {}


def _as_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _empty_as(output: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(output.size(), output.stride(), dtype=output.dtype)


def _given_back(value: Any) -> Any:
    return value.tensor() if isinstance(value, Outside) else value


def _poison(tensor: torch.Tensor) -> None:
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(POISON)


def _refused(name: str) -> Callable[..., Any]:
    def call(*_args: Any, **_options: Any) -> Any:
        raise AssertionError(f"{name} of a tensor in a recording is waited for")

    return call
