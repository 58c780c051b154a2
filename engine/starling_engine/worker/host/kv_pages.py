"""The pages of the KV cache, for a runner: copies of blocks, and the context of a forward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from starling_engine.kernels.attention_metadata import AttentionMetadata, HostLens
from starling_engine.kernels.kv_cache import KVCache
from starling_engine.kv.spec import ChunkedLocalSpec, KVGroup, KVSpec, RunSpec, StateGroup
from starling_engine.models.decoder import ForwardContext
from starling_engine.step import BlockCopy, StepPlan

WORD = torch.int64


def independent(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Splits copies, in their order, into runs of which none reads or overwrites what another one of its run has to do with."""
    run: list[BlockCopy] = []
    read, written = set[int](), set[int]()
    for copy in copies:
        if copy.source in written or copy.target in read or copy.target in written:
            yield run
            run, read, written = [], set(), set()
        run.append(copy)
        read.add(copy.source)
        written.add(copy.target)
    if run:
        yield run


def within_attention_chunk(meta: AttentionMetadata, spec: KVSpec) -> AttentionMetadata:
    """Returns the metadata of a group whose queries see one attention chunk: to kernels it is the whole sequence.

    All tokens of a row are in one, that of the last token. That of any other group stays as it is.
    """
    if not isinstance(spec, ChunkedLocalSpec):
        return meta
    chunk, blocks = spec.attention_chunk, spec.attention_chunk // spec.block_size
    starts = (meta.context_lens - 1).clamp(min=0) // chunk * chunk
    columns = starts[:, None] // spec.block_size + torch.arange(blocks, dtype=torch.int32, device=starts.device)
    tables = meta.block_tables.gather(1, columns.clamp(max=meta.block_tables.shape[1] - 1).long())
    host, exact = (_lens_within(lens, chunk) for lens in (meta.host_lens, meta.exact_lens))
    lengths = meta.context_lens - starts
    return replace(meta, context_lens=lengths, block_tables=tables, shared_blocks=0, host_lens=host, exact_lens=exact)


def _lens_within(lens: HostLens | None, chunk: int) -> HostLens | None:
    return None if lens is None else (lens[0], [length - max(0, length - 1) // chunk * chunk for length in lens[1]])


class KVPages:
    """Pages of the rank's `layers`; default: all that cache something. `tick` is called as each layer ends."""

    def __init__(
        self,
        kv: KVCache,
        groups: Sequence[KVGroup],
        tick: Callable[[], None],
        state: StateGroup | None = None,
        layers: Iterable[int] | None = None,
    ) -> None:
        self.device = kv.storage.device
        self.groups = list(groups)
        self._kv = kv
        self.tick = tick
        self._group_of = dict.fromkeys(state.layers if state is not None else (), len(groups))
        self._runs_of = {layer: g for g, group in enumerate(groups) if isinstance(group.spec, RunSpec) for layer in group.layers}
        """The second group of layers that compress runs."""
        rows = [(g, group) for g, group in enumerate(groups) if not isinstance(group.spec, RunSpec)]
        self._group_of |= {layer: g for g, group in rows for layer in (*group.layers, *dict(group.readers))}
        self.has_state = state is not None
        whole = kv.storage.shape[1]
        self._block_bytes = [*(group.block_bytes for group in groups), whole]
        """Bytes that a group has in a slab; a state has all."""
        self._layers = tuple(sorted(self._group_of) if layers is None else layers)

    @property
    def num_layers(self) -> int:
        """The rank's layers, those with recurrent state included."""
        return len(self._group_of)

    def copy(self, plan: StepPlan) -> None:
        """Copies the plan's blocks, in all layers of their groups: those that do not wait for others at once."""
        if not plan.copies:
            return
        # A GPU's kernel for many tensors moves as many bytes at a time as four elements have.
        wide = all(size % WORD.itemsize == 0 for size in self._block_bytes)
        slabs, element = (self._kv.storage.view(WORD), WORD.itemsize) if wide else (self._kv.storage, 1)
        for copies in independent(plan.copies):
            sizes = [self._block_bytes[copy.group] // element for copy in copies]
            targets, sources = (
                [slabs[block, :size] for block, size in zip(blocks, sizes, strict=True)]
                for blocks in ([copy.target for copy in copies], [copy.source for copy in copies])
            )
            torch._foreach_copy_(targets, sources)

    def context(self, metadata: Sequence[AttentionMetadata], rows: torch.Tensor | None) -> ForwardContext:
        """Returns the context of a forward pass. `metadata` of each group; `rows` as in ForwardContext."""
        runs = {layer: metadata[group].block_tables for layer, group in self._runs_of.items()}
        specs = [group.spec for group in self.groups]
        seen = [within_attention_chunk(meta, spec) for meta, spec in zip(metadata, specs, strict=False)] + [*metadata[len(specs) :]]
        own = [seen[self._group_of.get(layer, 0)] for layer in self._layers]
        return ForwardContext(self._kv.layers, own, rows, self.tick, state=metadata[-1] if self.has_state else None, runs=runs)
