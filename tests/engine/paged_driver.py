"""Runs a decoder without an engine: with block tables of its own, over slabs full of NaN, so that a stray read shows."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.kv_cache import ParallelCache
from starling_engine.kv.layer_specs import cache_readers, kv_specs, run_specs, state_specs
from starling_engine.kv.spec import KVGroup, KVSpec, RunSpec, StateGroup, StateSpec, group_layers, slab_bytes
from starling_engine.models.decoder import Decoder, ForwardContext
from starling_engine.topology.shard import ALL, Shard
from starling_engine.worker.host.kv_pages import within_attention_chunk
from starling_engine.worker.memory_plan import allocate

MAX_BLOCKS = 32


class PagedDriver:
    """Holds up to `sequences` sequences of at most MAX_BLOCKS blocks in shuffled pages. Page 0 belongs to nobody.

    The model may be a rank of `tensor`, and the first of several stages, of which the others are `later`.
    """

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        block_size: int,
        sequences: int = 1,
        tensor: Shard = ALL,
        later: Sequence[Decoder] = (),
    ) -> None:
        config = model.config
        kv_dtype = str(dtype).removeprefix("torch.")
        self._groups = group_layers(
            kv_specs(config, block_size, kv_dtype, tensor), run_specs(config, block_size, kv_dtype), cache_readers(config)
        )
        state = _state_group(self._groups, state_specs(config, tensor), block_size)
        self._group_of = dict.fromkeys(state.layers if state is not None else (), len(self._groups))
        groups = [(g, group) for g, group in enumerate(self._groups) if not isinstance(group.spec, RunSpec)]
        self._group_of |= {layer: g for g, group in groups for layer in (*group.layers, *dict(group.readers))}
        runs = [(g, group) for g, group in enumerate(self._groups) if isinstance(group.spec, RunSpec)]
        self._runs_of = {layer: g for g, group in runs for layer in group.layers}
        self._stages = [model, *later]
        self._block_size = block_size
        width = state.num_blocks if state is not None else 0
        self._has_state = state is not None
        pages = sequences * (len(self._groups) * MAX_BLOCKS + width) + 1
        cache = allocate(self._groups, pages, dtype, torch.device("cpu"), state, range(config.num_layers))
        cache.storage.fill_(255)  # NaN in every type, and so are scales of such bits
        self._kv = cache.layers
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(2)) + 1
        states, blocks = order.split([sequences * width, pages - 1 - sequences * width])
        self._state_tables = states.view(sequences, width).to(torch.int32)
        self._tables = blocks.view(len(self._groups), sequences, MAX_BLOCKS).to(torch.int32)
        self._any_table = torch.zeros(sequences, MAX_BLOCKS, dtype=torch.int32)
        """For slots of a state, of which only the sign matters."""
        self.lengths = [0] * sequences
        self.ticks = 0

    def run(self, rows: Sequence[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """One step: each row appends tokens to a sequence. Returns each row's logits [tokens, vocab]."""
        return list(self._step(rows, None).split([len(tokens) for _, tokens in rows]))

    def run_to_last(self, rows: Sequence[tuple[int, list[int]]]) -> torch.Tensor:
        """The same step; logits [len(rows), vocab] of each row's last token, no others computed."""
        lengths = torch.tensor([len(tokens) for _, tokens in rows])
        return self._step(rows, lengths.cumsum(0) - 1)

    def _step(self, rows: Sequence[tuple[int, list[int]]], wanted: torch.Tensor | None) -> torch.Tensor:
        each = zip(self._tables, self._groups, strict=True)
        metas = [within_attention_chunk(self._metadata(rows, tables, group.spec), group.spec) for tables, group in each]
        if self._has_state:
            states = torch.stack([self._state_tables[sequence] for sequence, _ in rows])
            metas.append(replace(self._metadata(rows, self._any_table), block_tables=states))
        ids = torch.tensor([token for _, tokens in rows for token in tokens])
        hidden: torch.Tensor | None = None
        for stage in self._stages:
            kv, attention = [self._kv[at] for at in stage.layers], [metas[self._group_of.get(at, 0)] for at in stage.layers]
            state = metas[-1] if self._has_state else None
            runs = {layer: metas[group].block_tables for layer, group in self._runs_of.items()}
            hidden = stage.forward(ids, ForwardContext(kv, attention, wanted, self._tick, state=state, runs=runs), hidden)
        assert hidden is not None
        logits = self._stages[-1].logits(hidden)
        for sequence, tokens in rows:
            self.lengths[sequence] += len(tokens)
        return logits

    def clear_state(self, sequence: int, part: int) -> None:
        """Forgets this part of a sequence's state, in all layers."""
        table = self._state_tables[sequence : sequence + 1]
        for cache in self._kv:
            state = cache.state if isinstance(cache, ParallelCache) else cache
            if isinstance(state, tuple):
                state[part].write(table, torch.zeros_like(state[part].read(table)))

    def greedy(self, first: int, steps: int, sequence: int = 0) -> list[int]:
        """`first` and the tokens that follow it, one a step; `steps` in all."""
        tokens = [first]
        while len(tokens) < steps:
            tokens.append(int(self.run([(sequence, tokens[-1:])])[0][-1].argmax()))
        return tokens

    def _metadata(
        self, rows: Sequence[tuple[int, list[int]]], blocks: torch.Tensor, spec: KVSpec | None = None
    ) -> AttentionMetadata:
        """`blocks` [sequences, MAX_BLOCKS] int32."""
        size = self._block_size
        starts = [self.lengths[sequence] for sequence, _ in rows]
        counts = [len(tokens) for _, tokens in rows]
        tables = torch.stack([blocks[sequence] for sequence, _ in rows])
        positions = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        slots = [table[at // size].long() * size + at % size for table, at in zip(tables, positions, strict=True)]
        for table, start in zip(tables, starts, strict=True):
            # Blocks behind a window or a chunk become page 0, whose NaN must not be read.
            table[: 0 if spec is None else spec.first_needed_block(start)] = 0
        return AttentionMetadata(
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            query_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            context_lens=torch.tensor([a + b for a, b in zip(starts, counts, strict=True)], dtype=torch.int32),
            block_tables=tables,
            max_query_len=max(counts),
        )

    def _tick(self) -> None:
        self.ticks += 1


def _state_group(groups: list[KVGroup], specs: dict[int, StateSpec], block_size: int) -> StateGroup | None:
    if not specs:
        return None
    spec = next(iter(specs.values()))
    slab = slab_bytes(groups, spec, len(specs))
    return StateGroup(spec, tuple(specs), spec.columns(len(specs), slab)[-1], block_size)
