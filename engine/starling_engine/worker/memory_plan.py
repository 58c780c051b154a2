"""What a rank's memory goes to, and the KV cache that comes of it."""

import gc
import math
from collections.abc import Callable

import numpy as np
import torch

from starling_engine.config import WorkerConfig
from starling_engine.kv.spec import KVGroup, peak_blocks
from starling_engine.kv_offload.sizes import host_memory
from starling_engine.ledger import Ledger, activation_bytes, block_bytes, plan_memory
from starling_engine.models.decoder import Decoder
from starling_engine.platforms.base import Platform
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.pending_step import Runner


def plan(
    config: WorkerConfig,
    platform: Platform,
    model: Decoder,
    groups: list[KVGroup],
    dtype: torch.dtype,
    reserved: int,
    tables: int,
    make: Callable[[list[torch.Tensor]], Runner],
) -> Ledger:
    """For a model that is loaded; `reserved` elements of weights come later, and requests fill `tables` bytes of the batch.

    `make` gives the runner over a cache, to be measured. Raises ConfigError where no request of max_model_len fits.
    """
    # First, for it also takes what torch does not count: modules, libraries' workspaces, communicators.
    activations = _activations(config, platform, model, groups, dtype, make)
    held = sum(math.prod(slot.taken) for slot in model.slots().values())
    in_flight = config.layout.depth(asynchronous=True) * config.max_num_batched_tokens
    per_request = peak_blocks(groups, config.max_model_len, in_flight)
    return plan_memory(
        total=platform.total_memory(),
        available=platform.available_memory(),
        fraction=config.memory_fraction or platform.memory_fraction,
        ranks=config.local_ranks if platform.shared_memory else 1,
        weights=(held + reserved) * dtype.itemsize,
        activations=activations,
        kv_bytes=config.kv_cache_memory_bytes,
        bytes_per_block=block_bytes(groups),
        block_size=config.block_size,
        useful_blocks=per_request * config.max_num_seqs + 1,
        needed_blocks=per_request + 1,
        host=host_memory(config.tiers),
        tables=tables,
        unified=platform.shared_memory,
    )


def _activations(
    config: WorkerConfig,
    platform: Platform,
    model: Decoder,
    groups: list[KVGroup],
    dtype: torch.dtype,
    make: Callable[[list[torch.Tensor]], Runner],
) -> int:
    """Working memory of the largest step: measured on a device that can tell, with a cache of one block; else computed."""
    measured = _measure(config, platform, groups, make) if platform.queue is not None else None
    if measured is not None:
        return measured + _expanded(config, model) * dtype.itemsize
    return activation_bytes(model.config, dtype.itemsize, config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)


def _measure(
    config: WorkerConfig, platform: Platform, groups: list[KVGroup], make: Callable[[list[torch.Tensor]], Runner]
) -> int | None:
    with torch.inference_mode():
        runner = make(allocate(groups, 1, kv_dtype(config), platform.device))
        assert isinstance(runner, DeviceRunner), "devices with a queue have no other"
        measured = runner.peak_bytes()
    del runner
    gc.collect()  # it stands in circles, and what it holds would be counted as taken, beside being in `measured`
    return measured


def _expanded(config: WorkerConfig, model: Decoder) -> int:
    """Elements that a long prompt takes besides, whose latents are expanded: a step of padding attends to latents as they are."""
    mla = model.config.mla
    return mla.scratch_elements(config.max_num_batched_tokens, config.max_model_len) if mla is not None else 0


def kv_dtype(config: WorkerConfig) -> torch.dtype:
    """Of cached keys and values."""
    found: torch.dtype = getattr(torch, config.kv_dtype)
    return found


def allocate(groups: list[KVGroup], num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """One storage tensor for each place in a group; layers of different groups share a place, since they never share a page.

    Returns each layer's view [num_blocks, *page_shape]. Pages are zero, so nothing read is ever NaN.
    """
    size = max(len(group.layers) for group in groups)
    places = [_zeros(num_blocks * groups[0].spec.page_bytes, device) for _ in range(size)]
    views: dict[int, torch.Tensor] = {}
    for group in groups:
        for place, layer in zip(places, group.layers, strict=False):
            views[layer] = place.view(dtype).view(num_blocks, *group.spec.page_shape)
    return [views[layer] for layer in sorted(views)]


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """On a CPU, pages that the system gives when they are first written: torch.zeros would touch all of them now."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
