"""Encoders in GGUF files: BERT and its kin, Nomic Embed, Jina 3, ModernBERT and EuroBERT."""

from collections.abc import Mapping

from starling_engine.gguf.family import Config, GgufFamily, family, nothing
from starling_engine.gguf.heads import encoder_head, modernbert_head
from starling_engine.gguf.metadata import GgufMetadata
from starling_engine.gguf.names import BERT, FUSED_GATE_UP

TOKEN_TYPES, POSITIONS = "token_types.weight", "position_embd.weight"
LAYER_NORM = "layer_norm_eps"


def _bert(data: GgufMetadata) -> Config:
    """Reads the fields of BERT, and of RoBERTa and XLM-RoBERTa: the rows that no position takes are not in a file.

    DistilBERT is the one without segments.
    """
    found = _segments(data)
    if (table := data.file.tensors.get(POSITIONS)) is not None:
        found["max_position_embeddings"] = table.shape[0]
    return found if found["type_vocab_size"] else {**found, "architectures": ["DistilBertModel"]}


def _segments(data: GgufMetadata) -> Config:
    table = data.file.tensors.get(TOKEN_TYPES)
    return {"type_vocab_size": table.shape[0] if table else 0}


def _modernbert(data: GgufMetadata) -> Config:
    """Reads the fields of ModernBERT. A pattern of n says that every n-th layer sees all tokens, from the first one on."""
    slides, biased = data.get("attention.sliding_window_pattern"), "output_norm.bias" in data.file.tensors
    if not isinstance(slides, list):
        pattern = data.number("attention.sliding_window_pattern", 3)
        slides = [at % pattern > 0 for at in data.layers]
    return {
        "local_attention": data.number("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides[: data.num_layers]],
        "rope_local_base_freq": data.number("rope.freq_base_swa", 1e4),
        "norm_bias": biased,
        "hidden_act": data.get("hidden_act", "gelu"),
    }


ENCODERS: Mapping[str, GgufFamily] = {
    "bert": family("BertModel", _bert, BERT, eps=LAYER_NORM, head=encoder_head),
    "nomic-bert": family("NomicBertModel", _segments, BERT, eps=LAYER_NORM),
    "jina-bert-v3": family("JinaEmbeddingsV3Model", _segments, BERT, eps=LAYER_NORM),
    "modern-bert": family("ModernBertModel", _modernbert, BERT, FUSED_GATE_UP, eps="norm_eps", head=modernbert_head),
    "eurobert": family("EuroBertModel", nothing),
}
