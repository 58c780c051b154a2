"""GPT-NeoX (20B, Pythia): attention and MLP side by side behind a LayerNorm each, biases, partly rotated heads."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, with_windows
from starling_engine.model_config.rope import RopeConfig, read_rope
from starling_engine.model_config.traits import Traits

DEFAULT_ROTATED = 0.25
QKV = "attention.query_key_value"
NAMES = TensorNames(
    embedding="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    lm_head="embed_out",
    other_lm_head="lm_head",
    layer="gpt_neox.layers.{}",
    q=QKV,
    k=QKV,
    v=QKV,
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", True)
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=True, mlp_gate=False, norm="biased layer")


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    parallel = config.boolean("use_parallel_residual", True)
    return with_windows((0,) * num_layers, "parallel, each its own" if parallel else "before")


def _ropes(config: Fields, theta: float) -> tuple[RopeConfig, ...]:
    """Returns the rotary embedding; configs of transformers 4 have names of their own for both numbers."""
    theta = config.number("rotary_emb_base", theta, low=1.0)
    return (read_rope(config, theta, config.number("rotary_pct", DEFAULT_ROTATED)),)


GPT_NEOX = ModelDefinition(
    architecture="GPTNeoXForCausalLM",
    traits=_traits,
    layers=_layers,
    ropes=_ropes,
    activation="gelu",
    activation_names=dict.fromkeys(("gelu_new", "gelu_fast"), "gelu_pytorch_tanh"),  # the same formula
    eps_field="layer_norm_eps",
    rms_eps=1e-5,
    names=NAMES,
)
