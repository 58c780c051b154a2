"""A worker's life: init -> load -> plan memory -> allocate KV -> warm up -> ready; then it executes plans."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch
import zmq
from torch.distributed import DistError

from starling_engine.attention.selector import select_attention
from starling_engine.config import WorkerConfig
from starling_engine.errors import PeerLost
from starling_engine.expert_parallel.balancing import Balancing
from starling_engine.expert_parallel.dp_sync import Epoch
from starling_engine.expert_parallel.expert_publisher import ExpertPublisher
from starling_engine.expert_parallel.expert_ranks import ExpertRanks, over_tensor
from starling_engine.expert_parallel.load_window import LoadWindow
from starling_engine.expert_parallel.meeting import LoadedSoFar, meet
from starling_engine.expert_parallel.rearrangement import Rearrangement
from starling_engine.kv.layer_specs import kv_groups
from starling_engine.kv.spec import KVGroup
from starling_engine.kv_offload.orders import TierStatus, TransferDone
from starling_engine.kv_offload.starting import open_tiers
from starling_engine.kv_offload.transfers import TransferThreads
from starling_engine.layers.select import select_linear_method
from starling_engine.ledger import Ledger
from starling_engine.model_config.config import ModelConfig, load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.parallel.communicator import Communicator
from starling_engine.parallel.gloo import join_store
from starling_engine.parallel.ranks import join_ranks
from starling_engine.params import SamplingParams
from starling_engine.platforms.select import select_platform
from starling_engine.sleep import MemoryOrderDone, RestOrder
from starling_engine.step import NewRequest, StepPlan, StepResult
from starling_engine.tokens import pack
from starling_engine.topology.epoch import Balance, EpochPlan, Rearranged
from starling_engine.weights.cache_scales import load_kv_scales
from starling_engine.weights.dummy import DummyWeights, load_dummy
from starling_engine.weights.loader import Checkpoint, load_weights
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.guarded_step import GuardedStep
from starling_engine.worker.host.batch import InputBatch
from starling_engine.worker.making import make_runner
from starling_engine.worker.memory_plan import allocate, kv_dtype, plan
from starling_engine.worker.pending_step import Finished, PendingStep, Runner
from starling_engine.worker.report import Phase, WorkerReport
from starling_engine.worker.sleep.sleeper import RankSleeper
from starling_engine.worker.stage import StageLink

logger = logging.getLogger("starling.worker")

PhaseSink = Callable[[Phase], None]

Agree = Callable[[int], int]
"""The KV blocks that this rank has room for -> those that all have: block tables are the same on every rank."""


def _alone(num_blocks: int) -> int:
    return num_blocks


class Worker:
    """One device's share of the model. All calls come from one thread; torch's settings of that thread are the worker's."""

    def __init__(
        self,
        config: WorkerConfig,
        tick: Callable[[], None],
        on_phase: PhaseSink,
        agree: Agree = _alone,
        answer: Callable[[TransferDone | TierStatus], None] | None = None,
    ) -> None:
        self._config = config
        self._answer = answer
        self.transfers: TransferThreads | None = None
        """Once it is prepared, where the configuration has tiers."""
        self._agree = agree
        self._tick = tick
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._runner: Runner | None = None
        self._device = torch.device("cpu")
        self._model: Decoder | None = None
        """Where experts come and go; else whoever has it sleep is the only one to keep it."""
        self._shared: ExpertRanks | None = None
        self._rest: RankSleeper | None = None
        self.epoch = 0

    def prepare(self) -> WorkerReport:
        """Everything up to ready; the report of this rank alone. Raises ConfigError or ModelError."""
        config = self._config
        with self._phase("init"):
            torch.set_num_threads(config.num_threads)
            torch.manual_seed(config.seed)
            platform = select_platform(config.device, (config.first_rank + config.rank) % config.local_ranks)
            self._device = platform.device
            dtype: torch.dtype = getattr(torch, config.dtype)
            platform.check_dtype(dtype)
            platform.check_kv_dtype(kv_dtype(config))
            model_config = load_model_config(Path(config.model_path))
            attention, _ = select_attention(
                *(config.attention_backend, platform, dtype, model_config.head_dim),
                latent=model_config.mla is not None,
                fp8_cache=config.fp8_cache,
            )
            methods = select_linear_method(dtype, platform.device)
            ranks = join_ranks(config, self._tick, platform.device)

            def build() -> Decoder:
                return Decoder(
                    *(model_config, dtype, platform.device, methods, attention),
                    max_position=config.max_model_len,
                    tensor=ranks.tensor,
                    stage=ranks.pipeline.shard,
                    expert_ranks=self._expert_ranks(model_config, ranks.tensor, platform.device),
                )

            model = build()
        with self._phase("load"), torch.inference_mode():
            self._load(model)
        with self._phase("allocate"):
            groups = kv_groups(model_config, config)
            batch = InputBatch(groups, config.max_num_seqs, config.max_model_len, config.block_size, model_config.eos_token_ids)
            link = StageLink(ranks.pipeline, model_config.hidden_size, dtype, platform.device)
            make = partial(make_runner, platform, config, model, groups, batch, link, self._tick)
            planned = plan(config, platform, model, groups, dtype, self._reserved(model), batch.table_bytes, make)
            ledger = self._agreed(planned, model, dtype)
            kv = allocate(groups, ledger.num_blocks, kv_dtype(config), platform.device)
            self._runner = make(kv)
            if config.lockstep:
                self._model = model
            else:
                self._rest = RankSleeper(model, lambda: self._loaded(build()), self._runner, kv, platform.device)
            if config.tiers is not None:
                assert self._answer is not None, "somebody has to hear of what has moved"
                self.transfers = open_tiers(config, model_config, groups, kv, self._answer)
        with self._phase("warm up"):
            platform.keep_scratch()
            self._warm_up(groups)
        if isinstance(self._runner, DeviceRunner):
            with self._phase("graphs"), torch.inference_mode():
                self._runner.record()
        return WorkerReport(groups, ledger, [self._seconds], platform.async_scheduling, platform.step_target_ms)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Gives one plan to the device. Whatever it raises is the step's failure; the worker stays usable."""
        assert self._runner is not None, "prepare() comes first"
        if plan.epoch > self.epoch:
            error = f"a plan of epoch {plan.epoch}, but this is {self.epoch}"
            return Finished(StepResult(plan.step_id, plan.epoch, [], error=error))
        with torch.inference_mode():
            return self._runner.launch(plan)

    def begin(self, plan: StepPlan) -> GuardedStep:
        """As `launch`, with what it raises, and what `finish` does, as the step's error. Both raise RankLost: without the others no
        step can be run; and DeviceLost, for no later step would run.
        """
        return GuardedStep(plan, self._config.rank, self._device, self.transfers, self.launch)

    def attempt(self, plan: StepPlan) -> StepResult:
        """`begin`, and then `finish`."""
        return self.begin(plan).finish()

    def rest(self, order: RestOrder) -> MemoryOrderDone:
        """Gives memory back, or takes it again; no step is in flight. Not for a rank whose config says `lockstep`."""
        assert self._rest is not None, "prepare() comes first, and ranks that step with other cores' do not sleep"
        return self._rest.carry_out(order)

    # ---- among the ranks of other cores ----

    def rearrangement(self) -> Rearrangement:
        """How the experts that this rank holds come to be others; for a rank whose config says `lockstep`."""
        assert self._model is not None and self._shared is not None, "prepare() comes first"
        config = self._config
        dummy = config.load_format == "dummy"
        source = DummyWeights(config.seed) if dummy else Checkpoint(Path(config.model_path))
        return Rearrangement(self._shared, self._model.experts, source)

    def holders(self) -> ExpertPublisher:
        """How ranks that load experts hear of those that hold them; before the first rearrangement."""
        assert self._model is not None, "prepare() comes first"
        return ExpertPublisher(self._config, self._model.experts)

    def join_epoch(self, plan: EpochPlan, loaded: LoadedSoFar, cancelled: Callable[[], bool], address: str) -> Epoch:
        """Meets the other ranks of an epoch when all have loaded. Raises as `meet`. `address`: of this one's ExpertServer."""
        layout, own = self._config.layout, self._config.rendezvous
        assert own is not None, "the executor says where this rank can be reached"
        plan = msgspec.structs.replace(plan, rendezvous=replace(plan.rendezvous, address=own.address))
        place = layout.coordinates(self._config.rank)
        try:
            meet(join_store(plan.rendezvous), plan, layout, place, loaded, cancelled)
            return Epoch(plan, layout, place, zmq.Context.instance(), self._tick, address, self._device)
        except DistError as error:
            raise PeerLost(f"the rank that serves the rendezvous is gone: {error}") from error

    def balancing(self, moves: Rearrangement, tell: Callable[[Balance | Rearranged], None]) -> Balancing:
        """How they come to be others because of what they have to do."""
        assert self._model is not None and self._model.config.moe is not None and self._shared is not None, "prepare() comes first"
        return Balancing(self._config, self._model.config.moe, self._shared, moves, tell)

    def rank_among(self, dp: int) -> int:
        """This rank's number among those that share the experts of its stage, in a core of that data parallel rank."""
        layout = self._config.layout
        return dp * layout.tensor + layout.coordinates(self._config.rank).tp

    def serve(self) -> None:
        """A step without a plan: the experts that are here compute for the tokens of other ranks."""
        assert self._model is not None, "prepare() comes first"
        with torch.inference_mode():
            self._model.serve_experts(self._tick)

    def _expert_ranks(self, model: ModelConfig, tensor: Communicator, device: torch.device) -> ExpertRanks | None:
        if not self._config.lockstep:
            return over_tensor(model, tensor, device) if self._config.expert_parallel else None
        assert model.moe is not None, "only experts are held among several"
        experts, slots, eplb = model.moe.num_experts, self._config.expert_slots, self._config.eplb
        window = LoadWindow(len(model.moe.layers), experts, eplb.window) if eplb is not None else None
        self._shared = ExpertRanks(experts, slots + (eplb.spare if eplb is not None else 0), tensor, device=device, window=window)
        return self._shared

    def _reserved(self, model: Decoder, slots: int | None = None) -> int:
        """Elements of the experts that this rank will have to hold: it stands by without any. `slots` of each layer, or all."""
        shapes = [e.shape for e in model.experts.values()] if self._config.lockstep else []
        return sum(3 * (s.slots if slots is None else slots) * s.hidden_size * s.intermediate_size for s in shapes)

    # ---- about the rank ----

    @property
    def num_stages(self) -> int:
        return self._config.layout.pipeline

    @property
    def samples(self) -> bool:
        """Whether results come from this rank: others of the last stage sample the same and keep it to themselves."""
        return self._config.layout.samples(self._config.rank)

    def _load(self, model: Decoder) -> None:
        if self._config.load_format == "dummy":
            load_dummy(model, self._config.seed)
            return
        folder = Path(self._config.model_path)
        load_weights(model, folder, self._report_load)
        if self._config.fp8_cache:
            load_kv_scales(model.kv_scaled, folder)

    def _loaded(self, model: Decoder) -> Decoder:
        with torch.inference_mode():
            self._load(model)
        return model

    def _report_load(self, done: int, total: int) -> None:
        self._on_phase(Phase("load", done, total))

    def _agreed(self, ledger: Ledger, model: Decoder, dtype: torch.dtype) -> Ledger:
        """With the KV blocks for which all ranks have room."""
        num_blocks, eplb = self._agree(ledger.num_blocks), self._config.eplb
        moving = self._reserved(model, eplb.spare) * dtype.itemsize if eplb is not None else 0
        return replace(ledger, num_blocks=num_blocks, kv=num_blocks * ledger.block_bytes, moving=moving)

    def _warm_up(self, groups: list[KVGroup]) -> None:
        """One token through everything, into the null block, so that the first request does not pay for what is made lazily."""
        new = NewRequest(0, pack([0]), 1, 0, [[0] for _ in groups], 0, SamplingParams(temperature=0.0), None)
        self.launch(StepPlan(-1, self.epoch, [0], [0], [1], [-1], [True], [new], inputs=[0])).finish()
        assert self._runner is not None
        self._runner.free_slot(0)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._on_phase(Phase(name))
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began
        logger.info("%s took %.2f s", name, self._seconds[name])
