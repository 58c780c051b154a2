"""Attention of DeepSeek-V4: one row of a token for all heads, a window of these, and compressed runs of earlier tokens."""

from functools import partial

import torch
from torch.nn import functional as F

from starling_engine.attention.compressed import (
    CompressedQuery,
    CompressedWeights,
    Compressor,
    attend,
    store_entries,
    turn_last,
)
from starling_engine.attention.mla_torch import store_rows
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.kv_cache import RunCache
from starling_engine.kernels.matmul import bmm
from starling_engine.layers.linear import Linear, stacked
from starling_engine.layers.norm import Norm
from starling_engine.model_config.compressed import CompressedShape
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mla_shape import spans
from starling_engine.models.build_context import BuildContext
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import WeightSlot, also_below, copy_slot, part_copy_slot


class WindowAndRuns:
    """One matrix compresses queries and makes the common row, and others what entries are made of.

    Ranks have some heads each, in whole groups. Rows, entries and the indexer are whole on every one.
    """

    def __init__(self, build: BuildContext, prefix: str, layer: LayerConfig, shape: CompressedShape) -> None:
        config, names, shard = build.config, build.names.compressed, build.tensor.shard
        heads, self._groups = shard.of(shape.num_heads), shard.of(shape.groups)
        self._prefix, self._names, self._shape, self._runs = prefix, names, shape, layer.runs

        def linear(modules: list[str], sizes: list[int | Share], columns: int | Share, *, exact: bool = False) -> Linear:
            return build.linear(stacked([f"{prefix}.{name}" for name in modules], sizes, columns, exact=exact))

        self._down = linear([names.q_a, names.kv], [shape.q_rank, shape.head_dim], config.hidden_size)
        self._q_norm = build.norm(f"{prefix}.{names.q_a_norm}", shape.q_rank)
        self._kv_norm = build.norm(f"{prefix}.{names.kv_norm}", shape.head_dim)
        self._q = linear([names.q_b], [heads.times(shape.head_dim)], shape.q_rank)
        columns = shape.num_heads * shape.head_dim // shape.groups
        self._o_a = torch.empty(self._groups.size, shape.group_rank, columns, dtype=build.dtype, device=build.device)
        self._o_b = linear([names.o_b], [config.hidden_size], self._groups.times(shape.group_rank))
        self._inputs: list[Linear] = []
        self._norms: list[Norm] = []
        compressors: list[Compressor] = []
        modules = (names.compressor, names.index_compressor)
        for module, size, width in zip(modules, shape.input_sizes(layer.runs), shape.compressed_sizes(layer.runs), strict=False):
            assert layer.runs is not None, "there is nothing to compress"
            parts = [f"{module}.{names.values}", f"{module}.{names.weights}"]
            self._inputs.append(linear(parts, [size // 2] * 2, config.hidden_size, exact=True))
            bias = torch.empty(layer.runs.rate, size // 2, dtype=torch.float32, device=build.device)
            self._norms.append(build.norm(f"{prefix}.{module}.{names.norm}", width))
            compressors.append(Compressor(bias, partial(_normed, self._norms[-1])))
        self._index: tuple[Linear, Linear] | None = None
        if layer.runs is not None and layer.runs.indexed:
            index = shape.index
            self._index = (
                linear([names.index_q], [index.num_heads * index.dim], shape.q_rank),
                linear([names.index_weights], [index.num_heads], config.hidden_size, exact=True),
            )
        self._heads, self._eps = heads, config.rms_eps
        self.weights = CompressedWeights(
            shape=shape,
            runs=layer.runs,
            window=layer.window,
            num_heads=heads.size,
            sinks=torch.empty(heads.size, dtype=torch.float32, device=build.device),
            cos_sin=build.rotations[layer.rope],
            compressors=compressors,
        )

    def forward(
        self,
        x: torch.Tensor,
        kv: torch.Tensor | RunCache,
        meta: AttentionMetadata,
        tables: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden_size] -> [R, hidden_size] of the tokens `rows`, or of all; writes the step's rows and entries into `kv`.

        `tables` is the block table of the entries, where the layer has such.
        """
        shape, turns = self._shape, self.weights.cos_sin[meta.positions]
        c_q, row = torch.split(self._down.forward(x), [shape.q_rank, shape.head_dim], dim=-1)
        q_in = _normed(self._q_norm, c_q.contiguous())
        q = self._q.forward(q_in).view(len(x), -1, shape.head_dim)
        query = CompressedQuery(turn_last(F.rms_norm(q, q.shape[-1:], eps=self._eps), turns))
        if self._index is not None:
            index_q = self._index[0].forward(q_in).view(len(x), -1, shape.index.dim)
            query.index_q, query.index_weights = turn_last(index_q, turns), self._index[1].forward(x, torch.float32)
        key = _normed(self._kv_norm, row.contiguous())
        parts = [turn_last(key.unsqueeze(1), turns).squeeze(1), *(each.forward(x) for each in self._inputs)]
        store_rows(kv.window if isinstance(kv, RunCache) else kv, torch.cat(parts, dim=-1), meta.slot_mapping)
        out = torch.zeros_like(q)
        for span in spans(*meta.lens()):
            if isinstance(kv, RunCache):
                assert tables is not None, "entries have a block table"
                store_entries(self.weights, kv, tables, meta, span)
            attend(query, self.weights, kv, tables, meta, span, out)
        out = turn_last(out, turns, back=True)
        return self._project(out if rows is None else out[rows])

    def _project(self, out: torch.Tensor) -> torch.Tensor:
        """Multiplies each group of heads by its own matrix, and then all of them by one: out [R, heads, head_dim]."""
        grouped = out.reshape(len(out), self._groups.size, self._o_a.shape[2]).transpose(0, 1)
        return self._o_b.forward(bmm(grouped, self._o_a.transpose(1, 2)).transpose(0, 1).flatten(1))

    def weight_slots(self) -> dict[str, WeightSlot]:
        names, prefix, shape = self._names, self._prefix, self._shape
        parts = (self._down, self._q_norm, self._q, *self._inputs, *self._norms, *(self._index or ()), self._o_b)
        slots = {name: slot for part in parts for name, slot in part.weight_slots().items()}
        kv_norm, other = f"{prefix}.{names.kv_norm}", f"{prefix}.{names.other_kv_norm}"
        slots |= also_below(self._kv_norm.weight_slots(), kv_norm, other)
        for module, part in zip((names.compressor, names.index_compressor), self.weights.compressors, strict=False):
            slots[f"{prefix}.{module}.{names.bias}"] = copy_slot(part.bias)
        columns = Share.all(self._o_a.shape[2])
        slots[f"{prefix}.{names.o_a}.weight"] = part_copy_slot(
            [self._groups.times(shape.group_rank), columns], self._o_a.flatten(0, 1)
        )
        slots[f"{prefix}.{names.sinks}"] = part_copy_slot([self._heads], self.weights.sinks)
        return slots


def _normed(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    return norm.forward(x, None)[0]
