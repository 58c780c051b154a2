"""A rank's host memory: as much as was asked for, pinned where there is a device."""

import mmap
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from starling_engine.errors import ConfigError
from starling_engine.kv_offload.arena import Arena
from starling_engine.platforms import host_memory

SLOTS, SLOT = 5, 3 * mmap.PAGESIZE - 100


def register(calls: list[tuple[int, int, int]], answer: int) -> Callable[[], SimpleNamespace]:
    """The CUDA runtime, as far as an arena knows it."""

    def host_register(address: int, size: int, flags: int) -> int:
        calls.append((address, size, flags))
        return answer

    return lambda: SimpleNamespace(cudaHostRegister=host_register)


def check_slots(arena: Arena) -> None:
    """Whole pages each, apart from each other, and the same bytes by both ways."""
    for number in range(SLOTS):
        arena.slot(number).fill_(number + 1)
    assert arena.slot_bytes == 3 * mmap.PAGESIZE
    for number in range(SLOTS):
        assert arena.slot(number).data_ptr() % mmap.PAGESIZE == 0
        assert bytes(arena.bytes(number, SLOT)) == bytes([number + 1]) * SLOT


def test_slots_are_whole_pages_of_their_own() -> None:
    check_slots(Arena(SLOTS, SLOT))


def test_pinned_memory_is_what_was_asked_for_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(torch.cuda, "cudart", register(calls, 0))
    arena = Arena(SLOTS, SLOT, pinned=True)
    assert calls == [(arena.slot(0).data_ptr(), SLOTS * arena.slot_bytes, 0)]
    check_slots(arena)


def test_what_cannot_be_pinned_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", register([], 2))
    monkeypatch.setattr(host_memory, "forget_error", lambda: None)
    with pytest.raises(ConfigError, match=r"cannot be pinned \(CUDA error 2\)") as caught:
        Arena(SLOTS, SLOT, pinned=True)
    assert caught.value.field == "kv_cpu_bytes"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_device_s_runtime_knows_it_as_pinned() -> None:
    arena = Arena(SLOTS, SLOT, pinned=True)
    assert all(arena.slot(number).is_pinned() for number in range(SLOTS))
    check_slots(arena)
