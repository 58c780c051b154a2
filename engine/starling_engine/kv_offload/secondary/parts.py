"""Parts of a chunk that ranks hold, under this layout and under others. Pure: imports no torch."""

from dataclasses import dataclass

from starling_engine.config import WorkerConfig
from starling_engine.kv.layer_specs import whole_groups
from starling_engine.kv.spec import KVGroup
from starling_engine.kv_offload.secondary.base import CHUNK, ChunkPart
from starling_engine.kv_offload.sizes import rank_slab_bytes, state_pieces
from starling_engine.model_config.config import ModelConfig
from starling_engine.topology.shard import Shard


@dataclass(frozen=True)
class GroupShare:
    """A rank's share of a KV group's chunks.

    covers     sets of parts that each hold all that the rank needs, as `covers_of` returns them
    planes     2 for keys and values, 1 for latents
    run_bytes  bytes of one layer and one head in one plane
    writes     whether this rank writes its part, which several may hold alike
    window     chunks from the end of a prefix that its next token reads; 0 for all of them
    snapshot   whether these are pieces of snapshots: at a prefix's end, of use together
    """

    covers: list[list[ChunkPart]]
    planes: int
    run_bytes: int
    writes: bool = True
    window: int = 0
    snapshot: bool = False

    def shape(self, part: ChunkPart) -> tuple[int, int, int, int]:
        """Returns [layers, planes, heads, bytes of a run]."""
        return (part.end_layer - part.first_layer, self.planes, part.end_head - part.first_head, self.run_bytes)


def group_shares(model: ModelConfig, config: WorkerConfig) -> list[GroupShare]:
    """Returns one rank's share of each KV group's chunks, and behind them of each piece of a snapshot."""
    rank, layout = config.layout.coordinates(config.rank), config.layout
    tensor, stage = Shard(rank.tp, layout.tensor), Shard(rank.pp, layout.pipeline)
    shares = []
    for group in whole_groups(model, config):
        local = part_of(model, group, tensor, stage)
        writes = all(part_of(model, group, Shard(lower, layout.tensor), stage) != local for lower in range(rank.tp))
        window = -(-group.spec.window // CHUNK) + 1 if group.spec.window else 0  # it may begin within a chunk
        covers = covers_of(model, group, tensor, stage)[: 1 if model.has_state else None]  # others write under other fingerprints
        shares.append(GroupShare(covers, group.spec.planes, run_bytes(group, config), writes, window))
    own = ChunkPart(rank.pp, rank.pp + 1, rank.tp, rank.tp + 1)
    slab, pieces = rank_slab_bytes(model, config), state_pieces(model, config)
    return [*shares, *(GroupShare([[own]], 1, blocks * slab, snapshot=True) for blocks in pieces)]


def run_bytes(group: KVGroup, config: WorkerConfig) -> int:
    """Returns the bytes of one layer and one head in one plane of a chunk."""
    spec, blocks = group.spec, CHUNK // config.block_size
    return spec.layer_block_bytes * blocks // (spec.planes * spec.num_kv_heads)


def part_of(model: ModelConfig, group: KVGroup, tensor: Shard, stage: Shard) -> ChunkPart | None:
    """Returns the part that one rank holds of a chunk of `group` (with the layers of all stages); None without a layer of it."""
    local = model.stage_layers(stage)
    layers = [index for index, layer in enumerate(group.layers) if layer in local]
    if not layers:
        return None
    heads = Shard().heads(1) if model.mla else tensor.heads(_heads(model, group))
    return ChunkPart(layers[0], layers[-1] + 1, heads.start, heads.start + heads.size)


def _heads(model: ModelConfig, group: KVGroup) -> int:
    """Returns the key-value heads of a group's layers, on all ranks together."""
    return model.heads_of(model.layers[group.layers[0]]).count


def covers_of(model: ModelConfig, group: KVGroup, tensor: Shard, stage: Shard) -> list[list[ChunkPart]]:
    """Returns sets of parts that each hold all that a rank needs: the part that it writes itself, then a set for each layout that
    others may have written with.

    Layouts are in the same order for every group of a model.
    """
    local = part_of(model, group, tensor, stage)
    if local is None:
        return []
    covers, sizes = [[local]], (1, 2, 4, 8)
    for pipeline in sizes:
        for ways in sizes:
            if pipeline > model.num_layers or any(own.count % ways and ways % own.count for own in model.kv_heads):
                continue
            parts = {part_of(model, group, Shard(t, ways), Shard(p, pipeline)) for t in range(ways) for p in range(pipeline)}
            covers.append(sorted(part for part in parts if part is not None and overlap(part, local) is not None))
    return covers


def overlap(one: ChunkPart, other: ChunkPart) -> ChunkPart | None:
    """Returns the part that both hold."""
    first, end = max(one.first_layer, other.first_layer), min(one.end_layer, other.end_layer)
    low, high = max(one.first_head, other.first_head), min(one.end_head, other.end_head)
    return ChunkPart(first, end, low, high) if first < end and low < high else None
