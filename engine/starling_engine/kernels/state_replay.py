"""Steps with drafts in layers with a recurrent state, which cannot go back behind a draft that is refused.

A row with drafts leaves its state as it was. What the layers' kernels compute such rows from is kept. Once it is known which drafts
are accepted, the kernels run again, on these tokens alone, and the state takes them in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata

StateKernel = Callable[..., torch.Tensor]
"""Computes from inputs of tokens, one row each, and a step's metadata; moves a state on."""


@dataclass(slots=True)
class StateReplay:
    """Keeps what layers compute a step's rows with drafts from.

    tokens  [V] int64, the step's tokens in these rows
    alone   metadata of a step that has no other rows; its `taken` is for `settle` to say
    """

    tokens: torch.Tensor
    alone: AttentionMetadata
    _calls: list[tuple[StateKernel, list[torch.Tensor]]] = field(default_factory=list)

    def keep(self, kernel: StateKernel, inputs: Sequence[torch.Tensor]) -> None:
        """Keeps a copy of a kernel's inputs, as far as they are of these rows."""
        self._calls.append((kernel, [each.index_select(0, self.tokens) for each in inputs]))

    def settle(self, taken: torch.Tensor) -> None:
        """Lets states take in the first tokens of each row, as many as `taken` [N] int32 says: one, and its accepted drafts.

        Where that is 0, the state stays as it is.
        """
        meta = replace(self.alone, taken=taken)
        for kernel, inputs in self._calls:
            kernel(*inputs, meta)


def run_on_state(kernel: StateKernel, meta: AttentionMetadata, *inputs: torch.Tensor) -> torch.Tensor:
    """Runs a kernel on inputs, each with a row for a token of the step; in a step with drafts it may run again."""
    found = kernel(*inputs, meta)
    if meta.replay is not None:
        meta.replay.keep(kernel, inputs)
    return found
