"""What is read of encoders' configs as their authors published them, and what is refused of them."""

from typing import Any

import pytest
import torch
from starling_engine.errors import ModelError, UnsupportedModel
from starling_engine.model_config.adapters import AdapterConfig
from starling_engine.model_config.classifier import MAX_LABELS, activated
from starling_engine.model_config.config import ModelConfig, parse_model_config
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.rope import NtkScaling, RopeConfig

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
GTE_BASE: dict[str, Any] = BASE | {
    "architectures": ["NewModel"],
    "hidden_act": "gelu",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "rope_theta": 500000,
    "type_vocab_size": 0,
    "unpad_inputs": False,
    "vocab_size": 30528,
}
NOMIC_1_5: dict[str, Any] = {
    "architectures": ["NomicBertModel"],
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 30528,
}
MODERNBERT: dict[str, Any] = BASE | {
    "architectures": ["ModernBertForMaskedLM"],
    "hidden_activation": "gelu",
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "local_attention": 128,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-05,
    "position_embedding_type": "absolute",
    "vocab_size": 50368,
}
JINA_3: dict[str, Any] = BASE | {
    "architectures": ["XLMRobertaLoRA"],
    "emb_pooler": None,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-05,
    "load_trained_adapters": True,
    "lora_adaptations": ["retrieval.query", "retrieval.passage", "separation", "classification", "text-matching"],
    "lora_alpha": 1,
    "lora_rank": 4,
    "matryoshka_dimensions": [32, 64, 128, 256, 512, 768, 1024],
    "max_position_embeddings": 8194,
    "pad_token_id": 1,
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "task_instructions": {"retrieval.query": "Represent the query for retrieving evidence documents: ", "separation": ""},
    "type_vocab_size": 1,
    "vocab_size": 250002,
}
CROSS_ENCODER: dict[str, Any] = BASE | {
    "architectures": ["BertForSequenceClassification"],
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "vocab_size": 30522,
    "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
}


def parse(config: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_model_config(Fields({**config, **changes}, "config.json"), Fields({}, "generation_config.json"))


def test_gtes_rotation_is_scaled_for_all_lengths() -> None:
    gte = parse(GTE_BASE)
    assert gte.ropes == (RopeConfig(theta=500000, scaling=NtkScaling(factor=2.0)),)
    assert (gte.max_position, gte.traits.token_types) == (8192, 0)


def test_the_other_published_configs() -> None:
    nomic, modern = parse(NOMIC_1_5), parse(MODERNBERT)
    assert (nomic.max_position, nomic.ropes[0].theta, nomic.hidden_act) == (8192, 1000, "silu")
    assert parse(NOMIC_1_5, rotary_scaling_factor=2.0, n_positions=2048).max_position == 2048
    jina = parse(JINA_3)
    assert (jina.max_position, jina.ropes[0].theta, jina.traits.positions_from) == (8194, 20000, None)
    assert jina.adapters == AdapterConfig(names=tuple(JINA_3["lora_adaptations"]), rank=4, scale=0.25)
    assert parse(JINA_3, load_trained_adapters=False).adapters is None
    assert modern.windows == (0, 65, 65) * 4 and [rope.theta for rope in modern.ropes] == [160000, 10000]


@pytest.mark.parametrize(
    ("changes", "label", "score"),
    [
        ({"num_labels": 1}, "sigmoid", "identity"),
        ({"num_labels": 1, "problem_type": "single_label_classification"}, "sigmoid", "identity"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity", "identity"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": None}, "sigmoid", "sigmoid"),
        ({"num_labels": 2, "problem_type": "single_label_classification"}, "softmax", "identity"),
        ({"id2label": {str(at): f"name {at}" for at in range(11)}}, "softmax", "identity"),
    ],
)
def test_what_the_numbers_of_a_head_become(changes: dict[str, Any], label: str, score: str) -> None:
    """Labels are as in transformers' pipeline, scores as in sentence-transformers."""
    head = parse(CROSS_ENCODER, **changes).classifier
    assert head is not None and (head.label_activation, head.score_activation) == (label, score)
    assert len(head.labels) < 11 or head.labels[-2:] == ("name 9", "name 10")


@pytest.mark.timeout(30)  # in quadratic time the second takes more than a minute
@pytest.mark.parametrize("count", [2, MAX_LABELS])
def test_probabilities_of_few_and_of_many_labels_are_torchs(count: int) -> None:
    logits = [-at / 1000 for at in range(count)]
    found = activated("softmax", logits)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(logits).softmax(0))


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (GTE_BASE, {"rope_scaling": {"factor": 2.0, "type": "ntk", "mixed_b": 0.5}}),
        (GTE_BASE, {"layer_norm_type": "rms_norm"}),
        (JINA_3, {"lora_adaptations": ["a", "a"]}),
        (JINA_3, {"task_instructions": {"other": "text"}}),
        (JINA_3, {"lora_rank": 0}),
        (JINA_3, {"position_embedding_type": "absolute"}),
        (JINA_3, {"emb_pooler": "cls"}),
        (GTE_BASE, {"logn_attention_scale": True}),
        (NOMIC_1_5, {"rotary_scaling_factor": 2.0}),
        (NOMIC_1_5, {"rotary_emb_interleaved": True}),
        (NOMIC_1_5, {"rotary_emb_scale_base": 512}),
        (NOMIC_1_5, {"rotary_emb_fraction": 0.5}),
        (NOMIC_1_5, {"use_rms_norm": True}),
        (NOMIC_1_5, {"mlp_fc1_bias": True}),
        (MODERNBERT, {"layer_types": ["chunked_attention"] * 12}),
        (CROSS_ENCODER, {"hidden_act": "quick_gelu"}),
        (CROSS_ENCODER, {"position_embedding_type": "rotary"}),
    ],
)
def test_what_would_give_other_numbers_is_refused_by_its_name(config: dict[str, Any], changes: dict[str, Any]) -> None:
    theirs = {"rope_scaling": "mixed_b", "rotary_emb_fraction": "partial_rotary_factor"}
    name = next(iter(changes))
    with pytest.raises((ModelError, UnsupportedModel), match=theirs.get(name, name)):
        parse(config, **changes)
