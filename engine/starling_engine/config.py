"""The engine's settings with every "auto" resolved: what a core and its workers are started with. Imports no torch."""

from dataclasses import dataclass, field, replace
from typing import Literal

from starling_engine.topology.layout import ParallelLayout
from starling_engine.topology.rendezvous import Rendezvous

Policy = Literal["fcfs", "priority"]
EvictionPolicy = Literal["lru", "arc"]
Direct = Literal["auto", "on", "off"]
Preempt = Literal["auto", "recompute", "swap"]
MAX_NUM_WAITING_TOKENS = 1 << 23
"""Of 4 bytes each in the core, and some 36 in the frontend: 0.3 GB."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know; sizes in tokens unless they say otherwise."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_target_ms: int | None = None
    """Of steps with decodes. None lets the worker's platform decide; a scheduler by itself then has none."""
    max_num_waiting: int = 1024
    max_num_waiting_tokens: int = MAX_NUM_WAITING_TOKENS
    policy: Policy = "fcfs"
    prefix_caching: bool = True
    stages: int = 1
    """Pipeline stages, each of which is to have a step of its own to work on."""
    depth: int = 1
    """Steps in flight at once, which the engine core knows: with several stages, decodes are dealt over so many."""
    preempt: Preempt = "auto"
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """How experts are balanced over their ranks. `window` and `interval` are in steps of an epoch.

    redundant   copies in each layer besides the first of each expert, where there are ranks that have use for them
    spare       slots in each layer for experts on their way: a rank holds what it has and what it is to have
    """

    window: int
    interval: int
    redundant: int
    spare: int


@dataclass(frozen=True, kw_only=True)
class TiersConfig:
    """Where keys and values are kept besides the device; sizes in bytes.

    cpu_bytes      the CPU tier: host memory of each rank
    passage_bytes  where there is none, host memory of each rank that a folder and a store pass through
    """

    cpu_bytes: int
    passage_bytes: int = 0
    cpu_policy: EvictionPolicy = "lru"
    fs_path: str | None = None
    fs_bytes: int = 0
    fs_direct: Direct = "auto"
    store: str | None = None

    @property
    def slot_bytes(self) -> int:
        """Host memory of each rank that chunks lie in, to stay or to pass through."""
        return self.cpu_bytes or self.passage_bytes

    @property
    def far(self) -> bool:
        """Whether there is a tier that outlives the engine."""
        return self.fs_path is not None or self.store is not None


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What a worker needs besides the model: dtypes are names ("bfloat16"), sizes in bytes or tokens."""

    model_path: str
    load_format: Literal["auto", "dummy"]
    device: str
    dtype: str
    seed: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_memory_bytes: int | None
    memory_fraction: float | None
    """Of the device; where that is the host, for all its ranks together. None takes the platform's."""
    attention_backend: str
    num_threads: int
    enforce_eager: bool = False
    fp8_cache: bool = False
    """Keys and values are cached in float8_e4m3fn; else in `dtype`."""
    tiers: TiersConfig | None = None
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    expert_parallel: bool = False
    lockstep: bool = False
    """Experts are spread over the ranks of several cores, in epochs that whoever leads them announces while they run."""
    elastic: bool = False
    """The number of those cores may change."""
    expert_slots: int = 0
    """Experts of each layer that this rank may have to hold; where `lockstep` is set."""
    eplb: EplbConfig | None = None
    """Experts move as their load asks for; where `lockstep` is set."""
    local_ranks: int = 1
    """Ranks that share this machine's memory, those of other data parallel ranks included."""
    rank: int = 0
    first_rank: int = 0
    """Of this core, among those of all cores: ranks are dealt to nodes in their order, and to a node's GPUs."""
    rendezvous: Rendezvous | None = None
    """Where there are several ranks; the executor fills it in, as it does `counters`."""
    counters: str = ""
    """File of the node's counters of progress."""

    @property
    def kv_dtype(self) -> str:
        """Of cached keys and values."""
        return "float8_e4m3fn" if self.fp8_cache else self.dtype


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything resolved: what one engine core is started with. Serialised as JSON to its process."""

    scheduler: SchedulerConfig
    worker: WorkerConfig
    block_size: int
    progress_timeout: float
    cache_dtype: str = "auto"
    """As it was asked for, to be told outside; `worker.kv_dtype` is what it comes to."""
    async_scheduling: bool | None = None
    """None lets the worker's platform decide."""
    seed: int | None = None
    """Of the frontend's draws of request seeds; None takes the system's entropy."""
    data_parallel_rank: int = 0
    kv_events: str | None = None
    """Where it publishes what is cached: see `kv.publisher`."""
    sleep_mode: bool = False
    """Whether clients of the endpoint may put it to sleep."""

    def of_core(self, dp: int) -> "EngineConfig":
        """That of one data parallel rank's core."""
        return replace(self, data_parallel_rank=dp, worker=replace(self.worker, first_rank=dp * self.worker.layout.world_size))
