"""The memory plan: what a worker's memory goes to, and how many KV blocks that leaves. Pure: imports no torch."""

from dataclasses import dataclass

from starling_engine.errors import ConfigError
from starling_engine.kv.spec import KVGroup
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.moe import MoeConfig
from starling_engine.sizes import amount

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of one worker's host memory that its KV tiers take.

    cpu      the CPU tier
    passage  where there is none, what files and a store pass through
    store    what it gives to a store to keep, and its buffer for values on their way
    outside  the argument that `passage` is for
    """

    cpu: int = 0
    passage: int = 0
    store: int = 0
    outside: str = "kv_fs_path"

    @property
    def total(self) -> int:
        return self.cpu + self.passage + self.store

    @property
    def rows(self) -> list[tuple[str, int]]:
        rows = [("CPU tier", self.cpu), ("passage", self.passage), ("store", self.store)]
        return [(name, size) for name, size in rows if size]

    def check(self, most: int) -> None:
        """Raises ConfigError naming what takes the most, where all do not fit into `most` bytes."""
        if self.total <= most:
            return
        size = max(self.cpu, self.passage, self.store)
        left = max(0, most - (self.total - size))
        wanted = f"{amount(size)} asked for, {amount(left)} are left"
        if size == self.cpu:
            raise ConfigError(f"{wanted}; set it to at most {left}", "kv_cpu_bytes")
        if size == self.store:
            raise ConfigError(f"{wanted}; make its segment and buffer smaller, {left} bytes together at most", "kv_store")
        raise ConfigError(f"{wanted} to pass through; set kv_cpu_bytes to at most {left}, which takes its place", self.outside)


NO_HOST = HostMemory()


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Bytes of one worker. `limit` is what it may use in all, `total` what the device (on CPU: the cgroup) has.

    Of the weights, `moving` is room for experts that are on their way to this rank while others still compute here. `host` is the
    KV tiers', and `tables` are of the requests in the batch: tokens and blocks, written as requests come and kept. Both are of
    `limit` too where the device's memory is the host's (`unified`).
    """

    total: int
    limit: int
    weights: int
    activations: int
    kv: int
    block_bytes: int
    num_blocks: int
    block_size: int
    moving: int = 0
    host: HostMemory = NO_HOST
    tables: int = 0
    unified: bool = True

    @property
    def left(self) -> int:
        return self.limit - self.weights - self.activations - self.kv - (self.host.total + self.tables if self.unified else 0)

    def __str__(self) -> str:
        rows = [
            ("weights", self.weights),
            ("KV cache", self.kv),
            ("activations", self.activations),
            ("left", self.left),
            ("limit", self.limit),
        ]
        at = 3 if self.unified else len(rows)  # among what the limit is for, or besides it
        rows[at:at] = [("tables", self.tables), *self.host.rows]
        lines = [f"{name:<12}{amount(size):>12}" for name, size in rows]
        if self.moving:
            lines[0] += f"   {amount(self.moving)} of them for experts on their way"
        lines[1] += f"   {self.num_blocks} blocks of {self.block_size} tokens, {amount(self.block_bytes)} each"
        return "\n".join(lines)


def block_bytes(groups: list[KVGroup]) -> int:
    """Bytes of one page over all storage tensors; the same in every group."""
    return max(len(group.layers) for group in groups) * groups[0].spec.page_bytes


LOGPROB_ROWS = 64
"""Prompt positions whose full-vocabulary log probabilities are held at once."""


def activation_bytes(model: ModelConfig, dtype_bytes: int, max_tokens: int, max_rows: int, max_model_len: int) -> int:
    """Working memory of the largest step, and the table of rotations.

    A step needs its widest intermediate tensors, and fp32 logits (and a copy) of every row that samples or is scored.
    """
    widths = 4 * model.hidden_size + max(_attention_width(model), _mlp_width(model, dtype_bytes))
    scratch = model.mla.scratch_elements(max_tokens, max_model_len) if model.mla else 0
    rotations = max_model_len * model.rotary_dim * 4
    logits = 2 * max(max_rows, LOGPROB_ROWS) * model.vocab_size * 4
    return (max_tokens * widths + scratch) * dtype_bytes + logits + rotations


def _attention_width(model: ModelConfig) -> int:
    """Elements of one token between the norm before attention and the projection after it.

    With latents that is queries while they are rotated in fp32, or queries, a copy with the rotated part, and outputs.
    """
    if model.mla:
        mla = model.mla
        head = mla.key_dim + max(8 * mla.rope_dim, mla.rope_dim + mla.key_dim + mla.value_dim)
        return mla.num_heads * head + 2 * (mla.q_rank + mla.latent_dim)
    return 2 * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim


def _mlp_width(model: ModelConfig, dtype_bytes: int) -> int:
    """Elements of one token inside the widest MLP."""
    moe = model.moe
    if moe is None:
        return 3 * model.intermediate_size
    plain = 0 if len(moe.layers) == model.num_layers else 3 * model.intermediate_size
    shared = model.hidden_size + 3 * moe.shared_size
    return max(plain, shared, _experts_width(moe, model.hidden_size, dtype_bytes))


def _experts_width(moe: MoeConfig, hidden_size: int, dtype_bytes: int) -> int:
    """Elements of one token among its experts.

    What lies between their matrices is held of all of them at once, or gate, up and product of one that all tokens may go to; then
    there are the token's row, gathered and multiplied, and in fp32 what it gives and the sum. Its choice has the affinities of all
    experts, and indices of 8 bytes.
    """
    routing = moe.routing
    choice = (4 * routing.num_experts * 4 + 6 * routing.top_k * 8) // dtype_bytes
    sums = 2 * hidden_size + 2 * hidden_size * 4 // dtype_bytes
    return choice + sums + max(routing.top_k, 3) * moe.intermediate_size


def plan_memory(
    *,
    total: int,
    available: int,
    fraction: float,
    ranks: int = 1,
    weights: int,
    activations: int,
    kv_bytes: int | None,
    bytes_per_block: int,
    block_size: int,
    useful_blocks: int,
    needed_blocks: int,
    host: HostMemory = NO_HOST,
    tables: int = 0,
    unified: bool = True,
) -> Ledger:
    """Gives the KV cache `kv_bytes`, or what `fraction` of `total` leaves, but no more than `useful_blocks`.

    All are of one rank but `total`, `fraction` and `available`, which `ranks` ranks share. `available` is what is free now, with
    the weights loaded: others may have taken memory of the machine. The KV tiers get their `host` bytes first, and requests their
    `tables`, which are of the same memory where that is `unified`.

    Raises ConfigError, with a value that works, when fewer than `needed_blocks` (the longest request's, and the null block) fit.
    """
    limit = min(int(total * (1 if kv_bytes is not None else fraction)) // ranks, available // ranks + weights)
    besides = tables if unified else 0
    room = limit - weights - activations - besides
    if unified:
        most = room - (needed_blocks * bytes_per_block if kv_bytes is None else kv_bytes)
        if most >= 0:  # else something else is to blame
            host.check(most)
        room -= host.total
    wanted = useful_blocks * bytes_per_block if kv_bytes is None else kv_bytes
    num_blocks = min(wanted, room if kv_bytes is None else wanted) // bytes_per_block
    needed = needed_blocks * bytes_per_block
    if num_blocks < needed_blocks:
        held = f"weights {amount(weights)}, activations {amount(activations)} and tables {amount(besides)} of {amount(total)}"
        if kv_bytes is not None:
            raise ConfigError(
                f"{kv_bytes} bytes do not hold one request of max_model_len, which needs {needed}; "
                f"set it to at least {needed}, or lower max_model_len",
                "kv_cache_memory_bytes",
            )
        least = ranks * (weights + activations + besides + needed + (host.total if unified else 0)) / total
        hint = f"set it to at least {least:.2f}, or lower max_model_len" if least <= 1 else "lower max_model_len"
        raise ConfigError(f"{fraction} leaves too little for the KV cache besides {held}; {hint}", "gpu_memory_utilization")
    if kv_bytes is not None and kv_bytes > room:
        left = f"{amount(max(room, 0))} are left of {amount(total)}; set it to at most {max(room, 0)}"
        raise ConfigError(f"{amount(kv_bytes)} asked for, {left}", "kv_cache_memory_bytes")
    return Ledger(
        total=total,
        limit=limit,
        weights=weights,
        activations=activations,
        kv=num_blocks * bytes_per_block,
        block_bytes=bytes_per_block,
        num_blocks=num_blocks,
        block_size=block_size,
        host=host,
        tables=tables,
        unified=unified,
    )
