"""The sum over ranks in one kernel: ranks take their turns in one process, each where the others have come already."""

import pytest
import torch
from starling_engine.kernels.one_shot import BLOCKS, BUFFER_BYTES, TILE, one_shot_sum, region_bytes

from tests.engine.kernels.compiled import MAX_SHARED, compiled

RANKS = 3


class Machine:
    """Every rank's region, in one memory. `flags` and `buffer` are views of one rank's."""

    def __init__(self, device: torch.device) -> None:
        self.regions = [torch.zeros(region_bytes(RANKS), dtype=torch.uint8, device=device) for _ in range(RANKS)]
        self.addresses = torch.tensor([region.data_ptr() for region in self.regions], dtype=torch.int64, device=device)

    def numbers(self, rank: int) -> torch.Tensor:
        return self.regions[rank][: BLOCKS * (RANKS + 1) * 4].view(torch.int32)

    def flags(self, rank: int) -> torch.Tensor:
        return self.numbers(rank)[: BLOCKS * RANKS].view(BLOCKS, RANKS)

    def counts(self, rank: int) -> torch.Tensor:
        return self.numbers(rank)[BLOCKS * RANKS :]

    def buffer(self, rank: int, number: int, x: torch.Tensor) -> torch.Tensor:
        """Returns the memory of `x` for the sum of this number."""
        buffers = self.regions[rank][-2 * BUFFER_BYTES :].view(2, BUFFER_BYTES)
        return buffers[number & 1, : x.nbytes].view(x.dtype).view(x.shape)

    def arrive(self, rank: int, number: int, parts: list[torch.Tensor]) -> None:
        """Does what the other ranks do until they wait."""
        for other in range(RANKS):
            if other != rank:
                self.buffer(other, number, parts[other]).copy_(parts[other])
                self.flags(rank)[:, other] = number


def draw(size: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(device, dtype) for rank in range(RANKS)]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, torch.float32), (TILE + 5, torch.bfloat16), (BLOCKS * TILE + 3, torch.float32), (40, torch.float16)],
)
def test_every_rank_gets_the_sum_to_the_last_bit(size, dtype, device):
    parts, machine = draw(size, dtype, device), Machine(device)
    for rank in range(RANKS):
        machine.arrive(rank, 1, parts)
        x = parts[rank].clone()
        one_shot_sum(x, machine.addresses, rank)
        assert torch.equal(x, in_order(parts))


def test_a_rank_sets_the_flag_of_every_other_and_writes_its_part(device):
    parts, machine = draw(50, torch.float32, device), Machine(device)
    machine.arrive(1, 1, parts)
    one_shot_sum(parts[1].clone(), machine.addresses, 1)
    assert torch.equal(machine.buffer(1, 1, parts[1]), parts[1])
    for other in range(RANKS):
        assert machine.flags(other)[:, 1].eq(1).all()
    assert machine.flags(0)[:, [0, 2]].eq(0).all(), "it speaks for itself alone"


@pytest.mark.parametrize("begun", [0, 7, 2**31 - 2])
def test_sums_follow_one_another(begun, device):
    """Checks that sums use two buffers in turn, also where the count wraps to negative numbers."""
    machine = Machine(device)
    machine.counts(0).fill_(begun)
    for rank in range(RANKS):
        machine.flags(rank).fill_(begun)
    for turn in range(1, 4):
        number = (begun + turn + 2**31) % 2**32 - 2**31
        parts = [part + turn for part in draw(30, torch.float32, device)]
        machine.arrive(0, number, parts)
        x = parts[0].clone()
        one_shot_sum(x, machine.addresses, 0)
        assert torch.equal(x, in_order(parts))
        assert machine.counts(0).eq(number).all()


def launch(size: int, dtype: torch.dtype) -> None:
    one_shot_sum(torch.empty(size, dtype=dtype, device="meta"), torch.empty(8, dtype=torch.int64, device="meta"), 3)


def test_it_compiles_for_an_h200():
    (kernel,) = compiled(launch, 4096, torch.bfloat16)
    assert kernel.stack == 0 and kernel.shared <= MAX_SHARED
    assert "st.global.v4" in kernel.ptx and "ld.global.v4" in kernel.ptx, "16 bytes at a time"
    assert ".sys.release." in kernel.ptx and ".sys.acquire." in kernel.ptx, "other devices see it"
