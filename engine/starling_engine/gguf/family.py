"""An architecture of llama.cpp as it is read here, and the fields of a config that many of them have."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starling_engine.gguf.heads import no_head
from starling_engine.gguf.metadata import GgufMetadata
from starling_engine.gguf.names import COMMON, ModuleNames, Stored

Config = dict[str, Any]
ReadHead = Callable[[GgufMetadata, str], Config]
READ_EVERYWHERE = "rms_norm_eps"
SOFTMAX, SIGMOID = 1, 2
"""Numbers of llama.cpp for experts that are scored by a softmax, or by sigmoids."""


def nothing(_data: GgufMetadata) -> Config:
    """Returns no fields, for a family that has none of its own."""
    return {}


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """One architecture.

    name      in `architectures` of a config.json, unless `fields` have another one
    fields    of the config, which may replace those that all have
    modules   its names of modules beside those of all
    eps       the field for the epsilon of norms
    attends   False where no layer does, or `fields` reads the heads, too
    by_layer  numbers in which layers may differ; `fields` says how
    head      fields of a head on top of the architecture of this name
    """

    name: str
    fields: Callable[[GgufMetadata], Config] = nothing
    modules: ModuleNames
    eps: str = READ_EVERYWHERE
    attends: bool = True
    by_layer: tuple[str, ...] = ()
    head: ReadHead = no_head


def family(
    name: str,
    fields: Callable[[GgufMetadata], Config] = nothing,
    *modules: ModuleNames,
    eps: str = READ_EVERYWHERE,
    attends: bool = True,
    by_layer: tuple[str, ...] = (),
    head: ReadHead = no_head,
) -> GgufFamily:
    """Makes a family whose later names of modules replace earlier ones."""
    merged: dict[str, str | Stored | tuple[Stored, ...]] = dict(COMMON)
    for each in modules:
        merged.update(each)
    return GgufFamily(name=name, fields=fields, modules=merged, eps=eps, attends=attends, by_layer=by_layer, head=head)


def present(data: GgufMetadata, **keys: str) -> Config:
    """Returns fields by keys of the file, where it has these."""
    return {field: data.get(key) for field, key in keys.items() if data.get(key) is not None}


def read_windows(data: GgufMetadata) -> Config:
    """Returns the sliding window, and which layers have it: a list, the length of a pattern, or what the family does."""
    window, pattern = data.get("attention.sliding_window", 0), data.get("attention.sliding_window_pattern")
    if not window or (isinstance(pattern, list) and not any(pattern)):
        return {"sliding_window": None}
    found: Config = {"sliding_window": window}
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern[: data.num_layers]]
        return found | {"layer_types": kinds}
    return found if pattern is None else found | {"sliding_window_pattern": pattern}


def only_scored_by(data: GgufMetadata, score: int) -> None:
    """Raises UnsupportedModel for experts that a file says to be scored by something else."""
    if (found := data.get("expert_gating_func", score)) != score:
        raise data.refused("expert_gating_func", f"{found} is not supported; supported: {score}")


def temperature_length(data: GgufMetadata) -> int:
    """Returns the length by which the temperature of queries rises. Raises UnsupportedModel where it is not YaRN's."""
    original: int = data.number("rope.scaling.original_context_length")
    if (step := data.get("attention.temperature_length", original)) != original:
        raise data.refused("attention.temperature_length", f"{step} is not supported; supported: {original}, the length of YaRN")
    return original


def read_experts(data: GgufMetadata) -> Config:
    """Returns the experts under the names that families have for them."""
    count, used = data.number("expert_count"), data.number("expert_used_count")
    found = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), count)
    found |= dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), used)
    scaling, renormalize = data.get("expert_weights_scale", 0.0) or 1.0, data.get("expert_weights_norm", False)
    return found | {
        **present(data, moe_intermediate_size="expert_feed_forward_length"),
        "routed_scaling_factor": scaling,
        "norm_topk_prob": renormalize,
        "n_group": data.get("expert_group_count", 1) or 1,
        "topk_group": data.get("expert_group_used_count", 1) or 1,
    }
