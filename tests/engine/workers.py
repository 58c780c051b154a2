"""Settings of a worker that loads nothing: for tests of what is around it."""

from typing import Any

from starling_engine.config import WorkerConfig


def plain_worker(**changes: Any) -> WorkerConfig:
    """One rank on a CPU, with small limits and no model."""
    settings: dict[str, Any] = {
        "model_path": "",
        "load_format": "auto",
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "kv_cache_memory_bytes": None,
        "memory_fraction": 0.5,
        "attention_backend": "auto",
        "num_threads": 1,
    }
    return WorkerConfig(**settings | changes)
