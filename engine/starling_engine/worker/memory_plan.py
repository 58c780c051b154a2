"""Plans a rank's memory, and allocates the KV cache that is left."""

import gc

import numpy as np
import torch

from starling_engine.config import WorkerConfig
from starling_engine.kv.spec import KVGroup, peak_blocks
from starling_engine.kv_offload.sizes import host_memory
from starling_engine.ledger import Ledger, MemoryRequest, activation_bytes, block_bytes, plan_memory
from starling_engine.models.decoder import Decoder
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.runner_factory import RunnerFactory


def plan(factory: RunnerFactory, dtype: torch.dtype, reserved: int) -> Ledger:
    """Plans for a model that is loaded; `reserved` elements of weights come later.

    Raises ConfigError where no request of max_model_len fits.
    """
    config, platform, model, groups = factory.config, factory.platform, factory.model, factory.groups
    # First, for it also takes what torch does not count: modules, libraries' workspaces, communicators.
    activations = _activations(factory, dtype)
    held = sum(slot.held_bytes(dtype.itemsize) for slot in model.weight_slots().values())
    in_flight = config.layout.depth(asynchronous=True) * config.max_num_batched_tokens
    per_request = peak_blocks(groups, config.max_model_len, in_flight)
    return plan_memory(
        MemoryRequest(
            total=platform.total_memory(),
            available=platform.available_memory(),
            fraction=config.memory_fraction or platform.memory_fraction,
            ranks=config.local_ranks if platform.shared_memory else 1,
            weights=held + reserved * dtype.itemsize,
            activations=activations,
            kv_bytes=config.kv_cache_memory_bytes,
            bytes_per_block=block_bytes(groups),
            block_size=config.block_size,
            useful_blocks=per_request * config.max_num_seqs + 1,
            needed_blocks=per_request + 1,
            host=host_memory(config.tiers),
            tables=factory.batch.table_bytes,
            unified=platform.shared_memory,
        )
    )


def _activations(factory: RunnerFactory, dtype: torch.dtype) -> int:
    """Working memory of the largest step: measured on a device that can, with a cache of one block; else computed."""
    config, model = factory.config, factory.model
    measured = _measure(factory) if factory.platform.queue is not None else None
    if measured is not None:
        return measured + _expanded_latents(config, model) * dtype.itemsize
    sizes = config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
    return activation_bytes(model.config, dtype.itemsize, *sizes) + factory.recorded_bytes


def _measure(factory: RunnerFactory) -> int | None:
    with torch.inference_mode():
        runner = factory.make(allocate(factory.groups, 1, kv_dtype(factory.config), factory.platform.device))
        assert isinstance(runner, DeviceRunner), "devices with a queue have no other"
        measured = runner.peak_bytes()
    del runner
    gc.collect()  # it has reference cycles, and its memory would be counted as taken, and in `measured` again
    return measured


def _expanded_latents(config: WorkerConfig, model: Decoder) -> int:
    """Elements that a long prompt takes for expanded latents: the step that is measured attends to latents as they are."""
    mla = model.config.mla
    return mla.scratch_elements(config.max_num_batched_tokens, config.max_model_len) if mla is not None else 0


def kv_dtype(config: WorkerConfig) -> torch.dtype:
    """Returns the dtype of cached keys and values."""
    found: torch.dtype = getattr(torch, config.kv_dtype)
    return found


def allocate(groups: list[KVGroup], num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Allocates one storage tensor for each index in a group; layers of different groups share it, for they never share a block.

    Returns each layer's view [num_blocks, *layer_block_shape]. Blocks are zero, so nothing read is ever NaN.
    """
    size = max(len(group.layers) for group in groups)
    storages = [_zeros(num_blocks * groups[0].spec.layer_block_bytes, device) for _ in range(size)]
    views: dict[int, torch.Tensor] = {}
    for group in groups:
        for storage, layer in zip(storages, group.layers, strict=False):
            views[layer] = storage.view(dtype).view(num_blocks, *group.spec.layer_block_shape)
    return [views[layer] for layer in sorted(views)]


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns zeros; on a CPU of pages that the system gives when they are first written: torch.zeros would touch all of them."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
