"""A worker's life: init -> load -> plan memory -> allocate KV -> warm up -> ready; then it executes plans."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from starling_engine.config import WorkerConfig
from starling_engine.expert_parallel.eplb_manager import EplbManager
from starling_engine.expert_parallel.epoch import EpochJoiner
from starling_engine.expert_parallel.peers import ExpertPublisher
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.expert_parallel.rearrangement import Rearrangement
from starling_engine.kv.layer_specs import kv_groups, state_group
from starling_engine.kv.spec import KVGroup, StateGroup
from starling_engine.kv_offload.orders import TierStatus, TransferDone, TransferOrder
from starling_engine.kv_offload.transfers import TransferThreads, open_tiers
from starling_engine.ledger import Ledger
from starling_engine.model_config.config import load_model_config
from starling_engine.models.decoder import Decoder
from starling_engine.parallel.ranks import join_ranks
from starling_engine.params import PoolingParams, SamplingParams
from starling_engine.platforms.select import select_platform
from starling_engine.sleep import MemoryCommand, MemoryReply
from starling_engine.step import NewRequest, StepPlan, StepResult
from starling_engine.token_packing import pack_tokens
from starling_engine.topology.epoch import Balance, Rearranged
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.guarded_step import GuardedStep
from starling_engine.worker.masks import MaskQueue, MaskSource, StepMasking
from starling_engine.worker.memory_plan import allocate, kv_dtype, plan
from starling_engine.worker.messages import Phase, WorkerReport
from starling_engine.worker.pending_step import Finished, PendingStep, Runner
from starling_engine.worker.setup import RankSetup, weight_source
from starling_engine.worker.sleep.sleeper import RankSleeper
from starling_engine.worker.warm import KernelCompilation

logger = logging.getLogger("starling.worker")

PhaseSink = Callable[[Phase], None]

Agree = Callable[[int], int]
"""Gets the KV blocks that this rank has room for; returns those that all have, for block tables are the same on every rank."""


def _alone(num_blocks: int) -> int:
    return num_blocks


class Worker:
    """The share of the model on one device. All calls come from one thread; torch's settings of that thread are the worker's."""

    def __init__(
        self,
        config: WorkerConfig,
        tick: Callable[[], None],
        on_phase: PhaseSink,
        agree: Agree = _alone,
        reply: Callable[[TransferDone | TierStatus], None] | None = None,
        masks: MaskSource | None = None,
    ) -> None:
        """`masks` is for a rank that samples. `reply` is for a configuration with tiers, and is called by their threads."""
        self._config = config
        self._reply = reply
        self._masking = StepMasking(masks or MaskQueue())
        self._transfers: TransferThreads | None = None
        self._agree = agree
        self._tick = tick
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._runner: Runner | None = None
        self._kernels: KernelCompilation | None = None
        self._device = torch.device("cpu")
        self._model: Decoder | None = None
        """The model where experts come and go; elsewhere the sleeper must have the only reference."""
        self._expert_ranks: ExpertRanks | None = None
        self._sleeper: RankSleeper | None = None
        self.epoch = 0

    # ---- start ----

    def prepare(self) -> WorkerReport:
        """Makes the rank ready; returns the report of this rank alone. Raises ConfigError or ModelError."""
        with self._phase("init"):
            setup = self._set_up()
            expert_ranks = setup.expert_ranks()
            model = setup.build_model(expert_ranks)
        with self._phase("load"):
            setup.load(model, self._report_load)
        with self._phase("allocate"):
            groups, state = kv_groups(setup.model, self._config), state_group(setup.model, self._config)
            ledger = self._allocate(setup, model, groups, state)
        if self._config.dp_sync:
            self._model, self._expert_ranks = model, expert_ranks
        platform = setup.platform
        with self._phase("warm up"):
            platform.keep_freed_memory()
            self._warm_up(groups, state)
        if isinstance(self._runner, DeviceRunner):
            with self._phase("graphs"), torch.inference_mode():
                if platform.compile_target() is not None:
                    self._runner.warm()
                self._runner.record()
            self._runner.on_ready()
        makes_drafts = isinstance(self._runner, DeviceRunner) and self._runner.makes_drafts
        return WorkerReport(
            groups, state, ledger, [self._seconds], platform.async_scheduling, platform.step_target_ms, makes_drafts
        )

    def _set_up(self) -> RankSetup:
        config = self._config
        torch.set_num_threads(config.num_threads)
        torch.manual_seed(config.seed)
        platform = select_platform(config.device, (config.first_rank + config.rank) % config.local_ranks)
        self._device = platform.device
        target = platform.compile_target()
        # An encoder runs torch's kernels alone.
        compiles = target is not None and not config.dp_sync and load_model_config(Path(config.model_path)).causal
        self._kernels = KernelCompilation(config, target) if target is not None and compiles else None
        return RankSetup.choose(config, platform, lambda device: join_ranks(config, self._tick, device))

    def _allocate(self, setup: RankSetup, model: Decoder, groups: list[KVGroup], state: StateGroup | None) -> Ledger:
        """Plans memory, and makes all that lies in it: the KV cache, the runner, and the tiers."""
        config, device = self._config, setup.platform.device
        if self._kernels is not None:
            self._kernels.wait(self._tick)
        factory = setup.runner_factory(model, groups, state, self._tick, self._masking)
        ledger = self._agreed(plan(factory, setup.dtype, self._reserved(model)), model, setup.dtype)
        kv = allocate(groups, ledger.num_blocks, kv_dtype(config), device, state, model.layers)
        setup.choose_libraries(factory, kv)
        self._runner = factory.make(kv)
        if not config.dp_sync:
            self._sleeper = RankSleeper(model, lambda: self._remake(setup), self._runner, [kv.storage], device)
        if config.tiers is not None:
            assert self._reply is not None, "tiers need a receiver of their replies"
            self._transfers = open_tiers(config, setup.model, groups, kv.storage, self._reply, state)
        return ledger

    def _remake(self, setup: RankSetup) -> Decoder:
        """Builds and loads the model again, after a sleep."""
        model = setup.build_model(setup.expert_ranks())
        setup.load(model, self._report_load)
        return model

    def _report_load(self, done: int, total: int) -> None:
        self._on_phase(Phase("load", done, total))

    def _agreed(self, ledger: Ledger, model: Decoder, dtype: torch.dtype) -> Ledger:
        """Returns the ledger with the KV blocks for which all ranks have room."""
        num_blocks, eplb = self._agree(ledger.num_blocks), self._config.eplb
        moving = self._reserved(model, eplb.spare) * dtype.itemsize if eplb is not None else 0
        return replace(ledger, num_blocks=num_blocks, kv=num_blocks * ledger.slab_bytes, moving=moving)

    def _reserved(self, model: Decoder, slots: int | None = None) -> int:
        """Elements of the experts that this rank will have to hold: it stands by without any. `slots` of each layer, or all."""
        shapes = [e.shape for e in model.experts.values()] if self._config.dp_sync else []
        return sum(3 * (s.num_slots if slots is None else slots) * s.hidden_size * s.intermediate_size for s in shapes)

    def _warm_up(self, groups: list[KVGroup], state: StateGroup | None) -> None:
        """Runs one token, into the null block, so that the first request does not pay for lazy initialisation."""
        samples = bool(groups) or state is not None  # an encoder does not
        sampling, pooling = (SamplingParams(temperature=0.0), None) if samples else (None, PoolingParams(pooling="last"))
        blocks = [*([0] for _ in groups), *([] if state is None else [[0] * state.num_blocks])]
        new = NewRequest(0, pack_tokens([0]), 1, blocks, 0, sampling, pooling)
        self.launch(StepPlan(-1, self.epoch, [0], [0], [1], [True], [new], inputs=[0])).finish()
        assert self._runner is not None
        self._runner.free_slot(0)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._on_phase(Phase(name))
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began
        logger.info("%s took %.2f s", name, self._seconds[name])

    # ---- plans and commands ----

    @property
    def samples(self) -> bool:
        """True when results come from this rank: others of the last stage sample the same, and do not send it."""
        return self._config.layout.samples(self._config.rank)

    def launch(self, plan: StepPlan) -> PendingStep:
        """Gives one plan to the device. Any error that it raises is the step's; the worker stays usable."""
        assert self._runner is not None, "prepare() comes first"
        if plan.epoch > self.epoch:
            error = f"a plan of epoch {plan.epoch}, but this is {self.epoch}"
            return Finished(StepResult(plan.step_id, plan.epoch, error=error))
        with torch.inference_mode():
            return self._runner.launch(plan)

    def begin(self, plan: StepPlan) -> GuardedStep:
        """Launches a plan; errors of `launch` and `finish` become the step's.

        Both raise RankLost: without the others no step can be run; and DeviceLost, for no later step would run.
        """
        return GuardedStep(plan, self._config.rank, self._device, self._transfers, self.launch)

    def attempt(self, plan: StepPlan) -> StepResult:
        """Does `begin`, and then `finish`."""
        return self.begin(plan).finish()

    def change_memory(self, command: MemoryCommand) -> MemoryReply:
        """Gives memory back, or restores it; no step is in flight. Not for a rank whose config says `dp_sync`."""
        assert self._sleeper is not None, "prepare() comes first, and ranks that step with other cores' do not sleep"
        return self._sleeper.carry_out(command)

    def transfer(self, orders: Sequence[TransferOrder]) -> None:
        """Begins to transfer chunks. From any thread."""
        assert self._transfers is not None, "there are no tiers"
        for order in orders:
            self._transfers.order(order)

    def close(self) -> None:
        if self._transfers is not None:
            self._transfers.close()

    # ---- among the ranks of other cores ----

    def rearrangement(self) -> Rearrangement:
        """Makes the rank's means to change the experts that it holds; for a rank whose config says `dp_sync`."""
        assert self._model is not None and self._expert_ranks is not None, "prepare() comes first"
        return Rearrangement(self._expert_ranks, self._model.experts, weight_source(self._config))

    def expert_publisher(self) -> ExpertPublisher:
        """Makes the publisher of the experts that this rank holds; before the first rearrangement."""
        assert self._model is not None, "prepare() comes first"
        return ExpertPublisher(self._config, self._model.experts)

    def epoch_joiner(self, publisher: ExpertPublisher) -> EpochJoiner:
        """Makes what joins epochs for this rank."""
        return EpochJoiner(self._config, publisher, self._tick, self._device)

    def eplb_manager(self, rearrangement: Rearrangement, publish: Callable[[Balance | Rearranged], None]) -> EplbManager:
        """Makes the rank's part in EPLB."""
        assert self._model is not None and self._model.config.moe is not None and self._expert_ranks is not None
        return EplbManager(self._config, self._model.config.moe, self._expert_ranks, rearrangement, publish)

    @property
    def num_stages(self) -> int:
        return self._config.layout.pipeline

    def serve(self) -> None:
        """Runs a step without a plan: the experts that are here compute for the tokens of other ranks."""
        assert self._model is not None, "prepare() comes first"
        with torch.inference_mode():
            self._model.forward_without_tokens(self._tick)
