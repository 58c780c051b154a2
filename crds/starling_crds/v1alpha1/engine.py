"""`spec.engine` and `spec.kvCache`: the engine's memory and scheduling."""

from typing import Annotated, Any, Literal

from pydantic import Field
from starling_crds.quantity import parse_quantity
from starling_crds.rules import Rule
from starling_crds.v1alpha1.base import ApiModel, ShapedBy
from starling_crds.v1alpha1.engine_arguments import EngineArgument, extra_arguments_model
from starling_crds.v1alpha1.strings import AbsolutePath, ObjectName, Size, StoreUrl


class SpeculativeSpec(ApiModel):
    """Speculative decoding; further settings go into extraArgs.speculative_config, which then has all of them."""

    method: Annotated[Literal["ngram", "suffix"], EngineArgument("spec_method")] = Field(
        description="Where drafts come from: ngram, the request's own tokens; suffix, earlier outputs too."
    )
    tokens: Annotated[int | None, EngineArgument("spec_tokens")] = Field(
        default=None, ge=1, le=32, description="Most drafts of a request in a step, by default 7; fewer where they do not pay."
    )


class EngineSpec(ApiModel):
    """Settings of the engine; each has the engine's default when it is left out."""

    RULES = (
        Rule(
            field="maxBatchedTokens",
            cel="self.maxBatchedTokens >= self.maxSequences",
            holds=lambda engine: engine.max_batched_tokens >= engine.max_sequences,
            message="must be at least maxSequences ({maxSequences}), so that each can decode in a step, got {maxBatchedTokens}",
        ),
    )

    kv_memory: Annotated[Size | None, EngineArgument("kv_cache_memory_bytes", kind=int)] = Field(
        default=None, description="Size of each rank's KV cache; wins over memoryFraction. A quantity such as 4Gi."
    )
    memory_fraction: Annotated[float | None, EngineArgument("gpu_memory_utilization")] = Field(
        default=None,
        gt=0,
        le=1,
        description=(
            "Share of the device's (on CPU: the cgroup's) memory that the engine may use in all."
            " By default 0.5 on CPUs, 0.9 on GPUs."
        ),
    )
    block_size: Annotated[Literal[8, 16, 32], EngineArgument("block_size")] = Field(
        default=16, description="Tokens in a block of the KV cache."
    )
    max_batched_tokens: Annotated[int, EngineArgument("max_num_batched_tokens")] = Field(
        default=2048, ge=1, le=1_048_576, description="Token budget of a step."
    )
    step_target_milliseconds: Annotated[int | None, EngineArgument("step_target_ms")] = Field(
        default=None,
        ge=0,
        le=60_000,
        description=(
            "About how long a step may take while requests decode, so that long prompts do not stall streams; 0 is no target."
            " Prompts get what then fits, at least a block. By default 200 on CPUs, 40 on GPUs."
        ),
    )
    max_sequences: Annotated[int, EngineArgument("max_num_seqs")] = Field(
        default=256, ge=1, le=65_536, description="Requests that run at once."
    )
    max_waiting: Annotated[int, EngineArgument("max_num_waiting")] = Field(
        default=1024, ge=1, le=1_048_576, description="Requests that may queue; further ones get 429."
    )
    prefix_caching: Annotated[bool, EngineArgument("enable_prefix_caching")] = Field(
        default=True, description="Whether prompts' KV is kept for later requests."
    )
    scheduling_policy: Annotated[Literal["fcfs", "priority"], EngineArgument("scheduling_policy")] = Field(
        default="fcfs", description="Order in which waiting requests start."
    )
    speculative: SpeculativeSpec | None = Field(default=None, description="Speculative decoding; without it there is none.")
    extra_args: Annotated[dict[str, Any], ShapedBy(extra_arguments_model)] = Field(
        default_factory=dict,
        description=(
            "Further engine arguments by name (as `starling serve --help` lists them, in snake_case); unknown ones are refused."
        ),
    )


class CpuTier(ApiModel):
    """KV blocks in the pod's memory."""

    bytes: Annotated[Size, EngineArgument("kv_cpu_bytes", kind=int)] = Field(
        description=(
            "Host memory of each rank for cached keys and values that leave the device. A pod uses accelerators.perNode times that,"
            " such as 16Gi, within the memory limit of spec.template."
        )
    )


def _immutable(field: str) -> Rule:
    """Forbids changes of a field: files in the old place would stay behind on every node, and nobody would own them."""
    return Rule(
        field=field,
        cel=f"has(oldSelf.{field}) == has(self.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        holds=lambda _: True,  # only the API server knows what was there before
        message=(
            "cannot change, because blocks in the old place would stay behind; remove the filesystem tier, delete its files,"
            " then add it with the new place"
        ),
    )


_MIN_FOLDER = "64Mi"


class FilesystemTier(ApiModel):
    """KV blocks in files, which outlive pods. Without a CPU tier they pass through up to 1 GiB of each rank's memory, and at most
    engine.kvMemory.
    """

    RULES = (
        Rule(
            field="bytes",
            cel=f"!isQuantity(self.bytes) || quantity(self.bytes).compareTo(quantity('{_MIN_FOLDER}')) >= 0",
            holds=lambda tier: parse_quantity(tier.bytes) >= parse_quantity(_MIN_FOLDER),
            message=f"must be at least {_MIN_FOLDER}, got {{bytes}}",
        ),
        Rule(
            cel="has(self.path) != has(self.claim)",
            holds=lambda tier: (tier.path is None) != (tier.claim is None),
            message="needs exactly one of path (a folder on each node) and claim (a PersistentVolumeClaim)",
        ),
        _immutable("path"),
        _immutable("claim"),
    )

    bytes: Annotated[Size, EngineArgument("kv_fs_bytes", kind=int)] = Field(
        description="How large the folder may grow in all; what was not used for longest goes first. At least 64Mi, such as 200Gi."
    )
    path: Annotated[AbsolutePath | None, EngineArgument("kv_fs_path")] = Field(
        default=None,
        description=(
            "Absolute folder on each node, which user 65532 can write to; needs a namespace that allows hostPath volumes. It may"
            " be of a file system that all nodes mount. Where it cannot be written, services serve without the tier."
        ),
    )
    claim: ObjectName | None = Field(
        default=None,
        description=(
            "Name of a PersistentVolumeClaim in this namespace. Pods on several nodes, of one group or of several, need one that is"
            " ReadWriteMany, and then find what others have kept; ReadWriteOnce holds all of them on one node."
        ),
    )


class Tiers(ApiModel):
    """Offload tiers: KV blocks go there when the device's cache is full."""

    cpu: CpuTier | None = Field(default=None, description="A tier in memory.")
    filesystem: FilesystemTier | None = Field(default=None, description="A tier in files.")


KVCacheType = Literal["auto", "fp8", "fp8_e4m3", "int8", "int4"]


class KVCacheSpec(ApiModel):
    """The KV cache: its type, and where it goes beyond the device."""

    dtype: Annotated[KVCacheType, EngineArgument("kv_cache_dtype", unless_default=True)] = Field(
        default="auto",
        description=(
            "Type of cached keys and values: auto is the model's dtype; fp8 and fp8_e4m3 are float8_e4m3fn, half of bfloat16's"
            " bytes and less exact. Scales are the checkpoint's, or else 1. On GPUs it needs compute capability 8.9. int8 and"
            " int4 take 8.5 and 5 bits a number, with a scale for each 32 of a row. Models that cache latents (MLA) have auto"
            " alone."
        ),
    )
    tiers: Tiers = Field(default_factory=Tiers, description="Offload tiers.")
    store: Annotated[StoreUrl | None, EngineArgument("kv_store")] = Field(
        default=None,
        description=(
            "Store that a fleet of services shares over the network, by its master: mooncake://MASTER:PORT. With ?segment=4GiB"
            " each rank gives that much of its memory to the store."
        ),
    )
