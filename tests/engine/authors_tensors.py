"""Tensors as the authors of families have them whose code is not in transformers, made of those of kin that are."""

import re
from collections.abc import Callable, Mapping

import torch

Rewrite = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
EXAONE = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "post_attention_layernorm": "ln_2",
    "gate_proj": "c_fc_0",
    "up_proj": "c_fc_1",
    "down_proj": "c_proj",
}
INTERNLM2 = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
CHATGLM = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.layers": "transformer.encoder.layers",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
HEAD_DIM = 16


def exaone(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns Llama's tensors under EXAONE 3's names."""
    return _renamed(tensors, EXAONE)


def internlm2(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns Llama's tensors under InternLM2's names: of each key-value head the queries, the key and the value in turn."""

    def in_turn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = len(k) // HEAD_DIM
        return torch.cat([each.view(heads, -1, each.shape[1]) for each in (q, k, v)], dim=1).flatten(0, 1)

    return _renamed(_fused(tensors, "attention.wqkv", in_turn), INTERNLM2)


def chatglm(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns GLM's tensors under ChatGLM's names: queries, keys and values are one matrix."""
    return _renamed(_fused(tensors, "self_attention.query_key_value", lambda *parts: torch.cat(parts)), CHATGLM)


def _fused(tensors: Mapping[str, torch.Tensor], name: str, join: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Joins the tensors of each layer's queries, keys and values to one below `name`."""
    found = {each: tensor for each, tensor in tensors.items() if not re.search(r"self_attn\.[qkv]_proj", each)}
    for each in tensors:
        if "self_attn.q_proj" in each:
            parts = [tensors[each.replace("q_proj", f"{kind}_proj")] for kind in "qkv"]
            found[each.replace("self_attn.q_proj", name)] = join(*parts)
    return found


def _renamed(tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    found = dict(tensors)
    for old, new in names.items():
        found = {name.replace(old, new): tensor for name, tensor in found.items()}
    return {name: tensor.contiguous() for name, tensor in found.items()}
