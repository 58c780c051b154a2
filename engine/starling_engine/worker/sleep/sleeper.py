"""A rank's memory while its engine sleeps: see `starling_engine.sleep`."""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from starling_engine.errors import StarlingError
from starling_engine.ipc.collection import freeze_again
from starling_engine.models.decoder import Decoder
from starling_engine.sleep import MemoryCommand, MemoryReply, ReleaseMemory, RestoreMemory, Tag
from starling_engine.worker.pending_step import Runner
from starling_engine.worker.sleep.memory import HostCopies, Pages, return_unused, storages_of

logger = logging.getLogger("starling.worker")


class RankSleeper:
    """Carries out commands to release and restore memory; a command may come twice.

    `model` must be the runner's, with no other reference. `remake` builds the model again from the files, as at the start: so there
    is only one way to fill weights of any form, and a failure half-way leaves nothing behind.
    """

    def __init__(
        self,
        model: Decoder,
        remake: Callable[[], Decoder],
        runner: Runner,
        kv: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        self._model: Decoder | None = model
        self._remake = remake
        self._runner = runner
        self._kv = Pages(kv)
        self._device = device
        self._copies: HostCopies | None = None
        """The weights, while they wait in host memory."""
        self._asleep: set[Tag] = set()

    def carry_out(self, command: MemoryCommand) -> MemoryReply:
        """Carries out a command and reports any failure; after one the rank goes on, and the command may come again."""
        began = time.perf_counter()
        try:
            self._do(command)
        except Exception as error:
            expected = isinstance(error, StarlingError)  # its message says all
            logger.error("%s failed: %s", command, error, exc_info=not expected)
            return_unused(self._device)
            return MemoryReply(f"{type(error).__name__}: {error}")
        if isinstance(command, ReleaseMemory):
            return_unused(self._device)
        logger.info("%s took %.2f s", command, time.perf_counter() - began)
        return MemoryReply()

    def _do(self, command: MemoryCommand) -> None:
        match command:
            case ReleaseMemory(level):
                self._release_weights(level)
                self._asleep.add("weights")
                self._kv.release()
                self._asleep.add("kv_cache")
                self._runner.on_sleep()
            case RestoreMemory(tags):
                self._restore([tag for tag in tags if tag in self._asleep])

    def _release_weights(self, level: int) -> None:
        if self._model is None:
            return
        if level == 2:
            # Captured steps may still refer to some.
            for storage in storages_of(self._model):
                storage.resize_(0)
            self._model = None
            self._drop_copies()
        elif self._device.type != "cpu" and self._copies is None:
            self._copies = HostCopies(storages_of(self._model), self._device)

    def _drop_copies(self) -> None:
        if self._copies is not None:
            self._copies.drop()
            self._copies = None

    def _restore(self, tags: Sequence[Tag]) -> None:
        if "weights" in tags:
            self._restore_weights()
            self._asleep.remove("weights")
        if "kv_cache" in tags:
            self._kv.restore()
            self._asleep.remove("kv_cache")
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if tags and not self._asleep:
            assert self._model is not None
            self._runner.on_wake(self._model)
            freeze_again()

    def _restore_weights(self) -> None:
        if self._copies is not None:
            self._copies.restore()
            self._copies = None
        elif self._model is None:
            self._model = self._remake()
