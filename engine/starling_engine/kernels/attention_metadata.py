"""A step, as attention kernels see it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from starling_engine.kernels.state_replay import StateReplay

T = TypeVar("T")

HostLens = tuple[Sequence[int], Sequence[int]]
"""query_start and context_lens of `AttentionMetadata`."""


@dataclass(slots=True)
class AttentionMetadata:
    """A step's data for one KV group. Made for each step; valid until the step ends.

    Sequences lie one behind the other in the step's flat token axis of T tokens.

    positions     [T] int64, each token's position in its sequence
    slot_mapping  [T] int64, block * block_size + offset where the token's keys and values go; -1 stores nothing, and is for tokens
                  that only fill the step up
    query_start   [S + 1] int32, first token of each sequence in the step; the last entry is T
    context_lens  [S] int32, tokens of each sequence in the cache once this step's are stored
    block_tables  [S, max_blocks] int32; blocks outside the window are 0 and never read
    max_query_len longest query of the step; 1 means a pure decode step
    shared_blocks leading blocks that all sequences share and that were full before this step, as
                  `kernels.attention_plan.common_prefix` counts them: a backend may attend to them for all sequences at once
    host_lens     query_start and context_lens as the host knows them, where it does; nothing waits for the device to read them.
                  Drafts in flight count as accepted
    exact_lens    the same, exact: `lens` fills it in where it is None
    query_blocks  [N, 2] int32, the query blocks of prompts, by `kernels.attention_plan.QueryBlocks` of the layers' shape; None
                  where nobody has listed them. Only where max_query_len is more than its `decodes`
    chosen        [T, K] int32, positions in its sequence that each token attends to, -1 behind the last: the choice of the last
                  indexer that has run in this step. Rows of sequences that attend to all are left out. None where all sequences do
    taken         [S] int32, for layers with a recurrent state: how many of a sequence's tokens its state takes in, the first ones;
                  those behind are not computed. 0: all are computed, and the state stays as it was. None: it takes all of them in
    replay        keeps what layers with a state compute from, in a step with drafts
    by_library    True once a library has computed the attention of a layer (`attention.prompts`)
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    shared_blocks: int = 0
    host_lens: HostLens | None = None
    query_blocks: torch.Tensor | None = None
    chosen: torch.Tensor | None = None
    taken: torch.Tensor | None = None
    replay: "StateReplay | None" = None
    exact_lens: HostLens | None = None
    by_library: bool = False
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False)

    def lens(self) -> HostLens:
        """Returns query_start and context_lens on the host. Where it does not know them, the first call waits for the device."""
        if self.exact_lens is None:
            self.exact_lens = self.query_start.tolist(), self.context_lens.tolist()
        return self.exact_lens

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """Returns what `make` has returned to the first layer of the step that asked for `what`."""
        if what not in self._made:
            self._made[what] = make()
        made: T = self._made[what]
        return made

    def send(self, values: Sequence[int]) -> torch.Tensor:
        """Returns numbers of the host on the device, [N] int64. Nothing waits for the device."""
        device = self.positions.device
        return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
