"""Attention of prompts by a library: for steps that have nothing but long prompts, in layers that ask for nothing special.

`prompt_libraries` has the libraries, and `prompt_trial` chooses one by measuring it. All else stays with the kernels of Triton.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from starling_engine.attention.base import AttentionWeights
from starling_engine.kernels.attention_metadata import AttentionMetadata

LEAST_TOKENS = 512
"""Fewest tokens of a prompt in a step: smaller steps are recorded, and a library's launches are not."""

HeadShape = tuple[int, int, int]
"""Query heads, key-value heads, and elements of a head."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens `start` to `end` of a step: the last ones of a sequence that then has `context` tokens, all of them in the cache.

    On the device: table [1, max_blocks] int32 are its blocks, tokens [2] int32 are 0 and end - start, contexts [1] int32.
    """

    start: int
    end: int
    context: int
    table: torch.Tensor
    tokens: torch.Tensor
    contexts: torch.Tensor
    _places: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def places(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the block of each of the sequence's tokens, and its place there, [context] int64: once for all layers."""
        if block_size not in self._places:
            at = torch.arange(self.context, device=self.table.device)
            self._places[block_size] = self.table[0, at // block_size].long(), at % block_size
        return self._places[block_size]


class PromptLibrary(Protocol):
    """Causal attention of one chunk. `name` is for logs; `gathers`: it copies the keys and values of a layer's whole sequence."""

    name: str
    gathers: bool

    def attend(self, q: torch.Tensor, kv: torch.Tensor, chunk: PromptChunk, scale: float) -> torch.Tensor:
        """Attends from q [M, H, D], the chunk's, to kv [num_blocks, 2, KVH, block_size, D] of the same dtype.

        Returns [M, H, D]. Query m sees the first context - M + m + 1 keys. Nothing waits for the device.
        """
        ...


@runtime_checkable
class TakesLibraries(Protocol):
    """A backend that leaves prompts to a library where it has one for the shape of a layer's heads."""

    libraries: dict[HeadShape, PromptLibrary]

    def attend(
        self, q: torch.Tensor, layer: AttentionWeights, kv: torch.Tensor, meta: AttentionMetadata, *, or_triton: bool = False
    ) -> torch.Tensor:
        """Attends from q [T, H, D], whose keys and values are in the cache: see `AttentionBackend.forward` for the rest.

        What a library raises is raised; with `or_triton` it is left out from then on, and the backend's own kernels attend.
        """
        ...


def head_shape(layer: AttentionWeights) -> HeadShape:
    return layer.num_heads, layer.num_kv_heads, layer.head_dim


def is_plain(layer: AttentionWeights, dtype: torch.dtype, kv: torch.Tensor) -> bool:
    """Returns whether libraries can serve the layer: no window, soft cap or sinks, and a cache in the dtype of queries."""
    return not layer.window and not layer.soft_cap and layer.sinks is None and kv.dtype == dtype


def prompt_chunks(meta: AttentionMetadata) -> list[PromptChunk]:
    """Returns the step's sequences; none where one of them is no long prompt, or where the host does not know their lengths."""
    return meta.once("prompt chunks", lambda: _chunks(meta))


def _chunks(meta: AttentionMetadata) -> list[PromptChunk]:
    if meta.exact_lens is None:
        return []
    starts, contexts = meta.exact_lens
    spans = list(zip(starts, starts[1:], contexts, strict=False))
    if min(end - start for start, end, _ in spans) < LEAST_TOKENS:
        return []
    chunks = []
    for row, (start, end, context) in enumerate(spans):
        tokens = meta.query_start[row : row + 2]
        tokens = tokens - start if start else tokens
        chunks.append(PromptChunk(start, end, context, meta.block_tables[row : row + 1], tokens, meta.context_lens[row : row + 1]))
    return chunks
