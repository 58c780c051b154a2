"""Sums over ranks by kernels: ranks take their turns in one process, each where the others have come already."""

from unittest import mock

import pytest
import torch
from starling_engine.kernels import peer_sums
from starling_engine.kernels.norm import add_rms_norm, rms_norm_rounded
from starling_engine.kernels.peer_sums import BLOCKS, BUFFER_BYTES, LARGE_TILE, TILE, most_norm_rows, one_shot_sum, two_shot_sum
from starling_engine.kernels.rounded_rows import RowRounding
from starling_engine.layers.norm import RMSNorm
from starling_engine.parallel.nccl import NcclCommunicator
from starling_engine.parallel.peer_sums import PeerSums
from starling_engine.parallel.rank_part import RankPart, Rows
from starling_engine.platforms.triton_support import INTERPRETED
from starling_engine.topology.shard import Shard

from tests.engine.kernels.compiled import MAX_SHARED, compiled
from tests.engine.parallel.test_nccl import Host

GUARD = 4096
"""Bytes before a region, and behind it."""


class Machine:
    """Every rank's region, in one memory, each between guards. The others' parts, flags and buffers are views of it."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self.ranks = ranks
        size = peer_sums.region_bytes(ranks) + 2 * GUARD
        self._around = [torch.full((size,), 77, dtype=torch.uint8, device=device) for _ in range(ranks)]
        self.regions = [each[GUARD:-GUARD].zero_() for each in self._around]
        self.addresses = torch.tensor([region.data_ptr() for region in self.regions], dtype=torch.int64, device=device)

    def numbers(self, rank: int) -> torch.Tensor:
        return self.regions[rank][: BLOCKS * (2 * self.ranks + 1) * 4].view(torch.int32)

    def flags(self, rank: int) -> torch.Tensor:
        """[2, BLOCKS, ranks]."""
        return self.numbers(rank)[: 2 * BLOCKS * self.ranks].view(2, BLOCKS, self.ranks)

    def counts(self, rank: int) -> torch.Tensor:
        return self.numbers(rank)[2 * BLOCKS * self.ranks :]

    def buffer(self, rank: int, number: int, x: torch.Tensor) -> torch.Tensor:
        """Returns the memory of `x` for the sum of this number."""
        buffers = self.regions[rank][-2 * BUFFER_BYTES :].view(2, BUFFER_BYTES)
        return buffers[number & 1, : x.nbytes].view(x.dtype).view(x.shape)

    def arrive(self, rank: int, number: int, parts: list[torch.Tensor], *, shots: int = 1) -> None:
        """Does what the other ranks do until they wait for the last time; in two shots also what they do with `rank`'s part."""
        for other in range(self.ranks):
            if other == rank:
                continue
            mine = self.buffer(other, number, parts[other])
            mine.copy_(parts[other])
            self.flags(rank)[:shots, :, other] = number
            if shots == 2:
                theirs = of_rank(parts[0], other, self.ranks)
                mine.view(-1)[theirs] = in_order(parts).view(-1)[theirs]

    def check_guards(self) -> None:
        for each in self._around:
            assert each[:GUARD].eq(77).all() and each[-GUARD:].eq(77).all()


def of_rank(x: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Returns which elements are in the tiles that a rank sums in two shots."""
    return torch.arange(x.numel()) // TILE % ranks == rank


def draw(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(device, dtype) for rank in range(ranks)]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize(
    ("ranks", "size", "dtype"),
    [
        (3, 1, torch.float32),
        (3, TILE + 5, torch.bfloat16),
        (2, BLOCKS * TILE + 3, torch.float32),
        (8, 40, torch.float16),
        pytest.param(2, BLOCKS * LARGE_TILE + 3, torch.bfloat16, marks=pytest.mark.whole),
    ],
)
def test_every_rank_gets_the_sum_to_the_last_bit(ranks, size, dtype, device):
    parts, machine = draw(ranks, (size,), dtype, device), Machine(ranks, device)
    for rank in range(ranks):
        machine.arrive(rank, 1, parts)
        x = parts[rank].clone()
        one_shot_sum(x, machine.addresses, rank)
        assert torch.equal(x, in_order(parts))
    machine.check_guards()


@pytest.mark.parametrize(
    ("ranks", "size", "dtype"),
    [
        (3, 1, torch.float32),  # two ranks have nothing to sum
        (3, 3 * TILE + 5, torch.bfloat16),
        (2, 2 * BLOCKS * TILE + TILE // 2, torch.float32),
        (8, 5 * TILE + 1, torch.float16),
        *(
            pytest.param(ranks, size, torch.bfloat16, marks=pytest.mark.whole)
            for ranks, size in [(4, 4 * TILE), (5, 7 * TILE - 1), (6, 100), (7, 7 * BLOCKS * TILE + 9)]
        ),
    ],
)
def test_two_shots_give_the_same(ranks, size, dtype, device):
    parts, machine = draw(ranks, (size,), dtype, device), Machine(ranks, device)
    for rank in range(ranks):
        machine.arrive(rank, 1, parts, shots=2)
        x = parts[rank].clone()
        two_shot_sum(x, machine.addresses, rank)
        assert torch.equal(x, in_order(parts))
        own = of_rank(x, rank, ranks).to(device)
        assert torch.equal(machine.buffer(rank, 1, x)[own], x[own]), "what others read of it"
        assert torch.equal(machine.buffer(rank, 1, x)[~own], parts[rank][~own])
    machine.check_guards()


@pytest.mark.parametrize(
    ("ranks", "rows", "size", "dtype"),
    [
        (2, 1, 256, torch.bfloat16),
        (3, most_norm_rows(192), 192, torch.bfloat16),
        (3, BLOCKS + 1, 2304, torch.float32),
        pytest.param(8, 2 * BLOCKS, 4096, torch.bfloat16, marks=pytest.mark.whole),
        pytest.param(4, 5, 8192, torch.float16, marks=pytest.mark.whole),
    ],
)
@pytest.mark.parametrize("wide", [False, True], ids=["", "wide weight"])
def test_the_norm_of_a_sum_is_that_of_two_launches(ranks, rows, size, dtype, wide, device):
    parts, machine = draw(ranks, (rows, size), dtype, device), Machine(ranks, device)
    weight = torch.rand(size).to(device, torch.float32 if wide else dtype)
    before = torch.randn(rows, size).to(device, dtype)
    normed, total = torch.empty_like(before), before.clone()
    add_rms_norm(in_order(parts), total, weight, 1e-5, normed)
    for rank in range(ranks):
        machine.arrive(rank, 1, parts)
        x, residual = parts[rank].clone(), before.clone()
        assert peer_sums.one_shot_sum_norm(x, residual, weight, 1e-5, machine.addresses, rank) is x
        assert torch.equal(x, normed) and torch.equal(residual, total)
    machine.check_guards()


@pytest.mark.parametrize("rounding", [RowRounding("token"), RowRounding("group")], ids=["rows", "groups"])
def test_the_norm_of_a_sum_is_rounded_as_that_of_two_launches(rounding, device):
    parts, machine = draw(2, (3, 256), torch.bfloat16, device), Machine(2, device)
    weight, before = torch.rand(256).to(device, torch.bfloat16), torch.randn(3, 256).to(device, torch.bfloat16)
    residual = before.clone()
    wanted = rms_norm_rounded(in_order(parts), residual, weight, 1e-5, rounding)
    machine.arrive(1, 1, parts)
    x, total = parts[1].clone(), before.clone()
    found = peer_sums.one_shot_sum_norm(x, total, weight, 1e-5, machine.addresses, 1, rounding)
    assert torch.equal(found.codes.view(torch.uint8), wanted.codes.view(torch.uint8)) and torch.equal(found.scales, wanted.scales)
    assert torch.equal(total, residual) and torch.equal(x, parts[1])


def test_a_rank_sets_the_flag_of_every_other_and_writes_its_part(device):
    parts, machine = draw(3, (50,), torch.float32, device), Machine(3, device)
    machine.arrive(1, 1, parts)
    one_shot_sum(parts[1].clone(), machine.addresses, 1)
    assert torch.equal(machine.buffer(1, 1, parts[1]), parts[1])
    for other in range(3):
        assert machine.flags(other)[0, :, 1].eq(1).all()
    assert machine.flags(0)[0][:, [0, 2]].eq(0).all() and machine.flags(0)[1].eq(0).all(), "it speaks for itself alone"


@pytest.mark.parametrize("begun", [0, 7, 2**31 - 2])
def test_sums_follow_one_another(begun, device):
    """Checks that sums of all kinds use two buffers in turn, also where the count wraps to negative numbers."""
    machine = Machine(3, device)
    machine.counts(0).fill_(begun)
    for rank in range(3):
        machine.flags(rank).fill_(begun)
    for turn in range(1, 5):
        number = (begun + turn + 2**31) % 2**32 - 2**31
        parts = [part + turn for part in draw(3, (2, 16), torch.float32, device)]
        x = parts[0].clone()
        machine.arrive(0, number, parts, shots=2 if turn % 2 else 1)
        if turn == 4:
            peer_sums.one_shot_sum_norm(x, torch.zeros_like(x), torch.ones(16, device=device), 1e-6, machine.addresses, 0)
            torch.testing.assert_close(x, torch.nn.functional.rms_norm(in_order(parts), (16,), eps=1e-6))
        else:
            (two_shot_sum if turn % 2 else one_shot_sum)(x, machine.addresses, 0)
            assert torch.equal(x, in_order(parts))
        assert machine.counts(0).eq(number).all()


@pytest.mark.parametrize("rows", [3, most_norm_rows(1024) + 1], ids=["in one launch", "too many for one"])
@pytest.mark.parametrize("rounding", [None, RowRounding("token")], ids=["", "rounded"])
def test_a_norm_sums_what_ranks_have_of_its_rows(rows, rounding, device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setenv(INTERPRETED, "1")
    parts, machine = draw(2, (rows, 1024), torch.bfloat16, device), Machine(2, device)
    machine.arrive(1, 1, parts)
    ranks = NcclCommunicator(Host(Shard(1, 2)), None, device, PeerSums(machine.addresses, 1))
    norm, before = RMSNorm("norm", 1024, 1e-5, torch.bfloat16, device), torch.randn(rows, 1024).to(device, torch.bfloat16)
    norm.weight.fill_(0.5)
    part = RankPart(parts[1].clone(), ranks, torch.bfloat16)

    def take(x: Rows, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = norm.forward(x, residual) if rounding is None else norm.forward_rounded(x, residual, rounding)
        return (normed if isinstance(normed, torch.Tensor) else normed.numbers()), total

    with mock.patch.object(peer_sums, "one_shot_sum_norm", wraps=peer_sums.one_shot_sum_norm) as launch_of_all:
        found = take(part, before.clone())
    assert launch_of_all.called is (rows == 3)
    for one, wanted in zip(found, take(in_order(parts), before.clone()), strict=True):
        assert torch.equal(one, wanted)


def launch(kind: str, rows: int, ranks: int) -> None:
    x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta")
    regions = torch.empty(ranks, dtype=torch.int64, device="meta")
    if kind == "norm":
        peer_sums.one_shot_sum_norm(x, torch.empty_like(x), torch.empty_like(x[0]), 1e-5, regions, 3)
    else:
        {"one shot": one_shot_sum, "two shots": two_shot_sum}[kind](x, regions, 3)


@pytest.mark.parametrize(
    ("kind", "rows", "meetings", "together"),
    [("one shot", 8, 1, 1), ("one shot", 64, 1, 2), ("two shots", 256, 2, 8), ("norm", 64, 1, 4)],
)
def test_they_compile_for_an_h200(kind, rows, meetings, together):
    """Eight ranks sum. What a thread copies at a time is loaded before any of it is stored, and so are the parts of all ranks."""
    (kernel,) = compiled(launch, kind, rows, 8)
    assert not kernel.spills and kernel.shared <= MAX_SHARED
    assert kernel.blocks, "a processor has room for one"
    assert kernel.ptx.count(".sys.release.") == kernel.ptx.count(".sys.acquire.") == meetings, "other devices see it"
    assert kernel.instructions["MEMBAR.ALL.SYS"] == meetings, "for all ranks at once"
    moves = [name for _, name, _ in kernel.code if name in ("LDG.E.128", "STG.E.128")]
    runs = [len(run) for run in "".join(name[0] for name in moves).split("S") if run]
    assert runs[0] >= together, "16 bytes at a time"
    assert max(runs) >= 8 * (together if kind != "two shots" else 1)
