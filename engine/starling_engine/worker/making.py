"""Makes the runner that a platform needs."""

import logging
from collections.abc import Callable

import torch

from starling_engine.config import WorkerConfig
from starling_engine.kv.spec import KVGroup
from starling_engine.models.decoder import Decoder
from starling_engine.platforms.base import Platform
from starling_engine.sampling.select import select_sample_op
from starling_engine.worker.device.device_runner import DeviceRunner
from starling_engine.worker.host.batch import InputBatch
from starling_engine.worker.host.pages import KVPages
from starling_engine.worker.host.runner import ModelRunner
from starling_engine.worker.host.sampler import Sampler
from starling_engine.worker.pending_step import Runner
from starling_engine.worker.stage import StageLink

logger = logging.getLogger("starling.worker")


def make_runner(
    platform: Platform,
    config: WorkerConfig,
    model: Decoder,
    groups: list[KVGroup],
    batch: InputBatch,
    link: StageLink,
    tick: Callable[[], None],
    kv: list[torch.Tensor],
) -> Runner:
    """One for a device that works on its own, or one for the thread that calls. `kv` as KVPages has it."""
    op, pages = select_sample_op(platform.device), KVPages(kv, groups, tick)
    if platform.queue is None:
        return ModelRunner(model, pages, batch, Sampler(op), link)
    return DeviceRunner(
        *(model, pages, batch, op, tick, link, platform.queue),
        max_tokens=config.max_num_batched_tokens,
        vocab_size=model.config.vocab_size,
        recorded=_recorded(config, model),
        cascades=model.cascades,
    )


def _recorded(config: WorkerConfig, model: Decoder) -> bool:
    if config.enforce_eager:
        why = "enforce_eager"
    elif (asks := model.asks_host) is not None:
        why = asks
    else:
        return True
    logger.info("steps are not recorded: %s", why)
    return False
