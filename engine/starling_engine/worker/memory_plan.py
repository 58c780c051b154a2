"""Plans a rank's memory, and allocates the KV cache that is left."""

import gc
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from starling_engine.config import WorkerConfig
from starling_engine.kernels.kv_cache import KVCache, LayerCache, ParallelCache, RunCache
from starling_engine.kernels.recurrent_state import LayerState, StateRows
from starling_engine.kv.spec import KVGroup, RunSpec, StateGroup, peak_blocks, slab_bytes
from starling_engine.kv_offload.sizes import host_memory
from starling_engine.ledger import Ledger, MemoryRequest, activation_bytes, plan_memory, replay_bytes
from starling_engine.native.weight_memory import LINE
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.runner_factory import RunnerFactory

SNAPSHOTS = 2
"""Snapshots of a request's state that there is room for: of its prompt and of its output."""


def plan(factory: RunnerFactory, dtype: torch.dtype, reserved: int) -> Ledger:
    """Plans for a model that is loaded; `reserved` elements of weights come later.

    Raises ConfigError where no request of max_model_len fits.
    """
    config, platform, model, groups = factory.config, factory.platform, factory.model, factory.groups
    # First, for it also takes what torch does not count: modules, libraries' workspaces, communicators.
    activations, recordings = _working_memory(factory, dtype)
    held = sum(slot.held_bytes(dtype.itemsize) for slot in model.weight_slots().values()) + model.projections.held_bytes
    held += 0 if model.token_heads is None else model.token_heads.held_bytes
    in_flight = config.layout.depth(asynchronous=True) * config.max_num_batched_tokens
    state, state_blocks = factory.state, factory.state.num_blocks if factory.state is not None else 0
    per_request = peak_blocks(groups, config.max_model_len, in_flight) + state_blocks
    return plan_memory(
        MemoryRequest(
            total=platform.total_memory(),
            available=platform.available_memory(),
            fraction=config.memory_fraction or platform.memory_fraction,
            ranks=config.local_ranks if platform.shared_memory else 1,
            weights=held + reserved * dtype.itemsize,
            activations=activations,
            recordings=recordings,
            kv_bytes=config.kv_cache_memory_bytes,
            slab_bytes=_slab_bytes(groups, state),
            block_size=config.block_size,
            useful_blocks=(per_request + SNAPSHOTS * state_blocks) * config.max_num_seqs + 1,
            needed_blocks=per_request + 1,
            state_blocks=0 if groups else state_blocks,
            host=host_memory(config.tiers),
            tables=factory.batch.table_bytes,
            unified=platform.shared_memory,
        )
    )


def _working_memory(factory: RunnerFactory, dtype: torch.dtype) -> tuple[int, int]:
    """Returns that of the largest step, and what recordings take besides.

    Both are measured on a device that can, with a cache of one block; the first is computed elsewhere.
    """
    config, model = factory.config, factory.model
    measured, recordings = _measure(factory) if factory.platform.queue is not None and model.config.causal else (None, 0)
    state_layers = () if factory.state is None else factory.state.layers
    # A stage keeps rows until their sequences go on, which is when all stages have run them.
    drafted = config.max_num_samples * config.layout.pipeline
    kept = replay_bytes(model.config, dtype.itemsize, len(state_layers), drafted)
    if measured is not None:
        # The step that is measured attends to nothing, or to latents as they are.
        scratch = model.config.attention_scratch(config.max_num_batched_tokens, config.max_model_len)
        return measured + kept + (scratch + factory.gathered_elements) * dtype.itemsize, recordings
    sizes = config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
    return activation_bytes(model.config, dtype.itemsize, *sizes) + kept + factory.recorded_bytes, recordings


def _measure(factory: RunnerFactory) -> tuple[int | None, int]:
    with torch.inference_mode():
        device, layers = factory.platform.device, factory.model.layers
        runner = factory.make(allocate(factory.groups, 1, kv_dtype(factory.config), device, factory.state, layers))
        assert isinstance(runner, DeviceRunner), "devices with a queue have no other"
        measured = runner.peak_bytes(), runner.recording_bytes()
    del runner
    gc.collect()  # it has reference cycles, and its memory would be counted as taken, and in `measured` again
    return measured


def kv_dtype(config: WorkerConfig) -> torch.dtype:
    """Returns the dtype of cached keys and values."""
    found: torch.dtype = getattr(torch, config.kv_dtype)
    return found


def allocate(
    groups: Sequence[KVGroup],
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    state: StateGroup | None = None,
    layers: Iterable[int] | None = None,
) -> KVCache:
    """Allocates a slab for each block. Groups overlay each other in it, for they never share a block.

    `layers` are the rank's; default: all that cache something.

    Slabs are zero, so nothing read is ever NaN.
    """
    size = _slab_bytes(groups, state)
    storage = _zeros(num_blocks * size, device).view(num_blocks, size)
    states = {} if state is None else _state_views(state, storage)
    views: dict[int, torch.Tensor] = {}
    entries: dict[int, torch.Tensor] = {}
    for group in groups:
        spec, found = group.spec, entries if isinstance(group.spec, RunSpec) else views
        for index, layer in enumerate(group.layers):
            part = storage.narrow(1, index * spec.layer_block_bytes, spec.layer_block_bytes)
            found[layer] = part.view(dtype).view(num_blocks, *spec.layer_block_shape)
        found |= {reader: found[layer] for reader, layer in group.readers}
    own = sorted({*views, *states}) if layers is None else layers
    return KVCache(storage, [_layer_cache(views.get(layer), states.get(layer), entries.get(layer)) for layer in own])


def _slab_bytes(groups: Sequence[KVGroup], state: StateGroup | None) -> int:
    return slab_bytes(groups) if state is None else slab_bytes(groups, state.spec, len(state.layers))


def _layer_cache(kv: torch.Tensor | None, state: LayerState | None, entries: torch.Tensor | None) -> LayerCache:
    if entries is not None:
        assert kv is not None, "a layer with entries has rows of a window beside them"
        return RunCache(kv, entries)
    return ParallelCache(kv, state) if kv is not None and state is not None else state if kv is None else kv


def _state_views(state: StateGroup, storage: torch.Tensor) -> dict[int, LayerState]:
    """Returns each layer's state: the rows of all layers lie one after the other, those of each part in blocks of their own."""
    slabs, size = storage.view(torch.float32), storage.shape[1]
    columns = state.spec.columns(len(state.layers), size)
    places = [(part, column, size // part.row_bytes) for part, column in zip(state.spec.parts, columns, strict=False)]
    return {
        layer: tuple(StateRows(slabs, column, per, at * part.rows, part.rows, part.shape) for part, column, per in places)
        for at, layer in enumerate(state.layers)
    }


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Returns zeros; on a CPU of pages that the system gives when they are first written: torch.zeros would touch all of them.

    They begin at a cache line. Numpy's begin 16 bytes behind one, where each register of keys and values would be read from two.
    """
    if device.type == "cpu":
        memory = np.zeros(num_bytes + LINE, np.uint8)
        start = -memory.ctypes.data % LINE
        return torch.from_numpy(memory[start : start + num_bytes])
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
