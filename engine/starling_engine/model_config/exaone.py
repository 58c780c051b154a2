"""EXAONE 3 and 3.5: Llama under names of their own."""

from starling_engine.model_config.definition import ModelDefinition, TensorNames

NAMES = TensorNames(
    embedding="transformer.wte",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    q="attn.attention.q_proj",
    k="attn.attention.k_proj",
    v="attn.attention.v_proj",
    o="attn.attention.out_proj",
    gate="mlp.c_fc_0",
    up="mlp.c_fc_1",
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    ignored=("rotary.inv_freq",),
)

EXAONE = ModelDefinition(
    architecture="ExaoneForCausalLM",
    field_names={"num_hidden_layers": "num_layers", "hidden_act": "activation_function"},
    eps_field="layer_norm_epsilon",
    rms_eps=1e-5,
    names=NAMES,
)
