"""Ranks run in a thread or in processes, with some steps ahead."""

import pytest
from starling_engine.config import WorkerConfig
from starling_engine.executor.base import needs_processes
from starling_engine.topology.layout import ParallelLayout

WORKER = {
    "model_path": "m",
    "load_format": "auto",
    "dtype": "float32",
    "seed": 0,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 8,
    "kv_cache_memory_bytes": None,
    "memory_fraction": None,
    "attention_backend": "auto",
    "num_threads": 1,
}


@pytest.mark.parametrize(
    ("device", "has_gpu", "settings", "needed"),
    [
        ("cpu", False, {}, False),
        ("cpu", True, {}, False),
        ("auto", False, {}, False),
        ("auto", True, {}, True),
        ("cuda", True, {}, True),
        ("interpreter", False, {}, False),
        ("cpu", False, {"layout": ParallelLayout(tensor=2)}, True),
        ("cpu", False, {"dp_sync": True}, True),
    ],
)
def test_a_device_with_a_queue_has_a_process_of_its_own(
    device: str, has_gpu: bool, settings: dict[str, object], needed: bool
) -> None:
    assert needs_processes(WorkerConfig(device=device, **WORKER, **settings), has_gpu=has_gpu) is needed


@pytest.mark.parametrize(
    ("pipeline", "asynchronous", "depth"), [(1, False, 1), (1, True, 2), (2, False, 2), (2, True, 3), (4, True, 5)]
)
def test_stages_have_a_step_to_spare(pipeline: int, asynchronous: bool, depth: int) -> None:
    assert ParallelLayout(pipeline=pipeline, tensor=2).depth(asynchronous=asynchronous) == depth
