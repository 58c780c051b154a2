"""Names that llama.cpp gives to modules, and what its converter does to tensors on the way.

A name of ours is a field of `TensorNames`, or of one of its parts; a number is an index. Keys with an ending are of one tensor, the
others of a module's weight and its bias.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Change = Literal["none", "one added", "decay", "taps", "row", "flat", "pairs", "split", "head decay"]
"""Changes that the converter makes.

one added  a norm's weights are 1 more than they were
decay      a logarithm became the negative of its exponential
taps       [channels, 1, kernel] became [channels, kernel]
row        a matrix of one row became one of its elements, or may have
flat       one dimension became two, or one more
pairs      rows of the two halves of a head lie in turn
split      keys of all heads, each transposed, and values of all heads became tensors of their own
head decay the same as a decay, of which a checkpoint has [1, 1, heads, 1]
"""
Part = Literal["all", "keys and values", "value heads", "value heads as columns", "gate", "decay", "heads in turn"]
"""Parts of tensors that lie in another order: those of a Gated DeltaNet, and the last one.

keys and values  queries and keys lie as they did; of values, the first heads of all key heads come first
value heads      these heads alone, in that order
gate, decay      rows of either, which take turns by key head
heads in turn    queries of all heads, keys, and values, which the checkpoint has head by head
"""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor, or a module, by our name. `whole`: the name is the tensor's own, without an ending."""

    name: str
    change: Change = "none"
    part: Part = "all"
    whole: bool = False


KEYS, VALUES = "attn_k_b", "attn_v_b"
"""Modules that one matrix of a checkpoint is split into; it is found by the first of them."""

ModuleNames = Mapping[str, str | Stored | tuple[Stored, ...]]

COMMON: ModuleNames = {
    "token_embd": "embedding",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "attention_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "post_attention_norm": "attention_out_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "post_ffw_norm": "mlp_out_norm",
    "ffn_gate_inp": "router",
    "exp_probs_b.bias": Stored("router_bias", whole=True),
}
SHARED: ModuleNames = {
    "ffn_gate_shexp": "shared_experts/shared_projections.0",
    "ffn_up_shexp": "shared_experts/shared_projections.1",
    "ffn_down_shexp": "shared_experts/shared_projections.2",
    "ffn_gate_inp_shexp": Stored("shared_gate", "row"),
}
PAIRED: ModuleNames = {"attn_q": Stored("q", "pairs"), "attn_k": Stored("k", "pairs")}
FUSED_QKV: ModuleNames = {"attn_qkv": "fused_qkv"}
FUSED_GATE_UP: ModuleNames = {"ffn_up": "fused_gate_up"}
BEFORE_MLP: ModuleNames = {"post_attention_norm": "mlp_norm"}
"""The norm behind attention is that before the MLP, as it is in older models."""
NORMS_PLUS_ONE: ModuleNames = {
    name: Stored(str(COMMON[name]), "one added")
    for name in ("output_norm", "attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
}
WEIGHTS_PLUS_ONE: ModuleNames = {
    f"{name}.weight": Stored(str(COMMON[name]), "one added") for name in ("output_norm", "attn_norm", "ffn_norm")
}
"""The same of norms that have biases, which stay as they are."""
LATENTS: ModuleNames = {
    "attn_q_a": "q_a",
    "attn_q_a_norm": "q_a_norm",
    "attn_q_b": "q_b",
    "attn_kv_a_mqa": "kv_a",
    "attn_kv_a_norm": "kv_a_norm",
    "attn_kv_b": "kv_b",
    f"{KEYS}.weight": Stored("kv_b", "split"),
    f"{VALUES}.weight": (),
}
"""Modules of latent attention. Files of before 2025-04 have keys and values in one matrix, as checkpoints have."""
INDEXER: ModuleNames = {
    "indexer.attn_q_b": "index_q",
    "indexer.attn_k": "index_k",
    "indexer.k_norm": "index_k_norm",
    "indexer.proj": "index_weights",
}
SINKS: ModuleNames = {"attn_sinks.weight": Stored("sinks", whole=True)}
SHORT_CONV: ModuleNames = {
    "shortconv.in_proj": "short_conv.fused_in",
    "shortconv.conv.weight": Stored("short_conv.conv", "taps"),
    "shortconv.out_proj": "short_conv.out",
}
MAMBA: ModuleNames = {
    "ssm_in": "mamba.inputs",
    "ssm_conv1d": "mamba.conv",
    "ssm_conv1d.weight": Stored("mamba.conv", "taps"),
    "ssm_x": "mamba.made",
    "ssm_dt": "mamba.steps",
    "ssm_dt_norm": "mamba.norms.0",
    "ssm_b_norm": "mamba.norms.1",
    "ssm_c_norm": "mamba.norms.2",
    "ssm_a": Stored("mamba.a_log", "decay", whole=True),
    "ssm_d": Stored("mamba.skip", whole=True),
    "ssm_out": "mamba.out",
}
MAMBA2: ModuleNames = {
    "ssm_in": "mamba2.inputs",
    "ssm_conv1d": "mamba2.conv",
    "ssm_conv1d.weight": Stored("mamba2.conv", "taps"),
    "ssm_a": Stored("mamba2.a_log", "decay", whole=True),
    "ssm_d": Stored("mamba2.skip", "flat", whole=True),
    "ssm_dt.bias": Stored("mamba2.dt_bias", whole=True),
    "ssm_norm": Stored("mamba2.norm", "flat"),
    "ssm_out": "mamba2.out",
}
BERT: ModuleNames = {
    "token_embd_norm": "embedding_norm",
    "token_types": "token_types",
    "position_embd": "positions",
    "attn_qkv": "fused_qkv",
    "attn_output_norm": "attention_out_norm",
    "layer_output_norm": "mlp_out_norm",
}
GEMMA4: ModuleNames = {
    "layer_output_scale.weight": Stored("layer_scalar", whole=True),
    "per_layer_token_embd": "layer_table",
    "per_layer_model_proj": "layer_projection",
    "per_layer_proj_norm": "layer_projection_norm",
    "inp_gate": "layer_input_gate",
    "proj": "layer_input_projection",
    "post_norm": "layer_input_norm",
    "ffn_gate_inp.scale": Stored("router_scale", whole=True),
    "ffn_down_exps.scale": Stored("expert_scales", whole=True),
    "post_ffw_norm_1": "beside_out_norm",
    "pre_ffw_norm_2": "experts_norm",
    "post_ffw_norm_2": "experts_out_norm",
}
DELTA: ModuleNames = {
    "attn_qkv": "delta.fused_qkv",
    "attn_gate": "delta.z",
    "ssm_conv1d": Stored("delta.fused_conv", "taps"),
    "ssm_a": Stored("delta.a_log", "decay", whole=True),
    "ssm_dt.bias": Stored("delta.dt_bias", whole=True),
    "ssm_norm": "delta.norm",
    "ssm_out": "delta.out",
    "ssm_ba.weight": (Stored("delta.b", part="gate"), Stored("delta.a", part="decay")),
}
VALUE_HEADS: ModuleNames = {
    "attn_qkv": Stored("delta.fused_qkv", part="keys and values"),
    "attn_gate": Stored("delta.z", part="value heads"),
    "ssm_alpha": Stored("delta.a", part="value heads"),
    "ssm_beta": Stored("delta.b", part="value heads"),
    "ssm_conv1d": Stored("delta.fused_conv", "taps", "keys and values"),
    "ssm_a": Stored("delta.a_log", "decay", "value heads", whole=True),
    "ssm_dt.bias": Stored("delta.dt_bias", part="value heads", whole=True),
    "ssm_out": Stored("delta.out", part="value heads as columns"),
}
"""Modules of a Gated DeltaNet whose value heads lie in another order than in its checkpoint (Qwen 3.5)."""
KIMI_DELTA: ModuleNames = {
    "ssm_conv1d_q": Stored("delta.q_conv", "taps"),
    "ssm_conv1d_k": Stored("delta.k_conv", "taps"),
    "ssm_conv1d_v": Stored("delta.v_conv", "taps"),
    "ssm_f_a": "delta.decay_in",
    "ssm_f_b": "delta.decay_out",
    "ssm_g_a": "delta.gate_in",
    "ssm_g_b": "delta.gate_out",
    "ssm_beta": "delta.b",
    "ssm_a": Stored("delta.a_log", "head decay", whole=True),
    "ssm_dt.bias": Stored("delta.dt_bias", whole=True),
    "ssm_norm": "delta.norm",
}
EXPERTS: Mapping[str, tuple[int, ...]] = {
    "ffn_gate_exps": (0,),
    "ffn_up_exps": (1,),
    "ffn_down_exps": (2,),
    "ffn_gate_up_exps": (0, 1),
}
"""Modules that hold all experts of a layer, and which of `expert_projections` follow one another in the rows of each."""
XIELU: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "xielu.alpha_p": ("alpha_p", (1,)),
    "xielu.alpha_n": ("alpha_n", (1,)),
    "xielu.beta": ("beta", ()),
    "xielu.eps": ("eps", ()),
}
"""Metadata with a number for each layer, which is a tensor in a checkpoint: its name in the activation, and its shape."""
