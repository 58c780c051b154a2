"""Writes a checkpoint of random weights as large ones are published: safetensors in several files, with an index."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from starling_engine.model_config.config import ModelConfig

FILE_BYTES = 4 << 30
Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(model: ModelConfig) -> Iterator[Shapes]:
    """Names and shapes as the Llama and Qwen3 families have them: of the embedding, of each layer, of the end."""
    hidden, dim = model.hidden_size, model.head_dim
    yield {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    for layer in range(model.num_layers):
        shapes: Shapes = {
            "self_attn.q_proj": (model.num_heads * dim, hidden),
            "self_attn.k_proj": (model.num_kv_heads * dim, hidden),
            "self_attn.v_proj": (model.num_kv_heads * dim, hidden),
            "self_attn.o_proj": (hidden, model.num_heads * dim),
            "mlp.gate_proj": (model.intermediate_size, hidden),
            "mlp.up_proj": (model.intermediate_size, hidden),
            "mlp.down_proj": (hidden, model.intermediate_size),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        if model.traits.qk_norm:
            shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
        yield {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    yield {"model.norm.weight": (hidden,)} | ({} if model.tie_word_embeddings else {"lm_head.weight": (model.vocab_size, hidden)})


def write_weights(folder: Path, model: ModelConfig, room: int) -> int:
    """Bytes written, which stay in the page cache where it is large enough. Raises OSError when `room` bytes do not hold them."""
    assert model.moe is None and model.mla is None, "dense models of grouped-query attention"
    parts = list(tensor_shapes(model))
    total = sum(_bytes(shape) for part in parts for shape in part.values())
    if total > room:
        raise OSError(f"{total / 1e9:.1f} GB of weights do not fit in the {room / 1e9:.1f} GB that are free in {folder}")
    files = list(_files(parts))
    index: dict[str, str] = {}
    for number, shapes in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file({tensor: _draw(shape) for tensor, shape in shapes.items()}, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return total


def _files(parts: list[Shapes]) -> Iterator[Shapes]:
    """Parts that go into one file."""
    own: Shapes = {}
    for part in parts:
        if own and sum(map(_bytes, (own | part).values())) > FILE_BYTES:
            yield own
            own = {}
        own = own | part
    yield own


def _bytes(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(shape)


def _draw(shape: tuple[int, ...]) -> torch.Tensor:
    """Of a variance that keeps activations in range; on the GPU where there is one, for it draws in no time."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.randn(shape, dtype=torch.bfloat16, device=device)
    return numbers.mul_(shape[1] ** -0.5).cpu()
