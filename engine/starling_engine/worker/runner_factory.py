"""Makes the runner that a platform needs."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from starling_engine import native
from starling_engine.config import WorkerConfig
from starling_engine.kernels.kv_cache import KVCache
from starling_engine.kv.spec import KVGroup, StateGroup
from starling_engine.ledger import recorded_bytes
from starling_engine.models.decoder import Decoder
from starling_engine.platforms.base import Platform
from starling_engine.platforms.triton_support import capability, sms
from starling_engine.sampling.select import select_mask_op, select_sample_op
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.device.graphs import launched_tokens
from starling_engine.worker.host.batch import InputBatch
from starling_engine.worker.host.encoder_runner import EncoderRunner
from starling_engine.worker.host.kv_pages import KVPages
from starling_engine.worker.host.runner import ModelRunner
from starling_engine.worker.host.sampler import Sampler
from starling_engine.worker.masks import StepMasking
from starling_engine.worker.pending_step import Runner
from starling_engine.worker.stage import StageLink

logger = logging.getLogger("starling.worker")


@dataclass(frozen=True, slots=True)
class RunnerFactory:
    """Parts of a runner that are there before its KV cache.

    `gathered_elements`: what a library that may compute the attention of prompts copies of a sequence's keys and values.
    """

    config: WorkerConfig
    platform: Platform
    model: Decoder
    groups: list[KVGroup]
    state: StateGroup | None
    batch: InputBatch
    link: StageLink
    tick: Callable[[], None]
    masking: StepMasking
    gathered_elements: int = 0

    def make(self, kv: KVCache) -> Runner:
        """Makes a runner for a device that works on its own, or one for the thread that calls."""
        if not self.model.config.causal:
            return EncoderRunner(
                *(self.model, self.batch, self.link, self.platform.device, self.tick),
                num_layers=len(self.model.layers),
                adapters=self.model.config.adapters,
            )
        op, pages = select_sample_op(self.platform.device), KVPages(kv, self.groups, self.tick, self.state, self.model.layers)
        if self.platform.queue is None:
            sampler = Sampler(op, select_mask_op(self.platform.device))
            return ModelRunner(self.model, pages, self.batch, sampler, self.link, self.masking, recorded_bytes=self.recorded_bytes)
        return DeviceRunner(
            self.model,
            pages,
            self.batch,
            op,
            self.tick,
            self.link,
            self.platform.queue,
            self.masking,
            max_tokens=self.config.max_num_batched_tokens,
            max_samples=self.config.max_num_samples,
            max_drafts=self.config.num_speculative_tokens,
            vocab_size=self.model.config.vocab_size,
            recorded=self._is_recorded(),
            launched_tokens=self._launched_tokens(),
            cascades=self.model.cascades,
            query_blocks=self.model.query_blocks,
            own_drafts=self.config.own_drafts,
            sums=self.model.tensor_ranks > 1,
        )

    def _launched_tokens(self) -> int:
        device = self.platform.device
        of_gpu = 0 if device.type == "cpu" else capability(device)
        return launched_tokens(self.model.config, self.model.tensor_ranks, of_gpu, sms(device))

    @property
    def recorded_bytes(self) -> int:
        """Memory for the steps that a host records; 0 where it records none."""
        config, model = self.config, self.model.config
        alone = config.layout.world_size == 1 and not config.dp_sync
        by_kernels = config.dtype == "bfloat16" and model.mla is None and model.compressed is None and native.load() is not None
        records = self.platform.queue is None and not config.enforce_eager and alone and by_kernels and model.causal
        return recorded_bytes(model, 2) if records else 0

    def _is_recorded(self) -> bool:
        reason = "enforce_eager" if self.config.enforce_eager else self.model.eager_reason
        if reason is not None:
            logger.info("steps are not recorded: %s", reason)
        return reason is None
