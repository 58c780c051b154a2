"""Checks whether a layout can split a model. Imports no torch."""

from starling_engine.errors import ConfigError
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.registry import definition_of
from starling_engine.topology.layout import ParallelLayout
from starling_engine.topology.shard import Shard


def check_split(model: ModelConfig, layout: ParallelLayout, *, expert_parallel: bool = False) -> None:
    """Raises ConfigError naming the sizes that do not divide, and the sizes that are possible."""
    if expert_parallel and model.moe is None:
        raise ConfigError("this model has no experts; only false is possible", "enable_expert_parallel")
    tensor = layout.tensor
    _check_stages(model, layout.pipeline)
    if Shard(tensor - 1, tensor).rounded(model.vocab_size).size == 0:
        raise ConfigError(
            f"a vocabulary of {model.vocab_size} leaves nothing to the last of {tensor} ranks", "tensor_parallel_size"
        )
    if not _splits(model, tensor, expert_parallel):
        most = model.num_heads or max(_divided(model, expert_parallel).values())
        possible = ", ".join(str(n) for n in range(1, most + 1) if _splits(model, n, expert_parallel))
        parts = ", ".join(f"{name} ({size})" for name, size in _divided(model, expert_parallel).items())
        has_no_heads = model.mla or model.compressed or not model.attends
        counts = ", ".join(str(own.count) for own in model.kv_heads)
        shared = "" if has_no_heads else f", and its key-value heads ({counts}) divide or be divided"
        shared += f"; so must the groups of its Mamba-2 ({model.mamba2.groups})" if model.mamba2 is not None else ""
        raise ConfigError(
            f"{tensor} ranks cannot share this model: it must divide {parts}{shared}; possible: {possible}", "tensor_parallel_size"
        )


def _check_stages(model: ModelConfig, stages: int) -> None:
    if stages > model.num_layers:
        raise ConfigError(f"must be at most {model.num_layers}, the model's layers, got {stages}", "pipeline_parallel_size")
    if not _has_layers(model, stages):
        possible = ", ".join(str(n) for n in range(1, model.num_layers + 1) if _has_layers(model, n))
        why = "leave one without a layer, for layers that share a choice of tokens, or keys and values, stay together"
        raise ConfigError(f"{stages} stages {why}; possible: {possible}", "pipeline_parallel_size")
    if stages > 1 and model.traits.layer_inputs is not None:
        why = "later stages do not know token ids, of which each layer has an input; only 1 is possible"
        raise ConfigError(why, "pipeline_parallel_size")
    if not _reads_ids(model, stages):
        possible = ", ".join(str(n) for n in range(1, model.num_layers + 1) if _reads_ids(model, n))
        why = "leave layers whose experts go by token ids to another one than the first"
        raise ConfigError(f"{stages} stages {why}; possible: {possible}", "pipeline_parallel_size")


def _reads_ids(model: ModelConfig, stages: int) -> bool:
    """Says if layers whose experts go by token ids are all in the first stage: later ones do not know these in time."""
    return model.moe is None or not model.moe.by_table or model.moe.by_table[-1] in model.stage_layers(Shard(0, stages))


def _has_layers(model: ModelConfig, stages: int) -> bool:
    """Says if each of so many stages has a layer."""
    return all(model.stage_layers(Shard(at, stages)) for at in range(stages))


def _divided(model: ModelConfig, expert_parallel: bool) -> dict[str, int]:
    """Returns the sizes of which every rank holds an equal part, by their name in errors."""
    sizes = {"its attention heads": model.num_heads} if model.attends else {}
    if model.compressed is not None:
        sizes["the groups of its heads"] = model.compressed.groups
    if model.gated_delta is not None:
        sizes["the key heads of its Gated DeltaNet"] = model.gated_delta.key_heads
    if model.mamba is not None:
        sizes["the channels of its Mamba"] = model.mamba.channels
    if model.mamba2 is not None:
        sizes["the heads of its Mamba-2"] = model.mamba2.heads
    if model.short_conv is not None:
        sizes["the channels of its short convolutions"] = model.short_conv.channels
    if any(layer.feed_forward in ("mlp", "mlp and experts") for layer in model.layers):
        sizes["the width of its MLP"] = model.intermediate_size
    if model.moe is not None:
        if expert_parallel:
            sizes["the experts of a layer"] = model.moe.num_experts
        else:
            sizes["the width of an expert"] = model.moe.intermediate_size
        if model.moe.shared_size:
            sizes["the width of its shared experts"] = model.moe.shared_size
    return sizes


def _splits(model: ModelConfig, tensor: int, expert_parallel: bool) -> bool:
    shared = model.mla is not None or not any(own.count % tensor and tensor % own.count for own in model.kv_heads)
    names = definition_of(model.architecture).names
    if names.q == names.k:  # a rank has whole groups of the rows of a matrix that holds all three
        shared = shared and not any(own.count % tensor for own in model.kv_heads)
    if model.mamba2 is not None:
        groups = model.mamba2.groups
        shared = shared and not (groups % tensor and tensor % groups)
    return shared and not any(size % tensor for size in _divided(model, expert_parallel).values())
