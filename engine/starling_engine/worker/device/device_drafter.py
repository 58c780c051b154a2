"""Drafts that a device makes: it has the tokens before the host knows them, so that steps stay in flight."""

from typing import Protocol

import torch

from starling_engine.config import SpeculativeConfig
from starling_engine.kernels import prompt_lookup
from starling_engine.platforms.device_queue import DeviceQueue
from starling_engine.platforms.triton_support import triton_runs
from starling_engine.step import OWN, StepPlan
from starling_engine.token_packing import unpack_tokens
from starling_engine.worker.device.device_positions import DevicePositions
from starling_engine.worker.device.pinned import send
from starling_engine.worker.device.step_writer import Fields
from starling_engine.worker.host.batch import InputBatch


class DraftOp(Protocol):
    """Makes drafts; `kernels.prompt_lookup.ngram_drafts` defines the result."""

    def __call__(
        self,
        ids: torch.Tensor,
        query_start: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor,
        *,
        shortest: int,
        longest: int,
        most: int,
    ) -> None: ...


def select_draft_op(device: torch.device) -> DraftOp:
    """Returns Triton's op where its kernels run, else torch's."""
    if not triton_runs(device):
        return prompt_lookup.ngram_drafts
    from starling_engine.kernels import ngram_drafts

    return ngram_drafts.ngram_drafts


class DeviceDrafter:
    """Makes no drafts: the null object, and the interface of the one that makes them."""

    active = False
    """True where plans may have OWN drafts."""

    def propose(self, plan: StepPlan, f: Fields) -> None:
        """Queues the making of the plan's OWN drafts: they are replaced among the step's ids, where anything is found.

        The batch has the plan already, and the step's positions are not made yet.
        """

    def warm(self, f: Fields) -> None:
        """Makes drafts for a step that has none, so that the kernel has been met."""

    def append(self, f: Fields, chosen: torch.Tensor) -> None:
        """Takes the tokens that a step has sampled, [S] int64."""

    def forget(self) -> None:
        """Gives memory back, while there are no requests."""


class NgramDrafter(DeviceDrafter):
    """Prompt lookup in all tokens of a slot's request. The first step takes the memory: 4 bytes for each token of each slot."""

    active = True

    def __init__(
        self, config: SpeculativeConfig, batch: InputBatch, positions: DevicePositions, queue: DeviceQueue, device: torch.device
    ) -> None:
        self._config = config
        self._batch = batch
        self._positions = positions
        self._queue = queue
        self._device = device
        self._op = select_draft_op(device)
        self._tokens: torch.Tensor | None = None
        """[slots + 1, width] int32, as `InputBatch.tokens`; behind a sequence's end, and for requests without drafts, undefined."""

    def propose(self, plan: StepPlan, f: Fields) -> None:
        for new in plan.new:
            if new.sampling is not None and new.sampling.speculative:
                self._enter(new.slot, len(unpack_tokens(new.token_ids)))
        if OWN in unpack_tokens(plan.drafts):
            self._find(f)

    def warm(self, f: Fields) -> None:
        self._find(f)

    def _find(self, f: Fields) -> None:
        self._op(
            f.ids,
            f.query_start,
            f.slots,
            f.starts,
            self._positions.lengths,
            self._tokens_of_all(),
            shortest=self._config.prompt_lookup_min,
            longest=self._config.prompt_lookup_max,
            most=self._config.num_speculative_tokens,
        )

    def append(self, f: Fields, chosen: torch.Tensor) -> None:
        # Tokens behind a refused draft lie behind the sequence's end, and are written over.
        self._tokens_of_all().index_put_((f.sampled_slots, f.ends), chosen.int())

    def forget(self) -> None:
        self._tokens = None

    def _enter(self, slot: int, count: int) -> None:
        sent = send(self._queue, self._batch.tokens[slot, :count], self._device)
        self._tokens_of_all()[slot, :count].copy_(sent)

    def _tokens_of_all(self) -> torch.Tensor:
        if self._tokens is None:
            slots, width = self._batch.tokens.shape
            self._tokens = torch.empty(slots + 1, width, dtype=torch.int32, device=self._device)
        return self._tokens
