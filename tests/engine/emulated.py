"""The kernels of arm64 on another machine: compiled by a cross-compiler, and called under qemu-user.

Debian and Ubuntu have both in the packages `g++-aarch64-linux-gnu` and `qemu-user`.
"""

import hashlib
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from starling_engine import env
from starling_engine.native import build, isa, weight_memory
from starling_engine.native.bindings import SIGNATURES, standing_for

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
DRIVER = Path(__file__).with_suffix(".cpp")
SETS = {found.name: found for found in isa.INSTRUCTION_SETS if found.machine == "aarch64"}


def has_emulator() -> bool:
    return all(shutil.which(program) for program in (COMPILER, EMULATOR))


class EmulatedLibrary:
    """Has the functions of the library as ctypes has them. What they point to is copied there and back."""

    def __init__(self, name: str) -> None:
        command = [EMULATOR, "-L", SYSTEM, str(_driver()), str(_library(name))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._functions: dict[str, Callable[..., int]] = {}
        self.pointed_to: list[torch.UntypedStorage] = []
        """The memory whose address was asked for since the last call."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            return self._call(name, arguments)

        return self._functions.setdefault(name, function)

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        regions = {storage.data_ptr(): storage for storage in self.pointed_to if storage.nbytes()}
        views = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in regions.values()]  # type: ignore[call-overload]
        whole, floating = [], []
        for letter, value in zip(SIGNATURES[name], arguments, strict=True):
            if letter == "p":
                whole.append(self._place(regions, value))
            elif letter in "fd":
                floating.append(struct.pack("<f4x" if letter == "f" else "<d", value))
            else:
                whole.append((-1, int(value)))
        message = [name.encode().ljust(64, b"\0"), _numbers(len(views))]
        for view in views:
            message += [_numbers(view.numel()), view.numpy().tobytes()]
        message += [_numbers(len(whole)), *(_numbers(*place) for place in whole), _numbers(len(floating)), *floating]
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"".join(message))
        self._process.stdin.flush()
        (result,) = struct.unpack("<q", self._read(8))
        for view in views:
            view.copy_(torch.frombuffer(bytearray(self._read(view.numel())), dtype=torch.uint8))
        self.pointed_to.clear()
        return int(result)

    def _place(self, regions: dict[int, torch.UntypedStorage], address: int | None) -> tuple[int, int]:
        """Returns the region that has the address, and where it begins there."""
        for at, (base, storage) in enumerate(regions.items()):
            if address is not None and base <= address < base + storage.nbytes():
                return at, address - base
        return -1, 0

    def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(count)
        assert len(data) == count, "the emulated program ended"
        return data


@contextmanager
def emulating(name: str) -> Iterator[None]:
    """Lets this process use the kernels of one of SETS."""
    library = EmulatedLibrary(name)
    address_of = torch.Tensor.data_ptr

    def recorded(tensor: torch.Tensor) -> int:
        library.pointed_to.append(tensor.untyped_storage())
        return address_of(tensor)

    with pytest.MonkeyPatch.context() as patch, standing_for(library):
        for name in ("PIECE", "HUGE_PAGE"):  # whole storages are copied
            patch.setattr(weight_memory, name, weight_memory.LINE)
        patch.setattr(weight_memory.WEIGHTS, "_rest", torch.empty(0, dtype=torch.uint8))
        patch.setattr(torch.Tensor, "data_ptr", recorded)
        try:
            yield
        finally:
            library.close()


def _library(name: str) -> Path:
    target = env.cache_dir() / "native" / f"emulated-{build._fingerprint(COMPILER, SETS[name])}.so"
    if not target.exists():
        build._compile(COMPILER, SETS[name], target)
    return target


def _driver() -> Path:
    target = env.cache_dir() / "native" / f"emulated-{hashlib.sha256(DRIVER.read_bytes()).hexdigest()[:20]}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(".new")
        subprocess.run([COMPILER, "-O1", "-std=c++17", str(DRIVER), "-o", str(fresh)], check=True)
        fresh.replace(target)
    return target


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)
