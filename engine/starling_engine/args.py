"""Arguments of the engine as a user writes them. Names are vLLM's wherever they mean the same. Imports no torch.

A new argument is one field of `EngineArgs`: its checks, its flag of `starling serve` and its documentation come from there.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from starling_engine.argument import KEY, Argument, argument, arguments_of, check_value, documentation, length_of, size_of
from starling_engine.config import (
    MAX_NUM_WAITING_TOKENS,
    DirectIo,
    EvictionPolicy,
    PreemptionMode,
    SchedulingPolicy,
    SpeculativeConfig,
    SpeculativeMethod,
)
from starling_engine.errors import ConfigError
from starling_engine.kv.event_endpoint import parse_endpoint
from starling_engine.kv_offload.secondary.store.address import parse_address

MODEL, SCHEDULING, MEMORY, TIERS, PARALLELISM = "Model", "Scheduling", "Memory", "KV tiers", "Parallelism"
SPECULATION = "Speculative decoding"
MIN_FOLDER_BYTES = 64 << 20
"""A smaller folder would remove files before they are read."""

SPECULATIVE_BOUNDS = (
    ("num_speculative_tokens", 1, 32),
    ("prompt_lookup_min", 1, 32),
    ("prompt_lookup_max", 1, 256),
    ("suffix_decoding_max_tree_depth", 1, 256),
    ("suffix_decoding_max_cached_requests", 0, 1_000_000),
    ("suffix_decoding_max_spec_factor", 0.0, 100.0),
    ("suffix_decoding_min_token_prob", 0.0, 1.0),
)
REJECTION = "standard"
"""vLLM's name of how drafts are accepted: by rejection sampling, with the probability that the model gives a draft from text."""
DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of types."""
NO_OTHER = "drafts of ngram and suffix are single tokens, of which no other way accepts more and leaves the distribution as it is"


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Arguments of `LLM`, `AsyncEngine` and `starling serve`."""

    model: str = field(metadata={KEY: Argument(help="Folder, GGUF file, or Hugging Face id, also with :FILE.gguf and @REVISION.")})
    revision: str | None = argument(None, MODEL, "Branch, tag or commit on the hub.")
    tokenizer: str | None = argument(
        None, MODEL, "Another folder or id for it.", "Folder or id of the tokenizer if not the model's."
    )
    chat_template: str | None = argument(
        None,
        MODEL,
        "File of a chat template in place of the model's.",
        "File of a chat template (Jinja) in place of the model's, or where it has none.",
    )
    load_format: Literal["auto", "dummy", "pt"] = argument(
        "auto",
        MODEL,
        "auto, dummy (random weights), or pt (pytorch_model.bin).",
        "auto reads safetensors or a GGUF file. dummy makes random weights. pt reads pytorch_model.bin in a folder: of these"
        " pickles nothing but tensors.",
        advice="leave it out for safetensors, GGUF and quantized files, which are known by themselves",
    )
    device: Literal["auto", "cpu", "cuda", "interpreter"] = argument(
        "auto",
        MODEL,
        "auto, cpu or cuda.",
        "auto takes a GPU where there is one. interpreter is for tests: it runs a GPU's code on the CPU, very slowly.",
    )
    dtype: str = argument(
        "auto",
        MODEL,
        "auto, float32, bfloat16 or float16.",
        "Type of weights and activations; auto takes the checkpoint's.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = argument(
        None,
        MODEL,
        "int8, int4 or fp8: quantize weights while they are loaded.",
        "int8, int4 or fp8 quantizes the weights of linear layers and experts while they are loaded. A weight then has 8 or 4 bits,"
        " and a share of its group's scale. On CPUs that is for models in bfloat16.",
        choices=("int8", "int4", "fp8"),
        advice="leave it out for a checkpoint that is quantized, which says so itself",
    )
    seed: int | None = argument(
        None,
        MODEL,
        "Makes requests without a seed repeatable; also of dummy weights.",
        "Seed of dummy weights, and of the seeds that requests without one get, which makes those repeatable.",
    )
    enforce_eager: bool = argument(
        False,
        MODEL,
        "No recorded steps (on a GPU, CUDA graphs).",
        "Launch every kernel of a step by itself. Without it, recorded steps are replayed: on a GPU as CUDA graphs, on a CPU"
        " those of few tokens.",
    )
    attention_backend: str = argument("auto", MODEL, "The device's best unless named.")
    num_threads: int | None = argument(None, MODEL, "CPU threads; by default what the cgroup allows.", low=1)
    classifier_from_token: str | None = argument(
        None,
        MODEL,
        "Tokens whose logits are a reranker's score: no,yes.",
        "Tokens whose logits are the score of a reranker that is a language model: no,yes for Qwen3-Reranker. The last one is the"
        " positive answer, and the only one for some models. Checkpoints with sentence-transformers' files need it not.",
    )

    max_model_len: int | None = argument(
        None,
        SCHEDULING,
        "Longest prompt plus output; by default the model's.",
        "Longest prompt plus output in tokens. It may be written like 32k (32000) or 32K (32768). Default: the model's own.",
        low=1,
        is_length=True,
    )
    max_num_seqs: int = argument(256, SCHEDULING, "Requests that run at once.", low=1)
    max_num_batched_tokens: int = argument(2048, SCHEDULING, "Token budget of a step.", low=1)
    step_target_ms: int | None = argument(
        None,
        SCHEDULING,
        "About how long prompts may stall streams: by default 200, on a GPU 40.",
        "About how long a step may take while requests decode, so that long prompts do not stall streams; 0 is no target."
        " Prompts get what then fits, at least a block. In milliseconds, by default 200 on CPUs, 40 on GPUs.",
        low=0,
    )
    max_num_waiting: int = argument(1024, SCHEDULING, "Requests that may queue; further ones get 429.", low=1)
    max_num_waiting_tokens: int = argument(
        MAX_NUM_WAITING_TOKENS,
        SCHEDULING,
        "Tokens that may queue; further ones get 429.",
        "Tokens of all requests that may queue; a request that is alone in the queue is never too long for it.",
        low=1,
    )
    scheduling_policy: SchedulingPolicy = argument(
        "fcfs", SCHEDULING, "fcfs or priority.", "Order in which waiting requests start."
    )
    async_scheduling: bool | None = argument(
        None, SCHEDULING, "Plan a step while one runs.", "Plan a step while one runs. None lets the platform decide."
    )
    progress_timeout: float = argument(
        20.0, SCHEDULING, "Seconds without progress that count as hung.", "Work waiting and no step for so long counts as hung."
    )
    enable_sleep_mode: bool = argument(
        False,
        SCHEDULING,
        "Clients may free its memory: POST /sleep, /wake_up.",
        "Clients of the endpoint may have the engine sleep and wake; scripts and the admin endpoint always may.",
    )

    block_size: int = argument(16, MEMORY, "Tokens in a block of the KV cache.", choices=(8, 16, 32))
    kv_cache_dtype: str = argument(
        "auto",
        MEMORY,
        "auto, fp8, int8 or int4: a half or a third of bfloat16's bytes.",
        "Type of cached keys and values: auto is the model's dtype; fp8 and fp8_e4m3 are float8_e4m3fn, half of bfloat16's"
        " bytes and less exact. Scales are the checkpoint's, or else 1. int8 and int4 take 8.5 and 5 bits a number, with a scale"
        " for each 32 of a row.",
        choices=("auto", "fp8", "fp8_e4m3", "int8", "int4"),
    )
    kv_cache_memory_bytes: int | None = argument(
        None,
        MEMORY,
        "The KV cache's size: 4GiB.",
        "Size of each rank's KV cache; wins over gpu_memory_utilization.",
        low=1,
        is_size=True,
    )
    gpu_memory_utilization: float | None = argument(
        None,
        MEMORY,
        "Share of the device's memory, on CPU of the cgroup's.",
        "Share of the device's (on CPU: the cgroup's) memory that the engine may use in all. By default 0.5 on CPUs, 0.9 on GPUs.",
    )
    enable_prefix_caching: bool = argument(
        True, MEMORY, "Keep prompts' KV for later ones.", "Whether prompts' KV is kept for later requests."
    )

    kv_cpu_bytes: int = argument(
        0,
        TIERS,
        "Host memory of each rank: 4GiB.",
        "Host memory of each rank for cached keys and values that leave the device. 0: none.",
        low=0,
        is_size=True,
    )
    kv_cpu_policy: EvictionPolicy = argument(
        "lru",
        TIERS,
        "What leaves it first: lru or arc.",
        "Chunks that leave the CPU tier first: lru, or arc, which adapts to whether chunks are used once or more often.",
    )
    kv_fs_path: str | None = argument(
        None,
        TIERS,
        "Absolute folder, also for engines after this one.",
        "Absolute folder for cached keys and values; engines and their restarts share it.",
    )
    kv_fs_bytes: int | None = argument(
        None,
        TIERS,
        "How large it may grow, in all: 10GiB.",
        "How large the folder may grow in all; what was not used for longest goes first.",
        is_size=True,
    )
    kv_fs_direct: DirectIo = argument(
        "auto",
        TIERS,
        "Pass by the page cache: auto, on or off.",
        "Whether the folder's files pass by the page cache; auto where the file system can.",
    )
    kv_store: str | None = argument(
        None,
        TIERS,
        "Shared store: mooncake://MASTER:PORT.",
        "Store that a fleet of services shares over the network, by its master: mooncake://MASTER:PORT.",
    )
    preempt: PreemptionMode = argument(
        "auto",
        TIERS,
        "What preempted requests' KV becomes: auto, recompute or swap.",
        "What preempted requests' KV becomes: recompute drops it, swap keeps it in the CPU tier, auto takes what was measured to be"
        " faster.",
    )
    kv_events: str | None = argument(
        None,
        TIERS,
        "Publish what is cached and removed: tcp://*:5557.",
        "ZeroMQ endpoint at which cached and removed blocks are published: tcp://*:5557, or tcp://*:5557/TOPIC.",
    )

    tensor_parallel_size: int = argument(1, PARALLELISM, "TP.", "Tensor parallel size (TP).", short="-tp", low=1)
    pipeline_parallel_size: int = argument(1, PARALLELISM, "PP.", "Pipeline parallel size (PP).", short="-pp", low=1)
    enable_expert_parallel: bool = argument(
        False,
        PARALLELISM,
        "Whole experts on TP ranks.",
        "Data and tensor parallel ranks hold some whole experts each, instead of a part of every expert.",
        short="-ep",
    )
    data_parallel_size: int = argument(
        1,
        PARALLELISM,
        "DP.",
        "Data parallel size (DP). Each engine core has the whole model and its own KV cache; a request runs on one core.",
        short="-dp",
        low=1,
    )
    enable_elastic_ep: bool = argument(False, None, "data_parallel_size may change while the engine serves.")
    min_data_parallel_size: int = argument(
        1, None, "Smallest size that an elastic engine may get: ranks have room for the experts that they then hold.", low=1
    )
    enable_eplb: bool = argument(
        False,
        PARALLELISM,
        "Move experts between ranks by load.",
        "Experts move between ranks, and get copies, as their load changes, while the engine serves.",
    )
    num_redundant_experts: int = argument(
        0,
        PARALLELISM,
        "Copies of a layer's most loaded experts.",
        "Copies of experts in each layer in addition to the first of each; rounded up to the same number on every rank.",
        low=0,
    )
    eplb_window_size: int = argument(1000, PARALLELISM, "Steps over which load is counted.", low=1)
    eplb_step_interval: int = argument(3000, PARALLELISM, "Steps from one look at the load to the next.", low=1)

    speculative_config: dict[str, Any] | str | None = argument(
        None,
        SPECULATION,
        'JSON: {"method": "ngram", "num_speculative_tokens": 5}.',
        'Speculative decoding in vLLM\'s words, JSON: {"method": "ngram", "num_speculative_tokens": 5}. Methods are ngram'
        " (prompt_lookup_min, prompt_lookup_max) and suffix (suffix_decoding_max_tree_depth, suffix_decoding_max_cached_requests,"
        " suffix_decoding_max_spec_factor, suffix_decoding_min_token_prob).",
        short="-sc",
        is_json=True,
    )
    spec_method: SpeculativeMethod | None = argument(
        None,
        SPECULATION,
        "ngram or suffix.",
        "Where drafts come from: ngram, the request's own tokens; suffix, earlier outputs too.",
        choices=get_args(SpeculativeMethod),
    )
    spec_tokens: int | None = argument(
        None,
        SPECULATION,
        "Most drafts of a request in a step.",
        "Most drafts of a request in a step, by default 7; fewer where they do not pay.",
        low=1,
    )

    show_progress: bool = argument(True, None, "Show progress bars in a terminal.")

    def __post_init__(self) -> None:
        """Raises ConfigError naming the first argument that can never work."""
        for name in SIZES:
            object.__setattr__(self, name, size_of(name, getattr(self, name)))
        object.__setattr__(self, "dtype", DTYPES.get(self.dtype, self.dtype))
        object.__setattr__(self, "max_model_len", length_of("max_model_len", self.max_model_len))
        if not self.model:
            raise ConfigError("must not be empty", "model")
        for name, declared in ARGUMENTS.items():
            check_value(name, declared, getattr(self, name))
        _check_budgets(self)
        _check_experts(self)
        _check_tiers(self)
        speculative_of(self)
        classifier_of(self)


ARGUMENTS = arguments_of(EngineArgs)
SIZES = tuple(name for name, declared in ARGUMENTS.items() if declared.is_size)
"""Arguments in bytes, which may also be written like "4GiB"."""
EngineArgs.__doc__ = f"{EngineArgs.__doc__}\n\n{documentation(ARGUMENTS)}"


def classifier_of(args: EngineArgs) -> tuple[str, ...]:
    """Returns the texts of the tokens that a score is made of, the positive one first; none if no argument names them."""
    given = args.classifier_from_token
    texts = () if given is None else tuple(text.strip() for text in given.split(","))
    if len(texts) > 2 or not all(texts):
        raise ConfigError(f"must be a token, or two and a comma between, such as no,yes, got {given!r}", "classifier_from_token")
    return texts[::-1]


def speculative_of(args: EngineArgs) -> SpeculativeConfig:
    """Returns the settings of speculative decoding. Raises ConfigError naming the argument, and the key in its JSON."""
    given = args.speculative_config
    if given is not None and (args.spec_method or args.spec_tokens):
        raise ConfigError("says the same as spec_method and spec_tokens; give one or the other", "speculative_config")
    if given is None:
        both = {"method": args.spec_method, "num_speculative_tokens": args.spec_tokens}
        return _speculative({name: value for name, value in both.items() if value is not None}, "spec_tokens")
    try:
        settings = msgspec.json.decode(given, type=dict[str, Any]) if isinstance(given, str) else given
    except msgspec.MsgspecError as error:
        raise ConfigError(f"must be a JSON object, got {given!r}: {error}", "speculative_config") from None
    method = settings.get("method")
    if method is None:
        raise ConfigError(f"needs a method: {' or '.join(get_args(SpeculativeMethod))}", "speculative_config")
    if method not in get_args(SpeculativeMethod):
        # Before its settings: they are of a method that is not there.
        message = f"method: {method!r} is not supported; possible: {', '.join(get_args(SpeculativeMethod))}"
        raise ConfigError(message, "speculative_config")
    return _speculative(settings, "speculative_config")


def _speculative(settings: dict[str, Any], name: str) -> SpeculativeConfig:
    known = {found.name: found for found in fields(SpeculativeConfig)}
    settings = dict(settings)
    if (method := settings.pop("rejection_sample_method", REJECTION)) != REJECTION:
        raise ConfigError(f"rejection_sample_method: possible is {REJECTION}, got {method!r}: {NO_OTHER}", name)
    for key in settings:
        if key not in known:
            raise ConfigError(f"has no {key!r} here; possible: {', '.join(known)}", name)
    try:
        found = msgspec.convert(settings, SpeculativeConfig)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise ConfigError(f"{path.rstrip('`') or 'it'}: {message[:1].lower()}{message[1:]}", name) from None
    for key, low, high in SPECULATIVE_BOUNDS:
        if not low <= getattr(found, key) <= high:
            raise ConfigError(f"{key} must be in [{low}, {high}], got {getattr(found, key)}", name)
    if found.prompt_lookup_min > found.prompt_lookup_max:
        raise ConfigError(f"prompt_lookup_min must be at most prompt_lookup_max ({found.prompt_lookup_max})", name)
    return found


def _check_budgets(args: EngineArgs) -> None:
    if args.gpu_memory_utilization is not None and not 0 < args.gpu_memory_utilization <= 1:
        raise ConfigError(f"must be in (0, 1], got {args.gpu_memory_utilization}", "gpu_memory_utilization")
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise ConfigError(
            f"must be at least max_num_seqs ({args.max_num_seqs}) so that every running request can decode, "
            f"got {args.max_num_batched_tokens}",
            "max_num_batched_tokens",
        )


def _check_experts(args: EngineArgs) -> None:
    if args.min_data_parallel_size > args.data_parallel_size:
        raise ConfigError(f"must be at most data_parallel_size ({args.data_parallel_size})", "min_data_parallel_size")
    if args.enable_elastic_ep and not args.enable_expert_parallel:
        raise ConfigError("only experts move between ranks; it needs enable_expert_parallel", "enable_elastic_ep")
    if args.enable_eplb and not args.enable_expert_parallel:
        raise ConfigError("only whole experts can move between ranks; it needs enable_expert_parallel", "enable_eplb")
    if args.num_redundant_experts and not args.enable_eplb:
        raise ConfigError("copies go where the load is; they need enable_eplb", "num_redundant_experts")


def _check_tiers(args: EngineArgs) -> None:
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
    if limit < MIN_FOLDER_BYTES:
        raise ConfigError(f"must be at least 64MiB ({MIN_FOLDER_BYTES} bytes), got {limit}", "kv_fs_bytes")


def _check_needs(args: EngineArgs) -> None:
    """Refuses, rather than ignores, an argument that means nothing without another."""
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
