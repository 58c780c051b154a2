"""InternLM2 and 2.5: Llama under names of their own; queries, keys and values are one matrix."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits

QKV = "attention.wqkv"
NAMES = TensorNames(
    embedding="model.tok_embeddings",
    lm_head="output",
    q=QKV,
    k=QKV,
    v=QKV,
    o="attention.wo",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
)


def _traits(config: Fields) -> Traits:
    bias = config.boolean("bias", True)
    return Traits(qkv_bias=bias, o_bias=bias)


INTERNLM2 = ModelDefinition(architecture="InternLM2ForCausalLM", traits=_traits, names=NAMES)
