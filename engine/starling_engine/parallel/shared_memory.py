"""Exchange between ranks of one machine, through memory that they share (see `native/kernels/exchange.cpp`)."""

import ctypes
import hashlib
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from starling_engine.errors import ConfigError, RankLost
from starling_engine.native import ops
from starling_engine.parallel.communicator import Communicator, PendingTensor

BUFFER_BYTES = 1 << 20
"""Bytes of one rank that are exchanged at once. Two buffers a rank stay in the processor's cache."""

SHARED_FOLDER = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAME_BYTES = 256
"""Room for a file's name, as ranks send it to each other."""


def can_share_memory(ranks: Communicator) -> bool:
    """Returns whether all ranks see the same files in the folder for shared memory. All of them get the same answer.

    Ranks of one machine need not: pods have a folder each.
    """
    own = torch.frombuffer(bytearray(_identity()), dtype=torch.uint8)
    return all(torch.equal(other, own) for other in ranks.all_gather(own))


def _identity() -> bytes:
    """Identifies this boot of this machine, and the mounted file system, in 32 bytes."""
    boot = BOOT_ID.read_text() if BOOT_ID.exists() else ""
    folder = Path(shared_folder() or tempfile.gettempdir())
    return hashlib.sha256(f"{boot} {folder.stat().st_dev} {folder}".encode()).digest()


def shared_folder() -> Path | None:
    """Returns the folder for shared memory; None for the system's temporary folder."""
    return SHARED_FOLDER if os.access(SHARED_FOLDER, os.W_OK) else None


class SharedMemoryCommunicator:
    """Exchanges through shared memory. All its ranks must be on this machine.

    `fallback` carries what shared memory does not, and the name of its file.
    """

    capturable = False

    def __init__(self, fallback: Communicator, timeout: float, name_of: Callable[[int], str] | None = None) -> None:
        """`name_of` names a rank in errors. Raises RankLost when a rank does not come, ConfigError when memory is short."""
        self.shard = fallback.shard
        self._fallback = fallback
        self._timeout = timeout
        self._name_of = name_of or (lambda rank: f"rank {rank} of {fallback.shard.count}")
        self._memory = self._join(ops.exchange_bytes(self.shard.count, BUFFER_BYTES))
        self._area = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32 or not x.is_contiguous():
            return self._fallback.all_reduce(x)
        self._exchange(x, None)
        return x

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:  # noqa: ARG002 - whatever it is
        return torch.float32

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty((self.shard.count, *x.shape), dtype=x.dtype)
        self._exchange(x, out)
        return out

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> PendingTensor:
        self.tick()
        out = torch.empty((sum(received), *x.shape[1:]), dtype=x.dtype)
        x = x.contiguous()
        self._check(ops.exchange_parts(self._area, self.shard.index, BUFFER_BYTES, x, sent, out, received, self._timeout))
        return lambda: out

    def send(self, x: torch.Tensor, to: int) -> None:
        self._fallback.send(x, to)

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return self._fallback.receive(x, source)

    def tick(self) -> None:
        self._fallback.tick()

    def _exchange(self, x: torch.Tensor, out: torch.Tensor | None) -> None:
        self.tick()
        self._check(ops.exchange(self._area, self.shard.index, self.shard.count, BUFFER_BYTES, x, out, self._timeout))

    def _check(self, missing: int | None) -> None:
        if missing is not None:
            raise RankLost(f"{self._name_of(missing)} did not come within {self._timeout:g} s")

    def _join(self, size: int) -> mmap.mmap:
        """Maps the file that the first rank makes. It is unlinked once all have it open, so nothing is left behind."""
        if self.shard.first:
            with tempfile.NamedTemporaryFile(dir=shared_folder(), prefix="starling-") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, size)  # now: a lack of memory later would kill the process silently
                except OSError as error:
                    raise ConfigError(f"no room in {Path(file.name).parent} for {size} bytes that ranks share: {error}") from error
                self._fallback.all_gather(_as_numbers(file.name))
                memory = mmap.mmap(file.fileno(), size)
                self._fallback.all_gather(torch.zeros(1))
            return memory
        name = _as_text(self._fallback.all_gather(_as_numbers(""))[0])
        with Path(name).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        self._fallback.all_gather(torch.zeros(1))
        return memory


def _as_numbers(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode().ljust(NAME_BYTES, b"\0")), dtype=torch.uint8)


def _as_text(numbers: torch.Tensor) -> str:
    return bytes(numbers.tolist()).rstrip(b"\0").decode()
