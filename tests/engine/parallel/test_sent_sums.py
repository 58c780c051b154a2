"""What ranks with a GPU each send for their sums: parts in the model's dtype, and up to 8 MiB of them in one kernel.

A rank of two runs decodes of a real shape on torch's meta device, and a stand-in for NCCL's group notes what it is given.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from starling_engine.config import WorkerConfig
from starling_engine.kernels.fused_rows import RowNorm
from starling_engine.kernels.rounded_rows import RoundedRows, RowRounding
from starling_engine.parallel.communicator import ALONE
from starling_engine.parallel.nccl import NcclCommunicator
from starling_engine.parallel.peer_sums import PeerSums
from starling_engine.topology.layout import ParallelLayout
from starling_engine.topology.shard import Shard

from bench.gpu.shapes import SHAPES
from tests.engine.kernels.compiled import forget_compiled, in_compiler
from tests.engine.workers import plain_worker

pytest.importorskip("triton")

LAYERS = 2
SUMS = 1 + 2 * LAYERS
"""The embedding, and of each layer the attention's output and the MLP or experts."""

Sent = tuple[str, str, int]
"""By what, the dtype, and bytes."""


class SentWork:
    def wait(self) -> None:
        """Returns at once: nothing is on its way."""


class NotedGroup:
    """Takes the calls of NCCL's group. Nobody answers, and `found` lists what is sent."""

    def __init__(self, found: list[Sent]) -> None:
        self._found = found

    def allreduce(self, parts: list[torch.Tensor]) -> SentWork:
        self._found += [("nccl", str(part.dtype), part.nbytes) for part in parts]
        return SentWork()

    def _allgather_base(self, _out: torch.Tensor, x: torch.Tensor) -> SentWork:
        self._found.append(("gather", str(x.dtype), x.nbytes))
        return SentWork()


class NotedSums(PeerSums):
    """Notes which kernels are launched for sums, and of what."""

    def __init__(self, found: list[Sent]) -> None:
        super().__init__(torch.zeros(2, dtype=torch.int64, device="meta"), 0)
        self._found = found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._found.append(("one kernel", str(x.dtype), x.nbytes))
        return super().all_reduce(x)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RowNorm, rounding: RowRounding | None
    ) -> torch.Tensor | RoundedRows:
        self._found.append(("one with a norm", str(x.dtype), x.nbytes))
        return super().add_norm(x, residual, norm, rounding)


def sent_by_a_decode(config: WorkerConfig, rows: int) -> list[Sent]:
    """Returns what the first of two ranks sends in a decode of so many rows. Runs in the compiler."""
    from starling_engine.kernels.ahead import note_launches, pretend
    from starling_engine.parallel.absent import AbsentRanks
    from starling_engine.parallel.ranks import RankCommunicators
    from starling_engine.platforms.triton_support import H200
    from starling_engine.worker import warm
    from starling_engine.worker.device.step_buffer import StepShape

    pretend(H200)
    forget_compiled()
    found: list[Sent] = []
    host, meta = AbsentRanks(Shard(0, 2)), torch.device("meta")
    ranks = NcclCommunicator(host, NotedGroup(found), meta, NotedSums(found))
    with mock.patch.object(warm, "absent_ranks", lambda _: RankCommunicators(ranks, ALONE)):
        runner = warm.shapes_only_runner(config)
    found.clear()

    def decode() -> None:
        fields = runner._writer.padding(StepShape(rows, rows, rows))
        runner._head(fields, runner._forward(fields, None, 1), 0)

    with torch.inference_mode():
        note_launches(decode)
    return found


def config_of(folder: Path, shape: str, **changes: Any) -> WorkerConfig:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"num_hidden_layers": LAYERS}))
    settings = {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "layout": ParallelLayout(tensor=2)}
    return plain_worker(
        model_path=str(folder), **settings, max_model_len=1024, max_num_seqs=1100, max_num_batched_tokens=1100, **changes
    )


@pytest.mark.parametrize(
    ("shape", "rows", "by", "changes"),
    [
        ("Llama-3-8B", 1, "one with a norm", {}),
        ("Llama-3-8B", 64, "one with a norm", {}),
        ("Llama-3-8B", 65, "one kernel", {}),
        ("Llama-3-8B", 1024, "one kernel", {}),
        ("Llama-3-8B", 1025, "nccl", {}),
        ("Llama-3-8B", 64, "one with a norm", {"quantization": "fp8"}),
        ("30B-A3B", 64, "one with a norm", {}),
        ("30B-A3B", 128, "one kernel", {"expert_parallel": True}),
    ],
    ids=["8B, 1 row", "64 rows", "65 rows", "8 MiB", "more", "8B in fp8", "experts in parts", "whole experts"],
)
def test_parts_of_each_sum_are_sent_in_bf16(shape: str, rows: int, by: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Parts in fp32 would be twice as many bytes, behind a cast and before another. No residual is added to the embedding."""
    found = in_compiler(sent_by_a_decode, config_of(tmp_path, shape, **changes), rows)
    part = rows * SHAPES[shape]["hidden_size"] * 2
    sums = [each for each in found if each[0] != "gather"]
    first = "nccl" if by == "nccl" else "one kernel"
    assert sums == [(first, "torch.bfloat16", part)] + [(by, "torch.bfloat16", part)] * (SUMS - 1)
    assert [dtype for what, dtype, _ in found if what == "gather"] == ["torch.bfloat16"], "logits"
