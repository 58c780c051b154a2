"""Runs a decoder without an engine: with block tables of its own, over a cache full of NaN, so that a stray read shows."""

from collections.abc import Sequence

import torch
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kv.layer_specs import kv_specs
from starling_engine.models.decoder import Decoder, ForwardContext
from starling_engine.topology.shard import ALL, Shard

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
        pages = sequences * MAX_BLOCKS + 1
        specs = kv_specs(config, block_size, str(dtype).removeprefix("torch."), tensor)
        self._config = config
        self._stages = [model, *later]
        self._block_size = block_size
        nothing = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max  # scales of such bits are NaN
        self._kv = [torch.full((pages, *spec.layer_block_shape), nothing, dtype=dtype) for spec in specs]
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(2)) + 1
        self._tables = order.view(sequences, MAX_BLOCKS).to(torch.int32)
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
        windows = self._config.windows
        metas = {window: self._metadata(rows, window) for window in set(windows)}
        ids = torch.tensor([token for _, tokens in rows for token in tokens])
        hidden: torch.Tensor | None = None
        for stage in self._stages:
            kv, attention = [self._kv[at] for at in stage.layers], [metas[windows[at]] for at in stage.layers]
            hidden = stage.forward(ids, ForwardContext(kv, attention, wanted, self._tick), hidden)
        assert hidden is not None
        logits = self._stages[-1].logits(hidden)
        for sequence, tokens in rows:
            self.lengths[sequence] += len(tokens)
        return logits

    def greedy(self, first: int, steps: int, sequence: int = 0) -> list[int]:
        """`first` and the tokens that follow it, one a step; `steps` in all."""
        tokens = [first]
        while len(tokens) < steps:
            tokens.append(int(self.run([(sequence, tokens[-1:])])[0][-1].argmax()))
        return tokens

    def _metadata(self, rows: Sequence[tuple[int, list[int]]], window: int) -> AttentionMetadata:
        size = self._block_size
        starts = [self.lengths[sequence] for sequence, _ in rows]
        counts = [len(tokens) for _, tokens in rows]
        tables = torch.stack([self._tables[sequence] for sequence, _ in rows]).clone()
        positions = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        slots = [table[at // size].long() * size + at % size for table, at in zip(tables, positions, strict=True)]
        for table, start in zip(tables, starts, strict=True):
            # Blocks behind the window become page 0, whose NaN must not be read.
            table[: max(0, start - window + 1) // size if window else 0] = 0
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
