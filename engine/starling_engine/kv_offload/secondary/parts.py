"""Which objects hold what a rank needs of a chunk, under its own layout and under others. Pure: imports no torch."""

from starling_engine.kv.layer_specs import stage_layers
from starling_engine.kv.spec import KVGroup
from starling_engine.kv_offload.secondary.base import ChunkPart
from starling_engine.model_config.config import ModelConfig
from starling_engine.topology.shard import Shard

WAYS = (1, 2, 4, 8)
"""Tensor and pipeline sizes under which others may have written."""


def part_of(model: ModelConfig, group: KVGroup, tensor: Shard, stage: Shard) -> ChunkPart | None:
    """What one rank holds of a chunk of `group` (with the layers of all stages); None when no layer of it is there."""
    here = stage_layers(model, stage)
    places = [place for place, layer in enumerate(group.layers) if layer in here]
    if not places:
        return None
    heads = Shard().heads(1) if model.mla else tensor.heads(model.num_kv_heads)
    return ChunkPart(places[0], places[-1] + 1, heads.start, heads.start + heads.size)


def covers(model: ModelConfig, group: KVGroup, tensor: Shard, stage: Shard) -> list[list[ChunkPart]]:
    """Sets of objects that each hold all that a rank needs: first the one that it writes itself, then one for each other layout.

    Layouts are in the same order for every group of a model.
    """
    own = part_of(model, group, tensor, stage)
    if own is None:
        return []
    found = [[own]]
    for pipeline in WAYS:
        for ways in WAYS:
            if pipeline > model.num_layers or (model.num_kv_heads % ways and ways % model.num_kv_heads):
                continue
            written = {part_of(model, group, Shard(t, ways), Shard(p, pipeline)) for t in range(ways) for p in range(pipeline)}
            cover = sorted(part for part in written if part is not None and overlap(part, own) is not None)
            found.append(cover)
    return found


def overlap(one: ChunkPart, other: ChunkPart) -> ChunkPart | None:
    """What both hold."""
    first, end = max(one.first_layer, other.first_layer), min(one.end_layer, other.end_layer)
    low, high = max(one.first_head, other.first_head), min(one.end_head, other.end_head)
    return ChunkPart(first, end, low, high) if first < end and low < high else None
