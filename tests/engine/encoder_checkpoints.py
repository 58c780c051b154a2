"""Small synthetic encoders, written by transformers, with and without heads for classification."""

import json
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import BertTokenizer, PreTrainedModel

from tests.engine.checkpoints import edit_json, spread

VOCAB = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
DISTILBERT: dict[str, Any] = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}
DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
MODERNBERT = {"local_attention": 8, "num_hidden_layers": 4, "cls_token_id": 2, "sep_token_id": 3}
GEMMA = {
    "use_bidirectional_attention": True,
    "sliding_window": 12,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

GEMMA4 = {
    **GEMMA,
    "use_bidirectional_attention": "all",
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
}


@dataclass(frozen=True)
class EncoderVariant:
    """A class of transformers, that of its config, and what differs from SHAPE. `types` are segments that tokens may be of."""

    model: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    types: int = 1


ENCODERS = {
    "bert": EncoderVariant("BertModel", "BertConfig", types=2),
    "bert-masked": EncoderVariant("BertForMaskedLM", "BertConfig", types=2),
    "roberta": EncoderVariant("RobertaModel", "RobertaConfig", {"pad_token_id": 1}),
    "xlm-roberta": EncoderVariant("XLMRobertaModel", "XLMRobertaConfig", {"pad_token_id": 1, "type_vocab_size": 1}),
    "camembert": EncoderVariant("CamembertModel", "CamembertConfig", {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": EncoderVariant("DistilBertModel", "DistilBertConfig", DISTILBERT),
    "deberta": EncoderVariant("DebertaV2Model", "DebertaV2Config", DEBERTA),
    "deberta-plain": EncoderVariant(
        "DebertaV2Model",
        "DebertaV2Config",
        {**DEBERTA, "position_buckets": -1, "norm_rel_ebd": "none", "position_biased_input": True, "type_vocab_size": 2},
        types=2,
    ),
    "electra": EncoderVariant("ElectraModel", "ElectraConfig", {"embedding_size": 64}, types=2),
    "mpnet": EncoderVariant("MPNetModel", "MPNetConfig", {"pad_token_id": 1, "max_position_embeddings": 514}),
    "modernbert": EncoderVariant("ModernBertModel", "ModernBertConfig", MODERNBERT),
    "nomic-bert": EncoderVariant("NomicBertModel", "NomicBertConfig", types=2),
    "gte": EncoderVariant("GteModel", "GteConfig"),
    "jina-v3": EncoderVariant("JinaEmbeddingsV3Model", "JinaEmbeddingsV3Config"),
    "eurobert": EncoderVariant("EuroBertModel", "EuroBertConfig", {"num_key_value_heads": 2, "mask_token_id": 4}),
    "gemma3": EncoderVariant("Gemma3TextModel", "Gemma3TextConfig", GEMMA),
    "gemma4": EncoderVariant("Gemma4TextModel", "Gemma4TextConfig", GEMMA4),
    "qwen2": EncoderVariant("Qwen2Model", "Qwen2Config", {"is_causal": False, "num_key_value_heads": 2}),
}
CLASSIFIERS = {
    "bert": EncoderVariant("BertForSequenceClassification", "BertConfig", {"num_labels": 3}, types=2),
    "roberta": EncoderVariant("RobertaForSequenceClassification", "RobertaConfig", {"pad_token_id": 1, "num_labels": 1}),
    "distilbert": EncoderVariant("DistilBertForSequenceClassification", "DistilBertConfig", {**DISTILBERT, "num_labels": 3}),
    "mpnet": EncoderVariant(
        "MPNetForSequenceClassification", "MPNetConfig", {"pad_token_id": 1, "max_position_embeddings": 514, "num_labels": 1}
    ),
    "modernbert": EncoderVariant("ModernBertForSequenceClassification", "ModernBertConfig", {**MODERNBERT, "num_labels": 3}),
    "modernbert-mean": EncoderVariant(
        "ModernBertForSequenceClassification", "ModernBertConfig", {**MODERNBERT, "classifier_pooling": "mean"}
    ),
    "modernbert-biases": EncoderVariant(
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**MODERNBERT, "classifier_bias": True, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    "gte": EncoderVariant("GteForSequenceClassification", "GteConfig", {"num_labels": 1}),
    "nomic-bert": EncoderVariant("NomicBertForSequenceClassification", "NomicBertConfig", {"num_labels": 3}, types=2),
    "eurobert": EncoderVariant(
        "EuroBertForSequenceClassification",
        "EuroBertConfig",
        {"num_key_value_heads": 2, "mask_token_id": 4, "classifier_pooling": "mean"},
    ),
    "eurobert-late": EncoderVariant(
        "EuroBertForSequenceClassification", "EuroBertConfig", {"num_key_value_heads": 2, "mask_token_id": 4}
    ),
    "jina-v3": EncoderVariant("JinaEmbeddingsV3ForSequenceClassification", "JinaEmbeddingsV3Config", {"num_labels": 2}),
    "deberta": EncoderVariant("DebertaV2ForSequenceClassification", "DebertaV2Config", {**DEBERTA, "num_labels": 3}),
    "electra": EncoderVariant("ElectraForSequenceClassification", "ElectraConfig", {"embedding_size": 64}, types=2),
    "gpt2": EncoderVariant("GPT2ForSequenceClassification", "GPT2Config", {"is_causal": False, "num_labels": 3}),
}

TOKEN_CLASSIFIERS = {
    "bert": EncoderVariant("BertForTokenClassification", "BertConfig", {"num_labels": 5}, types=2),
    "xlm-roberta": EncoderVariant("XLMRobertaForTokenClassification", "XLMRobertaConfig", {"pad_token_id": 1, "num_labels": 5}),
    "distilbert": EncoderVariant("DistilBertForTokenClassification", "DistilBertConfig", {**DISTILBERT, "num_labels": 5}),
    "modernbert": EncoderVariant("ModernBertForTokenClassification", "ModernBertConfig", {**MODERNBERT, "num_labels": 5}),
    "eurobert": EncoderVariant(
        "EuroBertForTokenClassification", "EuroBertConfig", {"num_key_value_heads": 2, "mask_token_id": 4, "num_labels": 5}
    ),
    "nomic-bert": EncoderVariant("NomicBertForTokenClassification", "NomicBertConfig", {"num_labels": 5}, types=2),
    "mpnet": EncoderVariant(
        "MPNetForTokenClassification", "MPNetConfig", {"pad_token_id": 1, "max_position_embeddings": 514, "num_labels": 5}
    ),
    "gte": EncoderVariant("GteForTokenClassification", "GteConfig", {"num_labels": 5}),
    "jina-v3": EncoderVariant("JinaEmbeddingsV3ForTokenClassification", "JinaEmbeddingsV3Config", {"num_labels": 5}),
    "qwen2": EncoderVariant(
        "Qwen2ForTokenClassification", "Qwen2Config", {"is_causal": False, "num_key_value_heads": 2, "num_labels": 5}
    ),
    "gpt2": EncoderVariant("GPT2ForTokenClassification", "GPT2Config", {"is_causal": False, "num_labels": 5}),
}

MASKED = {
    "bert": EncoderVariant("BertForMaskedLM", "BertConfig"),
    "xlm-roberta": EncoderVariant("XLMRobertaForMaskedLM", "XLMRobertaConfig", {"pad_token_id": 1}),
    "distilbert": EncoderVariant("DistilBertForMaskedLM", "DistilBertConfig", DISTILBERT),
    "modernbert": EncoderVariant("ModernBertForMaskedLM", "ModernBertConfig", MODERNBERT),
    "mpnet": EncoderVariant("MPNetForMaskedLM", "MPNetConfig", {"pad_token_id": 1, "max_position_embeddings": 514}),
}


def write_splade(folder: Path, **pooling: str) -> None:
    """Writes the files by which sentence-transformers makes sparse vectors of a masked language model."""
    modules = [
        {"path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},
        {"path": "1_SpladePooling", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling/config.json").write_text(json.dumps(pooling))


TASKS = {"retrieval.query": "find: ", "retrieval.passage": "a page: ", "text-matching": ""}
"""Tasks of a checkpoint with adapters, and the texts that go before its inputs."""
RANK, ALPHA = 2, 3


def write_adapted(folder: Path) -> dict[str | None, PreTrainedModel]:
    """Writes a checkpoint in the form of Jina 3's authors, with adapters of all matrices and tables.

    Returns the model of each task, and without one. Their code adds `lora_B[task] @ lora_A[task] * alpha / rank` to a matrix,
    and `lora_A[task] @ lora_B[task]` to a table.
    """
    plain = write_encoder(folder, ENCODERS["jina-v3"])
    stored, count = load_file(folder / "model.safetensors"), len(TASKS)
    tensors, changed = dict[str, torch.Tensor](), [dict(stored) for _ in TASKS]
    for name, weight in stored.items():
        module = f"roberta.{name.removesuffix('.weight')}"
        if weight.dim() < 2:
            tensors[f"roberta.{name}"] = weight
            continue
        rows, columns = weight.shape
        is_table = "embeddings" in name
        a = torch.randn(count, rows, RANK) if is_table else torch.randn(count, RANK, columns) * columns**-0.5
        b = torch.randn(count, RANK, columns) if is_table else torch.randn(count, rows, RANK)
        b *= 0.2  # with much larger ones attention is so sharp that roundings show
        for at, weights in enumerate(changed):
            weights[name] = weight + (a[at] @ b[at] if is_table else b[at] @ a[at]) * ALPHA / RANK
        values = {"original": weight, "0.lora_A": a, "0.lora_B": b}
        tensors |= {f"{module}.parametrizations.weight.{part}": value for part, value in values.items()}
    models: dict[str | None, PreTrainedModel] = {None: plain}
    for task, weights in zip(TASKS, changed, strict=True):
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        models[task] = type(plain).from_pretrained(folder).eval()
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["XLMRobertaLoRA"], "model_type": "xlm-roberta", "position_embedding_type": "rotary"}
    config |= {"rotary_emb_base": 20000.0, "rope_parameters": None, "emb_pooler": None, "matryoshka_dimensions": [8, 32, 64]}
    adapters = {"lora_adaptations": [*TASKS], "lora_rank": RANK, "lora_alpha": ALPHA, "load_trained_adapters": True}
    edit_json(folder / "config.json", {**config, **adapters, "task_instructions": TASKS})
    return models


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer whose tokens are letters, with BERT's around them."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in string.ascii_lowercase)]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


def write_encoder(folder: Path, variant: EncoderVariant) -> PreTrainedModel:
    """Writes the variant with seeded weights to `folder`, and returns the model."""
    torch.manual_seed(0)
    config = getattr(transformers, variant.config)(**{**SHAPE, **variant.changes})
    model: PreTrainedModel = getattr(transformers, variant.model)(config).eval()
    spread(model)
    model.save_pretrained(folder)
    return model
