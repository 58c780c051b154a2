"""Resolves a user's arguments to a core's settings. Imports no torch, so that a server's start does not wait for it."""

from dataclasses import replace
from pathlib import Path

from starling_engine.args import EngineArgs, speculative_of
from starling_engine.config import (
    CACHE_GROUP,
    CacheType,
    EngineConfig,
    EplbConfig,
    SchedulerConfig,
    SpeculativeConfig,
    TiersConfig,
    VocabularyConfig,
    WorkerConfig,
)
from starling_engine.errors import ConfigError
from starling_engine.frontend.template import compile_template
from starling_engine.gguf.reader import is_gguf
from starling_engine.kv_offload.sizes import host_slots, staging_bytes
from starling_engine.model_config.config import ModelConfig, load_model_config
from starling_engine.model_config.retrieval_heads import RetrievalHeads
from starling_engine.model_config.split import check_split
from starling_engine.platforms.cgroup import cpu_limit
from starling_engine.sleep import SLEEP_EXCLUDES_DP_SYNC
from starling_engine.topology.layout import NodePlacement, ParallelLayout
from starling_engine.topology.placement import even_slots
from starling_engine.weights.hub import resolve_model

CACHE_TYPES: dict[str, CacheType | None] = {"auto": None, "fp8": "fp8", "fp8_e4m3": "fp8", "int8": "int8", "int4": "int4"}
"""Types of the cache, by the argument `kv_cache_dtype`."""


def resolve(args: EngineArgs, node: NodePlacement | None = None) -> tuple[Path, ModelConfig, EngineConfig]:
    """Finds the model (downloads it for a hub id) and resolves every "auto". Without `node` all ranks share this machine.

    Raises ModelError for a checkpoint that cannot be served, ConfigError for arguments that do not fit it.
    """
    folder = resolve_model(args.model, args.revision)
    tokenizer = resolve_tokenizer(args, folder)
    model = load_model_config(folder, tokenizer)
    if model.pooler.retrieval is not None and args.load_format == "auto":
        model = replace(model, pooler=replace(model.pooler, retrieval=RetrievalHeads(readable=False)))
    max_model_len = args.max_model_len or model.usual_length
    if max_model_len > model.max_position:
        raise ConfigError(f"the model's longest sequence is {model.max_position} tokens, got {max_model_len}", "max_model_len")
    for chunk in {layer.attention_chunk for layer in model.layers if layer.attention_chunk % args.block_size}:
        raise ConfigError(f"must divide the {chunk} tokens of a chunk in which layers attend, got {args.block_size}", "block_size")
    if not model.causal:
        _refuse_caches(args)
    if not model.attends:
        _refuse_attention(args)
    # An encoder's prompt is computed in one step.
    max_num_batched_tokens = max(args.max_num_batched_tokens, 0 if model.causal else max_model_len)
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        step_target_ms=args.step_target_ms if model.causal else 0,
        max_num_waiting=args.max_num_waiting,
        max_num_waiting_tokens=args.max_num_waiting_tokens,
        policy=args.scheduling_policy,
        prefix_caching=args.enable_prefix_caching and model.causal,
        whole_prompts=not model.causal,
        stages=args.pipeline_parallel_size,
        preempt=args.preempt,
        eos_token_ids=model.eos_token_ids,
        speculative=speculative_of(args),
    )
    layout = ParallelLayout(args.data_parallel_size, args.pipeline_parallel_size, args.tensor_parallel_size)
    check_split(model, layout, expert_parallel=args.enable_expert_parallel)
    dp_sync = args.enable_expert_parallel and (args.data_parallel_size > 1 or args.enable_elastic_ep or args.enable_eplb)
    if dp_sync and args.enable_sleep_mode:
        raise ConfigError(SLEEP_EXCLUDES_DP_SYNC, "enable_sleep_mode")
    expert_slots, eplb = _expert_slots(args, model) if dp_sync else (0, None)
    local_ranks = layout.world_size if node is None else node.ranks
    worker = WorkerConfig(
        model_path=str(folder),
        load_format=args.load_format,
        device=args.device,
        dtype=model.dtype if args.dtype == "auto" else args.dtype,
        seed=args.seed or 0,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=scheduler.speculative.num_speculative_tokens,
        own_drafts=_own_drafts(args, scheduler),
        block_size=args.block_size,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        memory_fraction=args.gpu_memory_utilization,
        attention_backend=args.attention_backend,
        enforce_eager=args.enforce_eager,
        quantization=_quantization(args, model, folder),
        kv_cache=_kv_cache(args, model),
        local_ranks=local_ranks,
        num_threads=max(1, (args.num_threads or cpu_limit()) // local_ranks),
        # Each data parallel rank is an engine core of its own, so the layout of its workers has one.
        layout=replace(layout, data=1),
        expert_parallel=args.enable_expert_parallel,
        dp_sync=dp_sync,
        elastic=args.enable_elastic_ep,
        expert_slots=expert_slots,
        eplb=eplb,
    )
    worker = replace(worker, tiers=_tiers(args, model, worker))
    config = EngineConfig(
        scheduler=scheduler,
        worker=worker,
        block_size=args.block_size,
        cache_dtype=args.kv_cache_dtype,
        progress_timeout=args.progress_timeout,
        async_scheduling=args.async_scheduling,
        seed=args.seed,
        vocabulary=VocabularyConfig(str(tokenizer), model.vocab_size, model.eos_token_ids),
        kv_events=args.kv_events,
        sleep_mode=args.enable_sleep_mode,
    )
    return folder, model, config


def _refuse_caches(args: EngineArgs) -> None:
    """Raises ConfigError for an argument about what an encoder does not have: cached keys and values, and sampled tokens."""
    cached = ("kv_cpu_bytes", "kv_fs_path", "kv_store", "kv_events", "kv_cache_memory_bytes")
    given = [name for name in cached if getattr(args, name)]
    given += [name for name, usual in (("kv_cache_dtype", "auto"), ("preempt", "auto")) if getattr(args, name) != usual]
    if given:
        raise ConfigError("is not possible for an encoder, which caches no keys and values; leave it out", given[0])
    sampled = ("speculative_config", "spec_method", "step_target_ms", "classifier_from_token")
    given = [name for name in sampled if getattr(args, name)]
    if given:
        raise ConfigError("is not possible for an encoder, which samples no tokens; leave it out", given[0])


def _refuse_attention(args: EngineArgs) -> None:
    """Raises ConfigError for an argument about what a model without attention does not have: keys and values."""
    of_attention = {"kv_cache_dtype": "auto", "attention_backend": "auto"}
    given = [name for name, usual in of_attention.items() if getattr(args, name) != usual]
    if given:
        raise ConfigError("is not possible for a model without attention, which has no keys and values; leave it out", given[0])


def _own_drafts(args: EngineArgs, scheduler: SchedulerConfig) -> SpeculativeConfig | None:
    """Returns the settings for a device that makes drafts. Where one step is in flight, or stages run it, the host makes them."""
    speculative = scheduler.speculative
    possible = speculative.method == "ngram" and args.async_scheduling is not False and scheduler.stages == 1
    return speculative if possible else None


def _quantization(args: EngineArgs, model: ModelConfig, path: Path) -> str | None:
    """Returns how weights are quantized, if it is possible for the model; the worker checks its device."""
    name = args.quantization
    if name is not None and is_gguf(path):
        raise ConfigError(f"{name} is not possible: the weights of a GGUF file are what they are; leave it out", "quantization")
    if name is not None and model.quantization is not None:
        method = model.quantization.method
        raise ConfigError(f"{name} is not possible: the checkpoint is quantized already ({method}); leave it out", "quantization")
    return name


def _kv_cache(args: EngineArgs, model: ModelConfig) -> CacheType | None:
    """Returns the type of the cache, if it is possible for the model; the worker checks its device."""
    name, cache = args.kv_cache_dtype, CACHE_TYPES[args.kv_cache_dtype]
    if cache is not None and model.mla:
        raise ConfigError(f"{name} is not possible: this model caches latents (MLA); possible: auto", "kv_cache_dtype")
    if cache is not None and model.compressed:
        raise ConfigError(f"{name} is not possible: this model caches compressed runs of tokens; possible: auto", "kv_cache_dtype")
    uneven = next((own.dim for own in model.kv_heads if own.dim % CACHE_GROUP), None)
    if cache in ("int8", "int4") and uneven is not None:
        why = f"{CACHE_GROUP} columns share a scale, and head_dim is {uneven}"
        raise ConfigError(f"{name} is not possible: {why}; possible: auto, fp8", "kv_cache_dtype")
    return cache


def _tiers(args: EngineArgs, model: ModelConfig, worker: WorkerConfig) -> TiersConfig | None:
    """Returns the tiers for offloaded chunks. Those of secondary tiers pass through host memory, even without a CPU tier."""
    if not args.kv_cpu_bytes and args.kv_fs_path is None and args.kv_store is None:
        return None
    tiers = TiersConfig(
        cpu_bytes=args.kv_cpu_bytes,
        staging_bytes=0 if args.kv_cpu_bytes else staging_bytes(model, worker),
        cpu_policy=args.kv_cpu_policy,
        fs_path=args.kv_fs_path,
        fs_bytes=args.kv_fs_bytes or 0,
        fs_direct=args.kv_fs_direct,
        store=args.kv_store,
    )
    host_slots(model, replace(worker, tiers=tiers))  # raises ConfigError where the memory has no room for a chunk
    return tiers


def _expert_slots(args: EngineArgs, model: ModelConfig) -> tuple[int, EplbConfig | None]:
    """Returns the experts of each layer that a rank may have to hold, when ranks are fewest, and EPLB's settings."""
    assert model.moe is not None, "checked with the split"
    experts, tp_size = model.moe.num_experts, args.tensor_parallel_size
    ranks = args.data_parallel_size * tp_size
    if args.enable_eplb and ranks == 1 and not args.enable_elastic_ep:
        raise ConfigError("one rank holds all experts, which have nowhere to go; it needs several ranks", "enable_eplb")
    if args.num_redundant_experts > (ranks - 1) * experts:
        raise ConfigError(
            f"{ranks} ranks have use for 0 to {(ranks - 1) * experts} copies of a layer's {experts} experts, "
            f"got {args.num_redundant_experts}",
            "num_redundant_experts",
        )
    min_dp_size = args.min_data_parallel_size if args.enable_elastic_ep else args.data_parallel_size
    slots = even_slots(experts, min_dp_size * tp_size, args.num_redundant_experts)
    if not args.enable_eplb:
        return slots, None
    return slots, EplbConfig(
        window=args.eplb_window_size,
        interval=args.eplb_step_interval,
        redundant=args.num_redundant_experts,
        spare=min(slots, experts - slots),
    )


def read_chat_template(args: EngineArgs) -> str | None:
    """Returns the template of the file that is named; None: the model's own. Raises ConfigError for a file without one."""
    if args.chat_template is None:
        return None
    try:
        text = Path(args.chat_template).read_text(encoding="utf-8")
        compile_template(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{args.chat_template} has no chat template: {error}", "chat_template") from None
    return text


def resolve_tokenizer(args: EngineArgs, folder: Path) -> Path:
    """Returns the folder of the tokenizer: the model's, unless another is named."""
    return folder if args.tokenizer is None else resolve_model(args.tokenizer, None)
