"""Encoders with BERT's norms and segments, and rotated heads: Nomic Embed, GTE, Jina 3 (arXiv 2402.01613, 2407.19669, 2409.10173).

Names are those of the authors' checkpoints, which transformers keeps when it saves one.
"""

from dataclasses import replace

from starling_engine.model_config.adapters import task_adapters
from starling_engine.model_config.bert import BERT, NAMES, ROBERTA, TRAITS
from starling_engine.model_config.classifier import HeadShape, fixed_head
from starling_engine.model_config.definition import LENGTH_FIELD, one_rope, same_layers
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.traits import Traits

_NOMIC_SWITCHES = (
    *("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "causal"),
    *("rotary_emb_interleaved", "use_rms_norm", "parallel_block"),
)


def _nomic_traits(config: Fields) -> Traits:
    for name in _NOMIC_SWITCHES:
        config.only(name, False)
    if config.has("rotary_emb_scale_base"):
        raise config.error("rotary_emb_scale_base", "must be null: scores that fade with the distance are not supported")
    _check_scaling(config)
    return replace(_rotated(config, types=2), qkv_bias=False, o_bias=False, mlp_bias=False, mlp_gate=True)


def _check_scaling(config: Fields) -> None:
    """Raises ModelError for sequences whose rotation the authors' code would stretch by their own length."""
    trained = config.integer("max_trained_positions", 2048)
    if config.has("rotary_scaling_factor") and config.integer(LENGTH_FIELD) > trained:
        rule = f"must be null, or n_positions at most {trained} (max_trained_positions): longer sequences would be scaled by it"
        raise config.error("rotary_scaling_factor", rule)


def _gte_traits(config: Fields) -> Traits:
    config.one_of("position_embedding_type", "rope")
    config.one_of("layer_norm_type", "layer_norm")
    config.only("logn_attention_scale", False)
    return replace(_rotated(config, types=1), mlp_bias=False, down_bias=True, mlp_gate=True)


def _jina_traits(config: Fields) -> Traits:
    return _rotated(config, types=1)


def _adapted_traits(config: Fields) -> Traits:
    config.one_of("position_embedding_type", "rotary")
    if config.has("emb_pooler"):
        config.one_of("emb_pooler", "mean")
    return _jina_traits(config)


def _rotated(config: Fields, types: int) -> Traits:
    return replace(TRAITS, positions_from=None, token_types=config.integer("type_vocab_size", types, low=0, high=1 << 16))


FLASH_NAMES = replace(NAMES, embedding_norm="emb_ln", layer="encoder.layers.{}", attention_out_norm="norm1", mlp_out_norm="norm2")
"""Names of FlashAttention's own BERT, with which both of these began."""


NOMIC_BERT = replace(
    BERT,
    architecture="NomicBertModel",
    traits=_nomic_traits,
    layers=same_layers("sum"),
    ropes=one_rope,
    rope_theta=1000.0,
    activation="silu",
    activation_names={"swiglu": "silu"},
    masked_head=None,
    field_names={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "hidden_act": "activation_function",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_emb_fraction",
    },
    names=replace(
        FLASH_NAMES,
        fused_qkv="attn.Wqkv",
        o="attn.out_proj",
        up="mlp.fc11",
        gate="mlp.fc12",
        down="mlp.fc2",
    ),
)
GTE = replace(
    BERT,
    architecture="NewModel",
    traits=_gte_traits,
    layers=same_layers("sum"),
    ropes=one_rope,
    rope_theta=160_000.0,
    masked_head=None,
    names=replace(
        NAMES,
        q="attention.q_proj",
        k="attention.k_proj",
        v="attention.v_proj",
        fused_qkv="attention.qkv_proj",
        o="attention.o_proj",
        attention_out_norm="attn_ln",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        fused_gate_up="mlp.up_gate_proj",
        fused_up_first=True,
        down="mlp.down_proj",
        mlp_out_norm="mlp_ln",
    ),
)
JINA_V3 = replace(
    ROBERTA,
    architecture="JinaEmbeddingsV3Model",
    traits=_jina_traits,
    layers=same_layers("sum"),
    ropes=one_rope,
    rope_theta=20_000.0,
    rms_eps=1e-5,
    head=fixed_head(HeadShape(dense="classifier.dense", out="classifier.out_proj")),
    masked_head=None,
    names=replace(
        FLASH_NAMES,
        fused_qkv="mixer.Wqkv",
        o="mixer.out_proj",
        up="mlp.fc1",
        down="mlp.fc2",
    ),
)
JINA_V3_ADAPTED = replace(
    JINA_V3,
    architecture="XLMRobertaLoRA",
    traits=_adapted_traits,
    adapters=task_adapters,
    field_names={"rope_theta": "rotary_emb_base"},
    head=None,
    token_head=None,
)
"""The checkpoint as its authors published it, with adapters for its tasks; `JINA_V3` is the form of transformers."""
