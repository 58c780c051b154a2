"""What a step of a model has to read and to multiply at least, from the model's config alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from starling_engine.kv.layer_specs import DTYPE_BYTES
from starling_engine.model_config.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes through the device's memory, and floating-point operations (a multiplication and an addition are two)."""

    bytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device can do: bytes/s of a copy, read and written; FLOP/s of a large bf16 matrix product."""

    bandwidth: float
    rate: float

    def seconds(self, cost: Cost) -> float:
        """The least time: whichever of the two takes longer."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.rate)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One sequence in a step: `new` tokens, the last of its `context`."""

    new: int
    context: int

    def seen(self, window: int = 0) -> int:
        """Keys that its queries see, in all; `window` as in `ModelSourceConfig.windows`."""
        first = self.context - self.new + 1
        if not window or self.context <= window:
            return self.new * (first + self.context) // 2
        return sum(min(at, window) for at in range(first, self.context + 1))

    def read(self, window: int = 0) -> int:
        """Tokens whose keys and values are read."""
        return min(self.context, window + self.new - 1) if window else self.context


def step_cost(model: ModelConfig, rows: Sequence[StepRow], cached: int | None = None) -> Cost:
    """Of one step that samples one token of each row.

    Every weight that is used is read once, and so are the keys and values that a row sees; activations are not counted. Past the
    attention of the last layer only the sampled tokens are computed. Of experts those count that are chosen when tokens choose
    evenly. `cached` is the bytes of a cached element, where they are not those of the model's dtype. Latent attention (MLA) is not
    modelled: AssertionError.
    """
    assert model.mla is None, "latent attention is not modelled"
    element = DTYPE_BYTES[model.dtype]
    tokens, hidden = sum(row.new for row in rows), model.hidden_size
    heads, both = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    read = kept = flops = 0.0
    for layer, window in enumerate(model.windows):
        past = len(rows) if layer == model.num_layers - 1 else tokens
        weights, used = _mlp(model, layer, past)
        read += hidden * (heads + both) + heads * hidden + weights
        kept += both * (tokens + sum(row.read(window) for row in rows))
        flops += 2 * tokens * hidden * (heads + both) + 2 * past * (heads * hidden + used)
        flops += 4 * heads * sum(row.seen(window) for row in rows)
    head = hidden * model.vocab_size
    return Cost(bytes=element * (read + head + tokens * hidden) + (cached or element) * kept, flops=flops + 2 * len(rows) * head)


def _mlp(model: ModelConfig, layer: int, tokens: int) -> tuple[float, int]:
    """Weights of the layer's MLP or experts that so many tokens read, and that each of them uses."""
    moe, hidden = model.moe, model.hidden_size
    if moe is None or layer not in moe.layers:
        plain = 3 * hidden * model.intermediate_size
        return plain, plain
    expert, common = 3 * hidden * moe.intermediate_size, hidden * moe.num_experts + 3 * hidden * moe.shared_size
    chosen = chosen_experts(moe.num_experts, moe.routing.top_k, tokens)
    return common + chosen * expert, common + moe.routing.top_k * expert


def chosen_experts(experts: int, top_k: int, tokens: int) -> float:
    """How many of the experts somebody chooses, on average, when each token chooses `top_k` of them evenly."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def serve_seconds(model: ModelConfig, limits: Limits, requests: int, prompt: int, new: int) -> float:
    """The least time of `requests` at once: their prompts one by one, which gives each its first token, then step by step."""
    prompts = requests * limits.seconds(step_cost(model, [StepRow(prompt, prompt)]))
    steps = (step_cost(model, [StepRow(1, prompt + at)] * requests) for at in range(1, new))
    return prompts + sum(limits.seconds(step) for step in steps)
