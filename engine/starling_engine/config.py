"""Settings that a core and its workers are started with, every "auto" resolved. Imports no torch."""

from dataclasses import dataclass, field, replace
from typing import Literal

from starling_engine.topology.layout import ParallelLayout
from starling_engine.topology.rendezvous import Rendezvous

SchedulingPolicy = Literal["fcfs", "priority"]
EvictionPolicy = Literal["lru", "arc"]
DirectIo = Literal["auto", "on", "off"]
SpeculativeMethod = Literal["ngram", "suffix"]
PreemptionMode = Literal["auto", "recompute", "swap"]
CacheType = Literal["fp8", "int8", "int4"]
MAX_NUM_WAITING_TOKENS = 1 << 23
"""Takes 4 bytes a token in the core and some 36 in the frontend: 0.3 GB."""

MAX_SAMPLES_WITH_DRAFTS = 64
"""Samples of a step beyond which there are no more drafts. More rows take as much longer as they save, and logits take memory."""


def most_samples(max_num_seqs: int, num_speculative_tokens: int) -> int:
    """Returns the most tokens that a step samples: one for each request, and drafts where they are few."""
    return max(max_num_seqs, min(MAX_SAMPLES_WITH_DRAFTS, max_num_seqs * (1 + num_speculative_tokens)))


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding, with vLLM's names.

    method                                where drafts come from; None: only from predictions that requests bring
    num_speculative_tokens                most drafts of a request in a step; fewer where they do not pay
    prompt_lookup_min, prompt_lookup_max  for ngram: fewest tokens that have to match, and the most that are compared
    suffix_decoding_max_tree_depth        for suffix: most tokens that are compared
    suffix_decoding_max_cached_requests   outputs that are kept for later requests; 0: none
    suffix_decoding_max_spec_factor       a draft is at most so many times as long as the match
    suffix_decoding_min_token_prob        likelihood that ends a draft, by how often each continuation was seen
    """

    method: SpeculativeMethod | None = None
    num_speculative_tokens: int = 7
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @property
    def suffix_width(self) -> int:
        """Fewest tokens that have to match, for suffix."""
        return min(2, self.suffix_decoding_max_tree_depth)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Settings of the scheduler; sizes are in tokens unless they say otherwise."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_target_ms: int | None = None
    """Target duration of steps with decodes. None lets the worker's platform decide; a scheduler by itself then has none."""
    max_num_waiting: int = 1024
    max_num_waiting_tokens: int = MAX_NUM_WAITING_TOKENS
    policy: SchedulingPolicy = "fcfs"
    prefix_caching: bool = True
    whole_prompts: bool = False
    """A prompt is never divided among steps, each of which has room for the longest one: tokens see those behind them.

    There are no streams, so `step_target_ms` is 0.
    """
    stages: int = 1
    """Pipeline stages. Each is to have a step of its own to work on."""
    depth: int = 1
    """Steps in flight at once, set by the engine core. With several stages, decodes are spread over as many steps."""
    preempt: PreemptionMode = "auto"
    eos_token_ids: tuple[int, ...] = ()
    speculative: SpeculativeConfig = SpeculativeConfig()
    own_drafts: bool = False
    """Drafts of method ngram are made by the device, with steps in flight: set by the engine core."""

    @property
    def max_num_samples(self) -> int:
        """Most tokens, with those behind drafts, that a step samples."""
        return most_samples(self.max_num_seqs, self.speculative.num_speculative_tokens)


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """Settings of EPLB. `window` and `interval` are in steps of an epoch.

    redundant   copies in each layer after the first of each expert, if there are ranks that can use them
    spare       expert slots in each layer for experts on their way: a rank holds both its old and its new experts meanwhile
    """

    window: int
    interval: int
    redundant: int
    spare: int


@dataclass(frozen=True, kw_only=True)
class TiersConfig:
    """Settings of the tiers below the device; sizes in bytes.

    cpu_bytes      the CPU tier: host memory of each rank
    staging_bytes  without a CPU tier, host memory of each rank that chunks of a folder or a store pass through
    """

    cpu_bytes: int
    staging_bytes: int = 0
    cpu_policy: EvictionPolicy = "lru"
    fs_path: str | None = None
    fs_bytes: int = 0
    fs_direct: DirectIo = "auto"
    store: str | None = None

    @property
    def host_bytes(self) -> int:
        """Host memory of each rank for chunks: the CPU tier or the staging buffer."""
        return self.cpu_bytes or self.staging_bytes

    @property
    def has_secondary(self) -> bool:
        """True with a tier that outlives the engine: files or a store."""
        return self.fs_path is not None or self.store is not None


def most_staging_bytes(kv_bytes: int | None, most: int = 1 << 30) -> int:
    """Returns the most bytes of a rank's staging buffer. `kv_bytes`: its cache on the device, where that is known.

    No request has more chunks than that cache holds.
    """
    return most if kv_bytes is None else min(most, kv_bytes)


CACHE_DTYPES: dict[CacheType, str] = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "uint8"}
CACHE_VERSION = 1
"""Version of the rows of a cache of int8 or int4. Those of another version are not found in the KV tiers."""
CACHE_GROUP = 32
"""Columns of a head that share a scale in a cache of int8 or int4."""
QUANTIZATION_VERSION = 2
"""Version of the codes that each name of a quantization gives. Keys and values of another version are not found in the KV tiers."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Settings of a worker. Dtypes are names ("bfloat16"), sizes in bytes or tokens."""

    model_path: str
    load_format: Literal["auto", "dummy", "pt"]
    device: str
    dtype: str
    seed: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_memory_bytes: int | None
    memory_fraction: float | None
    """Share of the device's memory; on a CPU, of the host's, for all ranks on it. None takes the platform's."""
    attention_backend: str
    num_threads: int
    num_speculative_tokens: int = 0
    """Most drafts of a request in a step."""
    own_drafts: SpeculativeConfig | None = None
    """Settings of the drafts that a device makes, if it works on its own; None: it makes none."""
    enforce_eager: bool = False
    quantization: str | None = None
    """Weights are quantized so while they are loaded; None keeps `dtype`. See `QUANTIZATION_VERSION`."""
    kv_cache: CacheType | None = None
    """Type of cached keys and values; None: `dtype`."""
    tiers: TiersConfig | None = None
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    expert_parallel: bool = False
    dp_sync: bool = False
    """Experts are spread over the ranks of several cores, in epochs that the leader announces while they run."""
    elastic: bool = False
    """The number of those cores may change."""
    expert_slots: int = 0
    """Experts of each layer that this rank may have to hold, with `dp_sync`."""
    eplb: EplbConfig | None = None
    """EPLB is on: experts move with their load. Needs `dp_sync`."""
    local_ranks: int = 1
    """Ranks that share this machine's memory, those of other data parallel ranks included."""
    rank: int = 0
    first_rank: int = 0
    """Number of this core's first rank among the ranks of all cores. They go to nodes, and to a node's GPUs, in this order."""
    rendezvous: Rendezvous | None = None
    """Set where there are several ranks, by the executor, as is `counters`."""
    counters: str = ""
    """File of the node's progress counters."""

    @property
    def max_num_samples(self) -> int:
        """See `SchedulerConfig`."""
        return most_samples(self.max_num_seqs, self.num_speculative_tokens)

    @property
    def kv_dtype(self) -> str:
        """Dtype of the tensors that have cached keys and values; two codes of 4 bits are a byte (`native/cache_rows.py`)."""
        return self.dtype if self.kv_cache is None else CACHE_DTYPES[self.kv_cache]


@dataclass(frozen=True)
class VocabularyConfig:
    """Tokens that grammars choose from: a tokenizer's folder, the number of the model's logits, the tokens that end an output."""

    tokenizer_path: str
    size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that one engine core is started with. Its process gets it as JSON."""

    scheduler: SchedulerConfig
    worker: WorkerConfig
    block_size: int
    progress_timeout: float
    cache_dtype: str = "auto"
    """Dtype as the user asked for it, for reports; `worker.kv_dtype` is the resolved one."""
    async_scheduling: bool | None = None
    """Set as the user asked; None lets the worker's platform decide."""
    seed: int | None = None
    """Seed for the frontend's draws of request seeds; None takes the system's entropy."""
    data_parallel_rank: int = 0
    vocabulary: VocabularyConfig | None = None
    """Requests with a grammar are refused where there is none."""
    kv_events: str | None = None
    """Endpoint that KV events are published at: see `kv.publisher`."""
    sleep_mode: bool = False
    """Clients of the endpoint may put it to sleep."""

    def of_core(self, dp: int) -> "EngineConfig":
        """Returns the settings of one data parallel rank's core."""
        return replace(self, data_parallel_rank=dp, worker=replace(self.worker, first_rank=dp * self.worker.layout.world_size))
