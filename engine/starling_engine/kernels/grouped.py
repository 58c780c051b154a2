"""All experts of a layer in three launches (vLLM's fused_moe): SiLU(gate) * up, down times the routing weight, each token's sum.

Pairs of token and expert are sorted into blocks of one expert each (`grouping.py`). A program multiplies one block by one tile of
its expert's matrix. The grid has the most blocks that there can be; programs without a block end at once. In the kernels, left and
right are the operands of a matmul, K is DEPTH and N is WIDTH. Matrices are plain, codes (`coded_weight.py`), or
of FP8, and rows are rounded to that (`scaled_weight.py`), in two launches more.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from starling_engine.kernels.coded_weight import CodedWeight, dot_codes
from starling_engine.kernels.gather_columns import gather_columns_of_slots
from starling_engine.kernels.grouping import Blocks, sort_into_blocks
from starling_engine.kernels.round_rows import round_rows
from starling_engine.kernels.scaled_weight import ScaledWeight, dot_scaled, of_whole_rows
from starling_engine.model_config.moe import ExpertGate
from starling_engine.native.ops import gate_arguments


@dataclass(frozen=True, slots=True)
class ProgramTile:
    """Tile of a program: columns are BLOCK_SIZE_N of vLLM's kernels, depth is BLOCK_SIZE_K. Warps and stages are Triton's."""

    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tiles for blocks of `rows` pairs (BLOCK_SIZE_M). A program of `gate_up` has columns of gate, and as many of up."""

    rows: int
    gate_up: ProgramTile
    down: ProgramTile


FEW_ROWS = ExpertTiles(16, ProgramTile(32, 128, 4, 4), ProgramTile(64, 128, 4, 4))
"""Bound by the weights' bytes: narrow tiles make enough programs to keep all of memory busy, even for one token.

8 experts of [2 * 768, 2048] make 192 programs, and each has loads of three stages in flight, 16 KiB each.
"""

SOME_ROWS = ExpertTiles(64, ProgramTile(64, 64, 4, 4), ProgramTile(128, 64, 4, 4))
"""Blocks of the fewest rows that Hopper's wgmma takes. Reading still takes about as long as multiplying."""

MANY_ROWS = ExpertTiles(128, ProgramTile(128, 64, 8, 3), ProgramTile(256, 64, 8, 3))
"""Bound by multiplying: two warpgroups hold 128 x 256 sums, and each weight that is read serves 128 rows."""

FP32_TILES = ExpertTiles(16, ProgramTile(32, 32, 4, 2), ProgramTile(64, 32, 4, 2))
"""Tiles for fp32, which tensor cores would round to TF32. Registers limit their size."""


CODED_FEW_ROWS = ExpertTiles(16, ProgramTile(32, 128, 4, 3), ProgramTile(64, 128, 4, 3))
CODED_MANY_ROWS = ExpertTiles(64, ProgramTile(64, 128, 8, 2), ProgramTile(64, 128, 4, 3))
"""Tiles for codes, whose depth holds whole groups. Nothing here was timed on a GPU."""

SCALED_FEW_ROWS = ExpertTiles(16, ProgramTile(32, 128, 4, 4), ProgramTile(64, 128, 4, 4))
SCALED_MANY_ROWS = ExpertTiles(64, ProgramTile(64, 128, 4, 3), ProgramTile(128, 128, 4, 3))
"""Tiles for FP8, whose depth is the group of a scale. Nothing here was timed on a GPU, and blocks fit on an Ada, too."""

Weight = torch.Tensor | CodedWeight | ScaledWeight
Biases = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
"""The biases of all slots, where experts have some: gates before ups [S, 2 I], and downs [S, H]."""
Orders = tuple[torch.Tensor | None, torch.Tensor | None]
"""The orders of columns of all slots [S, K'] int32, of gates and ups, and of downs, where these have orders of their own."""


def tiles_for(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype, *, coded: bool = False) -> ExpertTiles:
    """Chooses tiles by the rows that an expert gets on average.

    An expert with more rows than a block is read again, though from the cache. One with fewer rows multiplies padding.
    """
    if dtype == torch.float32:
        return FP32_TILES
    rows = tokens * top_k / num_experts
    if rows <= FEW_ROWS.rows / 2:
        return CODED_FEW_ROWS if coded else FEW_ROWS
    if coded:
        return CODED_MANY_ROWS
    return SOME_ROWS if rows <= SOME_ROWS.rows else MANY_ROWS


def scaled_tiles_for(tokens: int, top_k: int, num_experts: int) -> ExpertTiles:
    """Does as `tiles_for` for FP8."""
    return SCALED_FEW_ROWS if tokens * top_k / num_experts <= SCALED_FEW_ROWS.rows / 2 else SCALED_MANY_ROWS


def experts(
    x: torch.Tensor,
    expert_slots: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    tiles: ExpertTiles,
    biases: Biases = (None, None),
    gate: ExpertGate | None = None,
    orders: Orders = (None, None),
) -> torch.Tensor:
    """Does what `ExpertsMethod.apply` does, with gate_up [S, 2 I, H] and down [S, H, I], contiguous, in x's dtype or as codes.

    `biases` are in x's dtype; without a `gate` it is SiLU times up. With `orders`, matrices have as many columns as these.

    Sums of products are fp32. Values between the matrices, and each expert's result, are rounded to x's dtype. Each token's sum is
    fp32 again, in the order of its experts. A single token needs no sorting: each of its pairs is a block.
    """
    (tokens, top_k), hidden = expert_slots.shape, x.shape[1]
    expert_slots, topk_weights = expert_slots.contiguous(), topk_weights.contiguous()
    pairs, slots = tokens * top_k, _slots(down)
    blocks = _single_token_blocks(expert_slots) if tokens == 1 else sort_into_blocks(expert_slots, slots, tiles.rows)
    # Rows of pairs that this rank does not have are rounded with the others, so they have to be numbers.
    activated = (x.new_zeros if isinstance(down, ScaledWeight) else x.new_empty)(pairs, _rows_of(gate_up) // 2)
    parts = x.new_empty(pairs, hidden)
    out = x.new_empty(tokens, hidden)
    gate_ups, downs = biases
    alpha, limit, offset = gate_arguments(gate)
    form = {"ALPHA": alpha, "LIMIT": limit, "OFFSET": offset}
    rows, each = x, top_k
    if orders[0] is not None:
        rows, each = gather_columns_of_slots(x, orders[0], expert_slots.view(-1), top_k), 1
    stride = hidden if isinstance(gate_up, ScaledWeight) else rows.stride(0)  # rounded rows lie side by side
    _launch(
        _gate_up, rows, gate_up, activated, expert_slots, blocks, tiles.rows, tiles.gate_up, gate_ups, stride, TOP_K=each, **form
    )
    if orders[1] is not None:
        activated = gather_columns_of_slots(activated, orders[1], _slots_in_order(expert_slots, blocks), 1)
    _launch(_down, activated, down, parts, expert_slots, blocks, tiles.rows, tiles.down, downs, topk_weights)
    columns = min(1024, triton.next_power_of_2(hidden))
    _sum[(tokens, triton.cdiv(hidden, columns))](parts, expert_slots, out, slots, TOP_K=top_k, WIDTH=hidden, COLUMNS=columns)
    return out


def _slots(weight: Weight) -> int:
    return len(weight if isinstance(weight, torch.Tensor) else weight.codes)


def _rows_of(weight: Weight) -> int:
    return weight.shape[1] if isinstance(weight, torch.Tensor) else weight.n


def _slots_in_order(expert_slots: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Returns the slot of each row that gates and ups gave; any one where there is no such row."""
    slots = expert_slots.view(-1)
    # Numbers behind those of pairs that are here are undefined.
    return slots if len(expert_slots) == 1 else slots[blocks.order.clamp(0, len(slots) - 1)]


def _depth(weight: Weight) -> int:
    return weight.shape[2] if isinstance(weight, torch.Tensor) else weight.k


def _single_token_blocks(expert_slots: torch.Tensor) -> Blocks:
    """Returns blocks for a single token: block n is pair n, and no kernel reads these tensors."""
    return Blocks(expert_slots, expert_slots.expand(3, -1), expert_slots)


def _launch(
    kernel: triton.runtime.KernelInterface[None],
    rows: torch.Tensor,
    weight: Weight,
    out: torch.Tensor,
    expert_slots: torch.Tensor,
    blocks: Blocks,
    block_rows: int,
    tile: ProgramTile,
    *more: torch.Tensor | int | None,
    **constants: float,
) -> None:
    """Starts programs for all blocks of pairs and all columns of `out`; `more` and `constants` are the kernel's own arguments."""
    width = out.shape[1]
    codes = weight if isinstance(weight, torch.Tensor) else weight.codes
    sides: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    own: dict[str, int | str] = {}
    if isinstance(weight, CodedWeight):
        sides, own = (*weight.sides, None), weight.constants
    elif isinstance(weight, ScaledWeight):
        rounded = round_rows(rows, weight.rounding)
        rows, sides = rounded.codes, (weight.scales, None, None, rounded.scales)
        own = {"KIND": "scaled", "X_GROUPED": weight.rounding.group > 0, "BLOCK_ROWS": weight.block_rows}
    kernel[(blocks.most_blocks * triton.cdiv(width, tile.columns),)](
        rows,
        codes,
        *sides,
        out,
        expert_slots,
        blocks.order,
        blocks.bounds,
        blocks.used,
        blocks.most_blocks,
        _slots(weight),
        *more,
        DEPTH=_depth(weight),
        WIDTH=width,
        SINGLE=len(expert_slots) == 1,
        ROWS=block_rows,
        COLUMNS=tile.columns,
        TILE_DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **{**PLAIN, **own},
        **constants,
    )


PLAIN = {"KIND": "plain", "PAIRED": False, "UNIT": 0, "GROUP": 0, "ZERO": 0, "X_GROUPED": False, "BLOCK_ROWS": 0}
"""Constants of `dot_codes` and `dot_scaled` for matrices that have none."""


@triton.jit(do_not_specialize=["most_blocks", "num_slots"])
def _gate_up(
    x,
    weight,
    scales,
    minima,
    table,
    x_scales,
    out,
    expert_slots,
    order,
    bounds,
    used,
    most_blocks,
    num_slots,
    biases,
    x_stride,
    TOP_K: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SINGLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    PAIRED: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    X_GROUPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """x [T, DEPTH] by weight [S, 2 WIDTH, DEPTH] -> out [P, WIDTH], in the order of `order`."""
    block, column = _block_and_columns(WIDTH, COLUMNS)
    slot, row, live = _rows(block, expert_slots, bounds, used, most_blocks, num_slots, SINGLE, ROWS)
    if slot >= num_slots:
        return
    pair = row if SINGLE else tl.load(order + row, mask=live, other=0)
    k = tl.arange(0, TILE_DEPTH)
    rows_at = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride
    # Columns past the end read the last one: cheaper than a mask, and never stored.
    real = tl.minimum(column, WIDTH - 1)
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    if KIND == "plain":
        x_at = rows_at + k[None, :]
        gate_at = weight + slot.to(tl.int64) * (2 * WIDTH * DEPTH) + real[None, :] * DEPTH + k[:, None]
        for first in range(0, DEPTH, TILE_DEPTH):
            left = _load(x_at + first, live[:, None], k[None, :], first, DEPTH, TILE_DEPTH)
            gate = tl.dot(left, _load(gate_at + first, None, k[:, None], first, DEPTH, TILE_DEPTH), gate, input_precision="ieee")
            right = _load(gate_at + WIDTH * DEPTH + first, None, k[:, None], first, DEPTH, TILE_DEPTH)
            up = tl.dot(left, right, up, input_precision="ieee")
    elif KIND == "scaled":
        x_scales_at = x_scales + (pair // TOP_K).to(tl.int64)[:, None] * (DEPTH // 128 if X_GROUPED else 1)
        gate_row = slot * (2 * WIDTH) + real
        gate_at = weight + gate_row.to(tl.int64)[None, :] * DEPTH
        # Blocks of rows are those of a matrix, whose rows are then whole blocks.
        gate_scales = scales + (gate_row.to(tl.int64) // BLOCK_ROWS * (DEPTH // 128) if BLOCK_ROWS > 0 else gate_row)[None, :]
        up_scales = gate_scales + (WIDTH // BLOCK_ROWS * (DEPTH // 128) if BLOCK_ROWS > 0 else WIDTH)
        for first in range(0, DEPTH, TILE_DEPTH):
            gate = dot_scaled(
                gate, rows_at, x_scales_at, live[:, None], gate_at, gate_scales, first, DEPTH, TILE_DEPTH, X_GROUPED, BLOCK_ROWS
            )
            up = dot_scaled(
                up, rows_at, x_scales_at, live[:, None], gate_at + WIDTH * DEPTH, up_scales, first, DEPTH, TILE_DEPTH, X_GROUPED,
                BLOCK_ROWS,
            )  # fmt: skip
        gate = of_whole_rows(gate, x_scales_at, gate_scales, live[:, None], X_GROUPED, BLOCK_ROWS)
        up = of_whole_rows(up, x_scales_at, up_scales, live[:, None], X_GROUPED, BLOCK_ROWS)
    else:
        gate_row = slot * (2 * WIDTH) + real
        for first in range(0, DEPTH, TILE_DEPTH):
            gate = dot_codes(
                gate, rows_at, live[:, None], weight, scales, minima, table, gate_row, first, DEPTH, TILE_DEPTH, KIND, PAIRED,
                UNIT, GROUP, ZERO,
            )  # fmt: skip
            up = dot_codes(
                up, rows_at, live[:, None], weight, scales, minima, table, gate_row + WIDTH, first, DEPTH, TILE_DEPTH, KIND,
                PAIRED, UNIT, GROUP, ZERO,
            )  # fmt: skip
    if biases is not None:
        biases_at = biases + slot.to(tl.int64) * (2 * WIDTH) + real
        gate += tl.load(biases_at).to(tl.float32)[None, :]
        up += tl.load(biases_at + WIDTH).to(tl.float32)[None, :]
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        activated = (up + OFFSET) * gate * tl.sigmoid(ALPHA * gate)
    elif LIMIT < 0:  # GELU, whose (1 + tanh(y)) / 2 is the sigmoid of 2 y
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        activated = gate * tl.sigmoid(gate) * up
    out_at = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out_at, activated.to(out.dtype.element_ty), mask=live[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["most_blocks", "num_slots"])
def _down(
    activated,
    weight,
    scales,
    minima,
    table,
    x_scales,
    out,
    expert_slots,
    order,
    bounds,
    used,
    most_blocks,
    num_slots,
    biases,
    topk_weights,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SINGLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    PAIRED: tl.constexpr,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    X_GROUPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """activated [P, DEPTH], in the order of `order`, by weight [S, WIDTH, DEPTH], times topk_weights [P] -> out [P, WIDTH]."""
    block, column = _block_and_columns(WIDTH, COLUMNS)
    slot, row, live = _rows(block, expert_slots, bounds, used, most_blocks, num_slots, SINGLE, ROWS)
    if slot >= num_slots:
        return
    pair = row if SINGLE else tl.load(order + row, mask=live, other=0)
    k = tl.arange(0, TILE_DEPTH)
    rows_at = activated + row.to(tl.int64)[:, None] * DEPTH
    real = tl.minimum(column, WIDTH - 1)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    if KIND == "plain":
        left_at = rows_at + k[None, :]
        right_at = weight + slot.to(tl.int64) * (WIDTH * DEPTH) + real[None, :] * DEPTH + k[:, None]
        for first in range(0, DEPTH, TILE_DEPTH):
            left = _load(left_at + first, live[:, None], k[None, :], first, DEPTH, TILE_DEPTH)
            sums = tl.dot(left, _load(right_at + first, None, k[:, None], first, DEPTH, TILE_DEPTH), sums, input_precision="ieee")
    elif KIND == "scaled":
        x_scales_at = x_scales + row.to(tl.int64)[:, None] * (DEPTH // 128 if X_GROUPED else 1)
        right_row = slot * WIDTH + real
        right_at = weight + right_row.to(tl.int64)[None, :] * DEPTH
        scales_at = scales + (right_row.to(tl.int64) // BLOCK_ROWS * (DEPTH // 128) if BLOCK_ROWS > 0 else right_row)[None, :]
        for first in range(0, DEPTH, TILE_DEPTH):
            sums = dot_scaled(
                sums, rows_at, x_scales_at, live[:, None], right_at, scales_at, first, DEPTH, TILE_DEPTH, X_GROUPED, BLOCK_ROWS
            )
        sums = of_whole_rows(sums, x_scales_at, scales_at, live[:, None], X_GROUPED, BLOCK_ROWS)
    else:
        for first in range(0, DEPTH, TILE_DEPTH):
            sums = dot_codes(
                sums, rows_at, live[:, None], weight, scales, minima, table, slot * WIDTH + real, first, DEPTH, TILE_DEPTH, KIND,
                PAIRED, UNIT, GROUP, ZERO,
            )  # fmt: skip
    if biases is not None:
        sums += tl.load(biases + slot.to(tl.int64) * WIDTH + real).to(tl.float32)[None, :]
    sums *= tl.load(topk_weights + pair, mask=live, other=0.0)[:, None]
    out_at = out + pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=live[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _block_and_columns(WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Returns this program's block and columns.

    All tiles of a block are neighbours, and so are the blocks of a slot: their common rows and weights stay in the cache.
    """
    tiles: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    return program // tiles, program % tiles * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _rows(block, expert_slots, bounds, used, most_blocks, num_slots, SINGLE: tl.constexpr, ROWS: tl.constexpr):
    """Returns (slot, rows of the sorted pairs [ROWS], which of them are the block's); slot `num_slots` where there is no block."""
    if SINGLE:
        slot, first, end = tl.load(expert_slots + block).to(tl.int32), block, block + 1
    else:
        is_used = block < tl.load(used)
        slot = tl.load(bounds + block, mask=is_used, other=num_slots)
        first = tl.load(bounds + most_blocks + block, mask=is_used, other=0)
        end = tl.load(bounds + 2 * most_blocks + block, mask=is_used, other=0)
    row = first + tl.arange(0, ROWS)
    return slot, row, row < end


@triton.jit
def _load(at, mask, k, first, DEPTH: tl.constexpr, TILE_DEPTH: tl.constexpr):
    """Loads, with zeros past the depth; without a mask where the depth is a multiple of TILE_DEPTH and none is given."""
    if DEPTH % TILE_DEPTH != 0:
        inside = k < DEPTH - first
        if mask is not None:
            inside = inside & mask
        return tl.load(at, mask=inside, other=0.0)
    elif mask is not None:  # noqa: RET505 - what follows a return is compiled all the same
        return tl.load(at, mask=mask, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _sum(parts, expert_slots, out, num_slots, TOP_K: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums parts [T * TOP_K, WIDTH] -> out [T, WIDTH]. Parts of experts that the rank lacks were not written; it skips them."""
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = (token * TOP_K + i).to(tl.int64)
        here = tl.load(expert_slots + pair) < num_slots
        total += tl.load(parts + pair * WIDTH + column, mask=here & (column < WIDTH), other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)
