"""Mixture of experts as a config describes it: layers, sizes, and routing. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from starling_engine.model_config.fields import Fields

MAX_EXPERTS = 10_000
"""More than a layer of any model has; a config with more is damaged."""
_MAX_EXPERTS_IN_ALL = 200_000
"""More than all layers of any model have together (Kimi K2's have 23,040), whose slots are made before tensors are compared."""


ExpertLayout = Literal["rows", "columns", "alternating columns", "columns or rows"]
"""Layout of a tensor with all experts of a layer: as matrices are multiplied, or each of them transposed (Llama 4), or either.

Gates lie before ups, or gate and up take turns (gpt-oss).
"""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Rules by which each token chooses `top_k` of `num_experts`, and weighs them.

    score         turns a token's logits into affinities: softmax over all experts, or the sigmoid of each, or the square root of
                  its softplus (DeepSeek-V4)
    bias          a learnt bias is added to the affinities for the choice alone, not for the weights (DeepSeek-V3, arXiv 2408.15664)
    num_groups    number of equal groups of experts; only those in the `top_groups` best can be chosen
                  (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)
    group_score   the worth of a group: its best expert, or the sum of its best two
    renormalize   the affinities of the chosen experts are divided by their sum
    scaling       multiplies them after that
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sqrt softplus"] = "softmax"
    bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best two"] = "best"
    renormalize: bool = False
    scaling: float = 1.0

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The gate of gpt-oss's experts: (up + offset) * gate * sigmoid(alpha * gate), in place of silu(gate) * up.

    Before that gate is at most `limit`, and up within `limit` on both sides. DeepSeek-V4 clamps alone: with an offset of 0.
    """

    alpha: float
    limit: float
    offset: float = 1.0


@dataclass(frozen=True, slots=True)
class TanhGelu:
    """The gate of Gemma 4's experts: GELU by its approximation with tanh (arXiv 1606.08415, section 2), times up."""


ExpertGate = ClampedSwiglu | TanhGelu


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The experts of a model. Sizes are in elements.

    layers              indices of the layers that have experts, ascending; the others have a plain MLP
    intermediate_size   of one expert
    shared_size         of the MLP that every token takes in addition to its experts; 0 means none
    shared_gate         its output is multiplied by the sigmoid of one learnt projection of the token
    bias                of the router's matrix, and of each of an expert's
    gate                in place of SiLU, where an expert has another gate; so have shared experts then
    gated               False where an expert has none: it is down(relu(up(x))^2) (arXiv 2109.08668)
    scaled_inputs       the affinity of a token's one expert multiplies what goes in, not what comes out (Llama 4)
    beside_mlp          a plain MLP stands beside the experts, each with norms of its own. The router reads the stream, normed by a
                        weight of its own, and a learnt number of each expert multiplies what it gives (Gemma 4)
    by_table            layers in which a table says which experts a token goes to, by its id; they weigh these alone
    """

    layers: tuple[int, ...]
    intermediate_size: int
    routing: Routing
    shared_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    gate: ExpertGate | None = None
    gated: bool = True
    scaled_inputs: bool = False
    beside_mlp: bool = False
    by_table: tuple[int, ...] = ()

    @property
    def num_experts(self) -> int:
        return self.routing.num_experts


def read_num_experts(config: Fields, *names: str) -> int:
    """Reads the first of `names` that is there: transformers may write another name than the model's authors did."""
    return config.integer(next((name for name in names if config.has(name)), names[0]), high=MAX_EXPERTS)


def checked(config: Fields, routing: Routing) -> Routing:
    """Returns `routing`, if tokens can choose by it. Else raises ModelError naming the bad field of `config`."""
    experts, groups, top_k = routing.num_experts, routing.num_groups, routing.top_k
    if experts % groups:
        raise config.error("n_group", f"must divide the number of experts ({experts})")
    if routing.top_groups > groups:
        raise config.error("topk_group", f"must be at most n_group ({groups})")
    if routing.group_score == "best two" and groups > 1 and routing.group_size < 2:
        raise config.error("n_group", f"must leave at least 2 of the {experts} experts to a group")
    eligible = routing.top_groups * routing.group_size
    if top_k > eligible:
        raise config.error("num_experts_per_tok", f"must be at most {eligible}, the experts that a token can choose from")
    return routing


def check_experts(config: Fields, moe: MoeConfig) -> None:
    """Raises ModelError for more experts in all layers than any model has."""
    layers, experts = len(moe.layers), moe.num_experts
    if layers * experts > _MAX_EXPERTS_IN_ALL:
        rule = f"must leave at most {_MAX_EXPERTS_IN_ALL} experts in all: {layers} layers have {experts} each"
        raise config.error("num_hidden_layers", rule)


def no_experts(_config: Fields, _num_layers: int) -> MoeConfig | None:
    """Returns None, for a family without experts."""
    return None
