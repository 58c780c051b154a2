"""The memory plan: a ledger of a worker's memory, and the KV blocks that it has room for. Pure: imports no torch."""

from dataclasses import dataclass

from starling_engine.byte_sizes import format_bytes
from starling_engine.errors import ConfigError
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.layer import KVHeads
from starling_engine.model_config.moe import MoeConfig


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of one worker's host memory that its KV tiers take.

    cpu         the CPU tier
    staging     buffer for files and a store, where there is no CPU tier
    store       segment that a store may fill, and its buffer for values in flight
    staged_for  the argument that `staging` is for
    """

    cpu: int = 0
    staging: int = 0
    store: int = 0
    staged_for: str = "kv_fs_path"

    @property
    def total(self) -> int:
        return self.cpu + self.staging + self.store

    @property
    def rows(self) -> list[tuple[str, int]]:
        rows = [("CPU tier", self.cpu), ("staging", self.staging), ("store", self.store)]
        return [(name, size) for name, size in rows if size]

    def check(self, most: int) -> None:
        """Raises ConfigError naming the largest, where all do not fit into `most` bytes."""
        if self.total <= most:
            return
        size = max(self.cpu, self.staging, self.store)
        left = max(0, most - (self.total - size))
        wanted = f"{format_bytes(size)} asked for, {format_bytes(left)} are left"
        if size == self.cpu:
            raise ConfigError(f"{wanted}; set it to at most {left}", "kv_cpu_bytes")
        if size == self.store:
            raise ConfigError(f"{wanted}; make its segment and buffer smaller, {left} bytes together at most", "kv_store")
        raise ConfigError(f"{wanted} to pass through; set kv_cpu_bytes to at most {left}, which takes its place", self.staged_for)


NO_HOST = HostMemory()


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Bytes of one worker.

    total       the device's memory (on CPU: the cgroup's)
    limit       what the worker may use in all
    moving      of the weights: room for experts that are on their way to this rank, while others still compute here
    recordings  what recorded steps take on a GPU beyond their tensors: executables, and workspaces of libraries
    state_blocks  blocks of a sequence's state, where nothing else is cached: blocks then hold no tokens
    host        the KV tiers' memory
    tables      tokens and blocks of the requests in the batch

    `host` and `tables` are of `limit`, too, where the device's memory is the host's (`unified`).
    """

    total: int
    limit: int
    weights: int
    activations: int
    kv: int
    slab_bytes: int
    num_blocks: int
    block_size: int
    moving: int = 0
    recordings: int = 0
    state_blocks: int = 0
    host: HostMemory = NO_HOST
    tables: int = 0
    unified: bool = True

    @property
    def room(self) -> str:
        """Says for what there are blocks; one of them is the null block."""
        if self.state_blocks:
            return f"room for {(self.num_blocks - 1) // self.state_blocks} states of {self.state_blocks} blocks"
        return f"{self.num_blocks} blocks of {self.block_size} tokens"

    @property
    def left(self) -> int:
        held = self.weights + self.activations + self.recordings + self.kv
        return self.limit - held - (self.host.total + self.tables if self.unified else 0)

    def __str__(self) -> str:
        cache = "states" if self.state_blocks else "KV cache"
        held = [("weights", self.weights), (cache, self.kv), ("activations", self.activations)]
        if self.recordings:
            held.append(("recordings", self.recordings))
        beside = [("tables", self.tables), *self.host.rows]
        if not self.slab_bytes:  # the model caches nothing
            del held[1]
        ends = [("left", self.left), ("limit", self.limit)]
        rows = [*held, *beside, *ends] if self.unified else [*held, *ends, *beside]
        lines = [f"{name:<12}{format_bytes(size):>12}" for name, size in rows]
        if self.moving:
            lines[0] += f"   {format_bytes(self.moving)} of them for experts on their way"
        if self.slab_bytes:
            lines[1] += f"   {self.room}, {format_bytes(self.slab_bytes)} each"
        return "\n".join(lines)


LOGPROB_ROWS = 64
"""Prompt positions whose full-vocabulary log probabilities are held at once."""


CACHE_LINE = 64
"""Bytes; each tensor of a recording begins at such a line."""

RECORDED_TOKENS = 16
"""Tokens of the largest step that a host records. In larger ones Python takes a small part of the time."""


def recorded_bytes(model: ModelConfig, dtype_bytes: int) -> int:
    """Returns the memory of recorded steps: they share that of the largest one, which keeps what each of its layers computes.

    That is norms, the output of each matrix, rotated queries, what they attend to, and a gate that is no part of its matrix. Norms
    are those behind both parts, too, and of experts beside an MLP. Where attention stands beside a mixer, inputs of both are
    multiplied, and so is what the mixer's matrix gives; there is one output more.

    Inputs of each layer are those of ids and of embeddings, these normed, and gated ones; behind them are a matrix and a norm. Of
    experts it is logits and the choice in 8 bytes, pairs that are sorted, their products, and where each slot begins. Where some
    layers have a recurrent state, each counts as if it attended. At the ends are embeddings, logits and sampled tokens.
    """
    gate = 2 * model.num_heads if model.traits.attention_gate else 0
    attention = max(((3 * model.num_heads + gate + 2 * own.count) * own.dim for own in model.kv_heads), default=0)
    mixer, moe = _mixer_width(model, dtype_bytes), model.moe
    norms = 2 * any(layer.norms == "both" for layer in model.layers) + 3 * (moe is not None and moe.beside_mlp)
    widths = (3 + norms) * model.hidden_size + attention + mixer + 3 * model.widest_mlp
    if (mamba := model.mamba2) is not None and any(layer.mixer == "attention and mamba2" for layer in model.layers):
        widths += 3 * model.hidden_size + mamba.width + mamba.channels + mamba.heads
    if (inputs := model.traits.layer_inputs) is not None:
        widths += 5 * inputs.size + 2 * model.hidden_size
    ends = RECORDED_TOKENS * (model.hidden_size * dtype_bytes + model.vocab_size * 4 + 8)
    if moe is None:
        return RECORDED_TOKENS * model.num_layers * widths * dtype_bytes + ends
    pairs = moe.routing.top_k * (5 * 8 + moe.intermediate_size * dtype_bytes)
    choice = RECORDED_TOKENS * (moe.num_experts * 4 + pairs) + 8 * (moe.num_experts + 1) + 16 * CACHE_LINE
    return model.num_layers * (RECORDED_TOKENS * widths * dtype_bytes + choice) + ends


def replay_bytes(model: ModelConfig, dtype_bytes: int, num_layers: int, max_tokens: int) -> int:
    """Returns the memory of what is kept of rows with drafts, of so many layers with a state and tokens (`StateReplay`).

    That is a layer's inputs of the convolution, and those of the memory with its gates or step sizes.
    """
    width = 0
    if (delta := model.gated_delta) is not None:
        width = 2 * delta.channels + delta.value_heads + (delta.key_width if delta.gate_rank else delta.value_heads)
    elif (mamba := model.mamba) is not None:
        width = 4 * mamba.channels + 2 * mamba.state_size
    elif (mamba2 := model.mamba2) is not None:
        width = 2 * mamba2.channels + mamba2.heads
    elif model.short_conv is not None:
        width = model.short_conv.channels
    return num_layers * max_tokens * width * dtype_bytes


def activation_bytes(model: ModelConfig, dtype_bytes: int, max_tokens: int, max_rows: int, max_model_len: int) -> int:
    """Returns the working memory of the largest step, and the tables of rotations and of distances.

    A step needs its widest intermediate tensors, and fp32 logits (and a copy) of every row that samples or is scored. Where vectors
    are sparse, each prompt has a weight for every token of the vocabulary, until it ends.
    """
    inputs = model.traits.layer_inputs
    # Those of all layers: of ids, of embeddings, normed, and their sum.
    widths = 0 if inputs is None else 4 * model.num_layers * inputs.size
    widths += 4 * model.stream_size + max(
        _attention_width(model, dtype_bytes), _mlp_width(model, dtype_bytes), _norm_width(model, dtype_bytes)
    )
    scratch = model.attention_scratch(max_tokens, max_model_len)
    rotations = max_model_len * model.rotation_columns * 4
    rows = 2 * max(max_rows, LOGPROB_ROWS) if model.causal else max_rows + 2 * LOGPROB_ROWS if model.pooler.has_sparse else 0
    logits = rows * model.vocab_size * 4
    distances = _distance_bytes(model, dtype_bytes, max_model_len)
    return (max_tokens * widths + scratch) * dtype_bytes + logits + rotations + distances


def _distance_bytes(model: ModelConfig, dtype_bytes: int, max_model_len: int) -> int:
    """Bytes of biases by the distance of tokens, which are kept, while they are made: two copies, or seven indices of 8 bytes.

    Of embeddings of distances that is one index, while it is made, and what heads add to scores: five copies, while they are added.
    """
    if model.traits.distances is not None:
        products = 2 * 2 * model.traits.distances.span + 5 * max_model_len
        return max_model_len * (7 * 8 * max_model_len + products * model.num_heads * dtype_bytes)
    if not model.traits.distance_buckets:
        return 0
    return max_model_len * max_model_len * max(8 + 2 * model.num_heads * dtype_bytes, 7 * 8)


def _norm_width(model: ModelConfig, dtype_bytes: int) -> int:
    """Elements of one token inside a norm without kernels: its input and its output in fp32.

    Several residual streams are normed as one, to be weighed: there are their squares, too.
    """
    if model.traits.streams is not None:
        return 3 * model.stream_size * 4 // dtype_bytes
    return 0 if model.traits.norm == "weight" else 2 * model.hidden_size * 4 // dtype_bytes


def _attention_width(model: ModelConfig, dtype_bytes: int) -> int:
    """Elements of one token between the norm before attention and the projection after it; or of a Gated DeltaNet in its place.

    With latents that is queries while they are rotated in fp32, or queries, a copy with the rotated part, and outputs. An indexer
    has queries of its own and their weights, and its keys, which are normed and rotated in fp32. A norm over
    all heads has queries and keys in fp32, and their squares; one behind the rotation has the rotated halves, too. Gates of
    the output lie in one matrix with queries, which are copied. A Gated DeltaNet has its inputs before the convolution and behind
    it, the gate of its output, what it recalls, and that normalised; and where channels have them, decays, and what they and the
    gates are made of. So has a Mamba-2 mixer; without a norm, it has the gate in fp32. Where it stands beside attention, one of
    both is at work. Compressed attention has queries, while they are rotated in fp32, and outputs, and each token's row, and its
    indexer's queries. A Mamba mixer has inputs and gates, inputs convolved, step sizes, and its output, and what is made of inputs
    beside that normalised. A gated short convolution has its input and two gates, the gated input, and the convolved one before and
    behind its gate.
    """
    mixer = _mixer_width(model, dtype_bytes)
    if model.mla:
        mla = model.mla
        head = mla.key_dim + max(8 * mla.rope_dim, mla.rope_dim + mla.key_dim + mla.value_dim)
        indexer = mla.index.num_heads * (mla.index.dim + 4) + 8 * mla.index.dim if mla.index is not None else 0
        return max(mla.num_heads * head + 2 * (mla.q_rank + mla.latent_dim) + indexer, mixer)
    if (shape := model.compressed) is not None:
        row = max(shape.row_size(layer.runs) for layer in model.layers)
        rotated = 8 * shape.rope_dim
        heads = shape.num_heads * (3 * shape.head_dim + rotated) + shape.index.num_heads * (2 * shape.index.dim + rotated)
        return heads + 2 * row + shape.q_rank + shape.groups * shape.group_rank
    return max([mixer, *(_heads_width(model, own, dtype_bytes) for own in model.kv_heads)])


def _heads_width(model: ModelConfig, own: KVHeads, dtype_bytes: int) -> int:
    """Elements of one token inside attention with such key-value heads. Values that are normed are in fp32, before and behind."""
    heads = model.num_heads + 2 * own.count
    gates = 3 * model.num_heads if model.traits.attention_gate else 0
    copies = {"width": 2, "rotated head": 4}.get(model.traits.qk_norm or "", 0) * heads
    copies += 2 * own.count if model.traits.value_norm else 0
    return (2 * heads + gates + copies * 4 // dtype_bytes) * own.dim


def _mixer_width(model: ModelConfig, dtype_bytes: int) -> int:
    """Elements of one token inside a mixer with a recurrent state."""
    width = 0
    if (delta := model.gated_delta) is not None:
        width = 2 * delta.channels + 3 * delta.value_width + 2 * delta.value_heads
        width += delta.key_width + 2 * delta.gate_rank if delta.gate_rank else 0
    elif model.mamba is not None:
        width = 6 * model.mamba.channels + 2 * sum(model.mamba.made)
    elif (mamba := model.mamba2) is not None:
        width = 2 * mamba.channels + 3 * mamba.width + mamba.heads
        width += mamba.width * 4 // dtype_bytes if mamba.norm == "none" else 0
    elif model.short_conv is not None:
        width = 6 * model.short_conv.channels
    return width


def _mlp_width(model: ModelConfig, dtype_bytes: int) -> int:
    """Elements of one token inside the widest MLP."""
    moe = model.moe
    if moe is None:
        return 3 * model.widest_mlp
    plain = 3 * model.widest_mlp if moe.beside_mlp or len(moe.layers) < model.num_layers else 0
    shared = model.hidden_size + 3 * moe.shared_size
    experts = _experts_width(moe, model.hidden_size, dtype_bytes)
    # What the MLP gives waits for what experts give, whose norm and router read the stream.
    return max(plain, 3 * model.hidden_size + experts) if moe.beside_mlp else max(plain, shared, experts)


def _experts_width(moe: MoeConfig, hidden_size: int, dtype_bytes: int) -> int:
    """Elements of one token among its experts.

    Intermediate rows are held of all its experts at once, or gate, up and product of one that all tokens may go to. Then there are
    the token's row, gathered and multiplied, and in fp32 its product and the sum. Its choice has the affinities of all experts, and
    indices of 8 bytes.
    """
    routing = moe.routing
    choice = (4 * routing.num_experts * 4 + 6 * routing.top_k * 8) // dtype_bytes
    sums = 2 * hidden_size + 2 * hidden_size * 4 // dtype_bytes
    return choice + sums + max(routing.top_k, 3) * moe.intermediate_size


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """Memory that there is, and that a rank needs; bytes, of one rank unless said otherwise.

    total, available     of the device, which `ranks` ranks share; `available` is free now, with the weights loaded: others may have
                         taken memory of the machine
    fraction             of `total`, that all ranks may use
    recordings           as in `Ledger`
    kv_bytes             for the KV cache; None: what is left of `fraction`
    useful_blocks        more KV blocks than these are never used
    needed_blocks        KV blocks of the longest request, and the null block
    state_blocks         as in `Ledger`
    host, tables         as in `Ledger`; they are of the same memory where that is `unified`
    """

    total: int
    available: int
    fraction: float
    ranks: int = 1
    weights: int
    activations: int
    recordings: int = 0
    kv_bytes: int | None
    slab_bytes: int
    block_size: int
    useful_blocks: int
    needed_blocks: int
    state_blocks: int = 0
    host: HostMemory = NO_HOST
    tables: int = 0
    unified: bool = True

    @property
    def limit(self) -> int:
        fraction = 1 if self.kv_bytes is not None else self.fraction
        return min(int(self.total * fraction) // self.ranks, self.available // self.ranks + self.weights)

    @property
    def fixed(self) -> int:
        """Bytes of the limit that neither the KV cache nor the tiers get."""
        return self.weights + self.activations + self.recordings + self._device_tables

    @property
    def device_host(self) -> int:
        """Bytes of the limit that the tiers get."""
        return self.host.total if self.unified else 0

    @property
    def needed_bytes(self) -> int:
        return self.needed_blocks * self.slab_bytes

    @property
    def _device_tables(self) -> int:
        return self.tables if self.unified else 0

    def check_host(self) -> None:
        """Raises ConfigError where the tiers leave too little for the KV cache, unless that would not fit without them."""
        most = self.limit - self.fixed - (self.needed_bytes if self.kv_bytes is None else self.kv_bytes)
        if self.unified and most >= 0:
            self.host.check(most)

    def refuse_blocks(self) -> ConfigError:
        """Returns the error for too little memory for `needed_blocks`, or for what comes before them; it names what works."""
        if self.kv_bytes is not None:
            # A state takes as much for any length.
            what, lower = (
                ("the state of one request", "")
                if self.state_blocks
                else ("one request of max_model_len", ", or lower max_model_len")
            )
            return ConfigError(
                f"{self.kv_bytes} bytes do not hold {what}, which needs {self.needed_bytes}; "
                f"set it to at least {self.needed_bytes}{lower}",
                "kv_cache_memory_bytes",
            )
        least = self.ranks * (self.fixed + self.needed_bytes + self.device_host) / self.total
        # Without a cache of keys and values, only a shorter step takes less. An encoder's has a whole prompt.
        lower = "lower max_model_len" if self.slab_bytes else "lower max_model_len and max_num_batched_tokens"
        lower = "lower max_num_batched_tokens or max_num_seqs" if self.state_blocks else lower
        hint = f"set it to at least {least:.2f}, or {lower}" if least <= 1 else lower
        weights, activations, tables = map(format_bytes, (self.weights, self.activations, self._device_tables))
        recordings = f", recordings {format_bytes(self.recordings)}" if self.recordings else ""
        held = f"weights {weights}, activations {activations}{recordings} and tables {tables}"
        cache = "a state besides " if self.state_blocks else "the KV cache besides " if self.slab_bytes else ""
        return ConfigError(
            f"{self.fraction} leaves too little for {cache}{held} of {format_bytes(self.total)}; {hint}", "gpu_memory_utilization"
        )

    def refuse_bytes(self, kv_bytes: int, room: int) -> ConfigError:
        """Returns the error for `kv_bytes` that do not fit into `room`."""
        left = f"{format_bytes(max(room, 0))} are left of {format_bytes(self.total)}; set it to at most {max(room, 0)}"
        return ConfigError(f"{format_bytes(kv_bytes)} asked for, {left}", "kv_cache_memory_bytes")


def plan_memory(request: MemoryRequest) -> Ledger:
    """Gives the KV tiers and the tables their memory first; the KV cache gets the rest, or `kv_bytes`, up to `useful_blocks`.

    Raises ConfigError, with a value that works, when fewer than `needed_blocks` fit.
    """
    request.check_host()
    room = request.limit - request.fixed - request.device_host
    if not request.slab_bytes:
        if room < 0:
            raise request.refuse_blocks()
        num_blocks = request.needed_blocks
    elif request.kv_bytes is None:
        num_blocks = min(request.useful_blocks * request.slab_bytes, room) // request.slab_bytes
    else:
        num_blocks = request.kv_bytes // request.slab_bytes
    if num_blocks < request.needed_blocks:
        raise request.refuse_blocks()
    if request.kv_bytes is not None and request.kv_bytes > room:
        raise request.refuse_bytes(request.kv_bytes, room)
    return Ledger(
        total=request.total,
        limit=request.limit,
        weights=request.weights,
        activations=request.activations,
        recordings=request.recordings,
        kv=num_blocks * request.slab_bytes,
        slab_bytes=request.slab_bytes,
        num_blocks=num_blocks,
        block_size=request.block_size,
        state_blocks=request.state_blocks,
        host=request.host,
        tables=request.tables,
        unified=request.unified,
    )
