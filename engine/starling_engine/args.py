"""The engine's arguments as a user writes them. Names are vLLM's wherever they mean the same. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from starling_engine.config import MAX_NUM_WAITING_TOKENS, Direct, EvictionPolicy, Policy, Preempt
from starling_engine.errors import ConfigError
from starling_engine.kv.endpoint import parse_endpoint
from starling_engine.kv_offload.secondary.store.address import parse_address
from starling_engine.sizes import parse_bytes

BLOCK_SIZES = (8, 16, 32)
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
SIZES = ("kv_cache_memory_bytes", "kv_cpu_bytes", "kv_fs_bytes")
"""Arguments in bytes, which may also be written like "4GiB"."""
LEAST_FOLDER = 64 << 20
"""Bytes; with less, what is written goes again before it is read."""


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Arguments of `LLM`, `AsyncEngine` and `starling serve`.

    model                    folder, or Hugging Face id with an optional @revision
    device                   "auto" takes a GPU where there is one; "interpreter" is for tests: a GPU's path on the CPU, very slow
    dtype                    "auto" takes the checkpoint's
    seed                     makes the seeds of requests that bring none repeatable; also of dummy weights
    max_model_len            longest prompt plus output in tokens; None takes the model's
    max_num_seqs             requests that run at once
    max_num_batched_tokens   token budget of one step
    step_target_ms           about how long a step may take while requests decode, in milliseconds: prompts get what then fits, at
                             least a block; 0 is no target, None takes the platform's: 200 on a CPU, 40 on a GPU
    block_size               tokens in a block of the KV cache
    kv_cache_dtype           type of cached keys and values: "auto" takes the dtype; "fp8" and "fp8_e4m3" are float8_e4m3fn, half of
                             bfloat16's bytes and less exact, with the scales that the checkpoint has or else 1
    kv_cache_memory_bytes    absolute size of the KV cache of each rank; wins over gpu_memory_utilization
    gpu_memory_utilization   share of the device's (on CPU: the cgroup's) memory that the engine may use in all;
                             None takes 0.5 of a CPU machine, 0.9 of a GPU
    data_parallel_size       engine cores, each with all of the model and a KV cache of its own; a request runs on one of them
    enable_expert_parallel   data and tensor parallel ranks hold some experts each, whole, in place of all or a part of every one
    enable_elastic_ep        data_parallel_size may change while the engine serves
    min_data_parallel_size   the smallest that it may become: ranks have room for the experts that they then hold
    enable_eplb              experts move between ranks, and get copies, as their load asks for, while the engine serves
    num_redundant_experts    copies of experts in each layer besides the first of each; rounded up to as many on every rank
    eplb_window_size         steps over which load is counted
    eplb_step_interval       steps between two looks at whether experts are to move
    kv_cpu_bytes             host memory of each rank for cached keys and values that leave the device; 0 is none
    kv_cpu_policy            what it gives up first: "lru", or "arc" (adaptive: what was used once, or what was used more often)
    kv_fs_path               folder for cached keys and values; engines and their restarts share it
    kv_fs_bytes              how large that folder may grow, in all
    kv_fs_direct             whether its files pass by the page cache; "auto" where the file system can
    kv_store                 a store over the network for cached keys and values, shared by a fleet: mooncake://MASTER:PORT
    preempt                  what becomes of a preempted request's keys and values: "recompute", "swap" (kept in the CPU tier),
                             "auto" takes what has been measured to be faster
    kv_events                ZeroMQ endpoint at which blocks that are cached and removed are published: tcp://*:5557, or tcp://*:5557/TOPIC
    max_num_waiting          requests that may queue before new ones are refused
    max_num_waiting_tokens   tokens of all requests that may queue; one that would be alone in the queue is never too long for it
    enforce_eager            on a GPU, launch every kernel of a step by itself in place of replaying recorded steps (CUDA graphs)
    async_scheduling         plan step n+1 while step n runs; None lets the platform decide
    enable_sleep_mode        clients of the endpoint may have the engine sleep and wake; scripts and the admin endpoint always may
    progress_timeout         seconds with work and without progress after which the engine counts as hung
    """

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    device: Literal["auto", "cpu", "cuda", "interpreter"] = "auto"
    dtype: str = "auto"
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    step_target_ms: int | None = None
    max_num_waiting: int = 1024
    max_num_waiting_tokens: int = MAX_NUM_WAITING_TOKENS
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    kv_cpu_bytes: int = 0
    kv_cpu_policy: EvictionPolicy = "lru"
    kv_fs_path: str | None = None
    kv_fs_bytes: int | None = None
    kv_fs_direct: Direct = "auto"
    kv_store: str | None = None
    preempt: Preempt = "auto"
    kv_events: str | None = None
    scheduling_policy: Policy = "fcfs"
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    attention_backend: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_elastic_ep: bool = False
    min_data_parallel_size: int = 1
    enable_eplb: bool = False
    num_redundant_experts: int = 0
    eplb_window_size: int = 1000
    eplb_step_interval: int = 3000
    num_threads: int | None = None
    enable_sleep_mode: bool = False
    progress_timeout: float = 20.0
    show_progress: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError naming the first argument that can never work."""
        for name in SIZES:
            object.__setattr__(self, name, size_of(name, getattr(self, name)))
        if not self.model:
            raise ConfigError("must not be empty", "model")
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("device", self.device, ("auto", "cpu", "cuda", "interpreter"))
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        _one_of("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _one_of("kv_cpu_policy", self.kv_cpu_policy, get_args(EvictionPolicy))
        _one_of("kv_fs_direct", self.kv_fs_direct, get_args(Direct))
        _one_of("preempt", self.preempt, get_args(Preempt))
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "max_num_waiting_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.step_target_ms is not None:
            _at_least("step_target_ms", self.step_target_ms, 0)
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"must be in (0, 1], got {self.gpu_memory_utilization}", "gpu_memory_utilization")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"must be at least max_num_seqs ({self.max_num_seqs}) so that every running request can decode, "
                f"got {self.max_num_batched_tokens}",
                "max_num_batched_tokens",
            )
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        _at_least("data_parallel_size", self.data_parallel_size, 1)
        _at_least("min_data_parallel_size", self.min_data_parallel_size, 1)
        if self.min_data_parallel_size > self.data_parallel_size:
            raise ConfigError(f"must be at most data_parallel_size ({self.data_parallel_size})", "min_data_parallel_size")
        if self.enable_elastic_ep and not self.enable_expert_parallel:
            raise ConfigError("only experts move between ranks; it needs enable_expert_parallel", "enable_elastic_ep")
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ConfigError("only whole experts can move between ranks; it needs enable_expert_parallel", "enable_eplb")
        _at_least("num_redundant_experts", self.num_redundant_experts, 0)
        if self.num_redundant_experts and not self.enable_eplb:
            raise ConfigError("copies go where the load is; they need enable_eplb", "num_redundant_experts")
        _at_least("eplb_window_size", self.eplb_window_size, 1)
        _at_least("eplb_step_interval", self.eplb_step_interval, 1)
        _check_tiers(self)


def size_of(name: str, value: int | str | None) -> int | None:
    """Bytes of an argument in SIZES. Raises ConfigError naming it and the form."""
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError(str(error), name) from None


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"must be one of {', '.join(map(str, allowed))}, got {value!r}", name)


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"must be at least {low}, got {value}", name)


def _check_tiers(args: EngineArgs) -> None:
    """Raises ConfigError naming the first argument that can never work."""
    if args.kv_cpu_bytes < 0:
        raise ConfigError(f"must be at least 0, got {args.kv_cpu_bytes}", "kv_cpu_bytes")
    _check_folder(args)
    if args.kv_store is not None:
        parse_address(args.kv_store)
    if args.kv_events is not None:
        parse_endpoint(args.kv_events)
    _check_needs(args)


def _check_folder(args: EngineArgs) -> None:
    path, limit = args.kv_fs_path, args.kv_fs_bytes
    if limit is not None and path is None:
        raise ConfigError("is the size of the folder that kv_fs_path names; give both", "kv_fs_bytes")
    if path is None:
        return
    if not Path(path).is_absolute():
        raise ConfigError(f"must be an absolute path, for engines that start elsewhere are to find it, got {path!r}", "kv_fs_path")
    if limit is None:
        raise ConfigError("needs kv_fs_bytes: how large the folder may grow, such as 10GiB", "kv_fs_path")
    if limit < LEAST_FOLDER:
        raise ConfigError(f"must be at least 64MiB ({LEAST_FOLDER} bytes), got {limit}", "kv_fs_bytes")


def _check_needs(args: EngineArgs) -> None:
    """What means nothing without something else is refused, rather than ignored."""
    tiers = {"kv_cpu_bytes": args.kv_cpu_bytes, "kv_fs_path": args.kv_fs_path, "kv_store": args.kv_store}
    named = [name for name, value in tiers.items() if value]
    for name in (*named, *(["kv_events"] if args.kv_events else [])):
        if not args.enable_prefix_caching:
            raise ConfigError("needs enable_prefix_caching: what is kept is found by the prefixes of prompts", name)
    if args.preempt == "swap" and not named:
        raise ConfigError('"swap" needs kv_cpu_bytes, host memory for what is swapped out', "preempt")
    if args.kv_cpu_policy != "lru" and not named:
        raise ConfigError("needs kv_cpu_bytes: there is no CPU tier that it could be the policy of", "kv_cpu_policy")
    if args.kv_fs_direct != "auto" and args.kv_fs_path is None:
        raise ConfigError("needs kv_fs_path: there is no folder whose files it could be about", "kv_fs_direct")
