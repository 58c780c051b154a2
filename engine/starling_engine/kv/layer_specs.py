"""The KV specs and groups of a model's layers. Imports no torch, so that memory can be planned without it."""

from dataclasses import replace

from starling_engine.config import CACHE_GROUP, WorkerConfig
from starling_engine.kv.spec import (
    ChunkedLocalSpec,
    KVGroup,
    KVSpec,
    LatentSpec,
    RunSpec,
    StateGroup,
    StatePart,
    StateSpec,
    WindowRowsSpec,
    WindowSpec,
    group_layers,
    slab_bytes,
)
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.gated_delta import GatedDeltaConfig
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mamba import MambaConfig
from starling_engine.model_config.mamba2 import Mamba2Config
from starling_engine.topology.shard import ALL, Shard

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "uint8": 1}


def kv_groups(model: ModelConfig, config: WorkerConfig) -> list[KVGroup]:
    """Returns the groups of all layers, each with the layers of this rank: block tables are the same on every rank."""
    at, layout = config.layout.coordinates(config.rank), config.layout
    local = model.stage_layers(Shard(at.pp, layout.pipeline))
    groups = whole_groups(model, config, Shard(at.tp, layout.tensor))
    return [
        KVGroup(group.spec, tuple(i for i in group.layers if i in local), tuple(pair for pair in group.readers if pair[0] in local))
        for group in groups
    ]


def state_group(model: ModelConfig, config: WorkerConfig) -> StateGroup | None:
    """Returns the layers of this rank that have a recurrent state, and how many blocks one takes on the rank that needs most."""
    if not model.has_state:
        return None
    states = [_state_layers(model, replace(config, rank=rank)) for rank in range(config.layout.world_size)]
    spec, layers = states[config.rank][1:]
    num_blocks = max(spec.columns(len(layers), slab)[-1] for slab, spec, layers in states)
    return StateGroup(spec, layers, num_blocks, config.block_size)


def _state_layers(model: ModelConfig, config: WorkerConfig) -> tuple[int, StateSpec, tuple[int, ...]]:
    """Returns the bytes of the rank's slabs, and the state of those of its layers that have one."""
    at, layout = config.layout.coordinates(config.rank), config.layout
    local = model.stage_layers(Shard(at.pp, layout.pipeline))
    specs = state_specs(model, Shard(at.tp, layout.tensor))
    (spec,) = set(specs.values())
    layers = tuple(i for i in specs if i in local)
    return slab_bytes(kv_groups(model, config), spec, len(layers)), spec, layers


def whole_groups(model: ModelConfig, config: WorkerConfig, tensor: Shard = ALL) -> list[KVGroup]:
    """Returns the groups with the layers of all stages, for the heads of `tensor`. An encoder has none."""
    if not model.causal:
        return []
    sizes = config.block_size, config.kv_dtype
    return group_layers(kv_specs(model, *sizes, tensor), run_specs(model, *sizes), cache_readers(model))


def kv_specs(config: ModelConfig, block_size: int, kv_dtype: str, tensor: Shard = ALL) -> dict[int, KVSpec]:
    """Returns the spec of each layer that has keys and values, by its index, for the heads of `tensor`.

    `block_size` is in tokens, `kv_dtype` a key of DTYPE_BYTES.
    """
    if not config.attends:
        return {}
    attending = {index: layer for index, layer in enumerate(config.layers) if layer.attends and layer.cache_of is None}
    return {index: _spec(config, tensor, layer, block_size, kv_dtype) for index, layer in attending.items()}


def cache_readers(config: ModelConfig) -> dict[int, int]:
    """Returns the layers that read another one's keys and values, with that one, by their index."""
    return {index: layer.cache_of for index, layer in enumerate(config.layers) if layer.cache_of is not None}


def run_specs(config: ModelConfig, block_size: int, kv_dtype: str) -> dict[int, RunSpec]:
    """Returns the spec of the compressed runs of each layer that has such, by its index. They are the same on every rank."""
    shape, runs = config.compressed, {index: layer.runs for index, layer in enumerate(config.layers) if layer.runs is not None}
    if shape is None:
        return {}
    width = DTYPE_BYTES[kv_dtype]
    return {at: RunSpec(block_size, 1, shape.entry_size(run), width, run.rate) for at, run in runs.items()}


def state_specs(config: ModelConfig, tensor: Shard = ALL) -> dict[int, StateSpec]:
    """Returns the state of each layer that has one, by its index, for the heads of `tensor`.

    That is a matrix of each head, or with Mamba a vector of each channel. Behind it are the last inputs of the short convolution,
    the oldest first. A gated short convolution has these inputs alone.
    """
    if config.gated_delta is not None:
        spec = _delta_state(config.gated_delta, tensor)
    elif config.mamba is not None:
        spec = _mamba_state(config.mamba, tensor)
    elif config.mamba2 is not None:
        spec = _mamba2_state(config.mamba2, tensor)
    elif config.short_conv is not None:
        conv = config.short_conv
        spec = StateSpec((StatePart(conv.kernel - 1, (tensor.of(conv.channels).size,)),))
    else:
        return {}
    return {index: spec for index, layer in enumerate(config.layers) if layer.has_state}


def _delta_state(delta: GatedDeltaConfig, tensor: Shard) -> StateSpec:
    channels = 2 * tensor.of(delta.key_heads).size * delta.key_dim + tensor.of(delta.value_heads).size * delta.value_dim
    recurrent = StatePart(tensor.of(delta.value_heads).size, (delta.key_dim, delta.value_dim))
    return StateSpec((recurrent, StatePart(delta.kernel - 1, (channels,))))


def _mamba_state(mamba: MambaConfig, tensor: Shard) -> StateSpec:
    """Rows have one element of each channel, as vectors of channels are computed."""
    row = (tensor.of(mamba.channels).size,)
    return StateSpec((StatePart(mamba.state_size, row), StatePart(mamba.kernel - 1, row)))


def _mamba2_state(mamba: Mamba2Config, tensor: Shard) -> StateSpec:
    heads, groups = tensor.of(mamba.heads).size, tensor.heads(mamba.groups).size
    channels = heads * mamba.head_dim + 2 * groups * mamba.state_size
    recurrent = StatePart(heads, (mamba.state_size, mamba.head_dim))
    return StateSpec((recurrent, StatePart(mamba.kernel - 1, (channels,))))


def _spec(config: ModelConfig, tensor: Shard, layer: LayerConfig, block_size: int, kv_dtype: str) -> KVSpec:
    own = config.heads_of(layer)
    heads, dtype_bytes, row_size = tensor.heads(own.count).size, DTYPE_BYTES[kv_dtype], _row_size(own.dim, kv_dtype)
    if config.mla:  # one row for all heads, the same on every rank
        return LatentSpec(block_size, 1, config.mla.row_dim, dtype_bytes)
    if config.compressed:
        shape, runs = config.compressed, layer.runs
        window = max(layer.window, 0 if runs is None else runs.span)
        return WindowRowsSpec(block_size, 1, shape.row_size(runs), dtype_bytes, window)
    if layer.attention_chunk:
        return ChunkedLocalSpec(block_size, heads, row_size, dtype_bytes, layer.attention_chunk)
    if layer.window:
        return WindowSpec(block_size, heads, row_size, dtype_bytes, layer.window)
    return KVSpec(block_size, heads, row_size, dtype_bytes)


def _row_size(head_dim: int, kv_dtype: str) -> int:
    """Returns the elements of a row: codes of 8 or 4 bits come with a scale, and those of 4 with a minimum, for each 32 columns."""
    match kv_dtype:
        case "int8":
            return head_dim + head_dim // CACHE_GROUP * 2
        case "uint8":
            return head_dim // 2 + head_dim // CACHE_GROUP * 4
    return head_dim
