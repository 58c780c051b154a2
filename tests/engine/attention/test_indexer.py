"""Choices of an indexer, against those of transformers'; and attention to chosen tokens, in each form, written out in full."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from starling_engine.attention import mla_torch
from starling_engine.attention.indexer import IndexQuery, choose, spans_to_choose, store_keys
from starling_engine.attention.mla_torch import TorchMla
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.layers.rope import build_cos_sin
from starling_engine.model_config import mla_shape
from starling_engine.model_config.mla_shape import IndexShape, MlaShape
from starling_engine.model_config.rope import RopeConfig
from transformers import DeepseekV32Config, GlmMoeDsaConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, DeepseekV32RotaryEmbedding
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from tests.engine.attention.test_mla import FORMS, SIZES, turned, weights
from tests.engine.attention.test_paged import BLOCK, metadata
from tests.engine.slabs import in_slabs

CPU = torch.device("cpu")
TOP, HEADS, DIM, HIDDEN, RANK = 8, 8, 20, 48, 24
INDEX = IndexShape(num_heads=HEADS, dim=DIM, top=TOP, interleaved=False)
TABLES = torch.tensor([[7, 2, 9, 4, 1], [3, 8, 5, 0, 0], [6, 10, 0, 0, 0]], dtype=torch.int32)
LENGTHS = (37, 20, 9)
STEPS = ((21, 3, 1), (1, 15, 1), (13, 0, 5), (1, 1, 1), (1, 1, 1))
"""Tokens of each sequence in each step: chunks that end inside blocks, then one token each."""


@pytest.fixture(params=[False, True], ids=["roomy", "tight"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tight: everything is done in small pieces."""
    if request.param:
        monkeypatch.setattr(mla_shape, "SCRATCH", 2000)
        monkeypatch.setattr(mla_shape, "SCORED_ROWS", 3)
        monkeypatch.setattr(IndexShape, "keys_at_once", lambda _self, rows: rows + 4)
        for module in (mla_shape, mla_torch):
            monkeypatch.setattr(module, "QUERY_ROWS", 6)


def theirs(interleaved: bool) -> tuple[torch.nn.Module, DeepseekV32Config]:
    fields: dict[str, Any] = {"hidden_size": HIDDEN, "q_lora_rank": RANK, "qk_rope_head_dim": 8, "num_hidden_layers": 1}
    fields |= {"index_topk": TOP, "index_head_dim": DIM, "index_n_heads": HEADS, "max_position_embeddings": 64}
    torch.manual_seed(4)
    make, kind = (GlmMoeDsaConfig, GlmMoeDsaIndexer) if interleaved else (DeepseekV32Config, DeepseekV32Indexer)
    config = make(**fields, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    module = kind(config, 0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module, config


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("interleaved", [False, True], ids=["deepseek", "glm"])
def test_the_choice_is_that_of_transformers(interleaved: bool) -> None:
    indexer, config = theirs(interleaved)
    shape = MlaShape(**SIZES, index=replace(INDEX, interleaved=interleaved))
    cos_sin = build_cos_sin(RopeConfig(), 8, 64, CPU)
    generator = torch.Generator().manual_seed(0)
    inputs = [[torch.randn(length, width, generator=generator) for width in (HIDDEN, RANK)] for length in LENGTHS]
    kv = in_slabs(torch.full((12, BLOCK, shape.row_dim), float("nan")))
    kv[..., : shape.latent_dim] = 5.0
    done, found = [0, 0, 0], [[], [], []]
    for counts in STEPS:
        rows = [(start, count) for start, count in zip(done, counts, strict=True)]
        parts = [[x[start : start + n] for x in xs] for xs, (start, n) in zip(inputs, rows, strict=True)]
        x, q_in = (torch.cat(list(column)) for column in zip(*parts, strict=True))
        meta = metadata(rows, TABLES)
        with torch.inference_mode():
            store_keys(indexer.k_norm(indexer.wk(x)), shape, cos_sin, kv, meta)
            query = IndexQuery(indexer.wq_b(q_in), indexer.weights_proj(x))
            chosen = choose(query, shape, cos_sin, kv, meta, spans_to_choose(shape, meta))
        for sequence, part in enumerate(chosen.split(counts)):
            found[sequence].append(part)
            done[sequence] += counts[sequence]
    assert (kv[..., : shape.latent_dim] == 5.0).all(), "latents are left alone"
    for parts, (x, q_in) in zip(found, inputs, strict=True):
        mask = torch.full((len(x), len(x)), float("-inf")).triu(1)[None]
        rope = DeepseekV32RotaryEmbedding(config)(x[None], torch.arange(len(x))[None])
        with torch.inference_mode():
            expected = indexer(x[None], q_in[None], rope, mask, None)[0]
        for position, (ours, other) in enumerate(zip(torch.cat(parts).tolist(), expected.tolist(), strict=True)):
            if position >= TOP:
                assert sorted(ours) == sorted(other)
            elif any(each >= 0 for each in ours):  # of a chunk whose later tokens have more before them
                assert sorted(ours) == [-1] * (TOP - position - 1) + list(range(position + 1))


def attended(q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, layer: Any, seen: torch.Tensor) -> torch.Tensor:
    """One sequence whose tokens see what `seen` [T, T] says -> [T, H * value_dim]."""
    shape, tokens = layer.shape, len(q)
    nope, rope = q.view(tokens, shape.num_heads, -1).split([shape.nope_dim, shape.rope_dim], -1)
    keys, values = torch.einsum("tr,hdr->thd", c, layer.w_uk), torch.einsum("tr,hdr->thd", c, layer.w_uv)
    scores = torch.einsum("qhd,khd->hqk", nope, keys)
    scores += torch.einsum("qhd,kd->hqk", turned(rope, layer), turned(k_rope[:, None], layer)[:, 0])
    shares = (scores * layer.scale).masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)


def some_choice(length: int, generator: torch.Generator) -> torch.Tensor:
    """Returns what each token of a sequence might see: itself and TOP - 1 others before it, [length, length] bool."""
    marks = torch.rand(length, length, generator=generator).masked_fill(torch.ones(length, length).triu(1).bool(), -1)
    best = marks.topk(min(TOP, length)).indices
    seen = torch.zeros(length, length).bool().scatter(1, best, True)
    return seen & torch.ones(length, length).tril().bool()


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_only_chosen_tokens_are_attended(form: str, dtype: torch.dtype, tolerance: float) -> None:
    layer = weights(FORMS[form](**SIZES, index=INDEX))
    narrow = replace(layer, w_uk=layer.w_uk.to(dtype), w_uv=layer.w_uv.to(dtype))
    shape, generator = layer.shape, torch.Generator().manual_seed(0)
    widths = (shape.num_heads * shape.key_dim, shape.kv_rank, shape.rope_dim)
    sequences = [[torch.randn(length, width, generator=generator).to(dtype) for width in widths] for length in LENGTHS]
    choices = [some_choice(length, generator) for length in LENGTHS]
    kv = in_slabs(torch.full((12, BLOCK, shape.row_dim), float("nan"), dtype=dtype))
    done, found = [0, 0, 0], [[], [], []]
    for counts in STEPS:
        rows = [(start, count) for start, count in zip(done, counts, strict=True)]
        parts = [[x[start : start + n] for x in xs] for xs, (start, n) in zip(sequences, rows, strict=True)]
        q, c, k_rope = (torch.cat(list(column)) for column in zip(*parts, strict=True))
        meta = metadata(rows, TABLES)
        meta.chosen = torch.cat([positions(choices[at][start : start + n]) for at, (start, n) in enumerate(rows)])
        out = TorchMla().forward(q, c, k_rope, narrow, kv, meta)
        for sequence, part in enumerate(out.split(counts)):
            found[sequence].append(part)
            done[sequence] += counts[sequence]
    assert kv[..., shape.latent_dim :].isnan().all(), "index keys are left alone"
    for parts, inputs, seen in zip(found, sequences, choices, strict=True):
        wide = replace(layer, w_uk=narrow.w_uk.float(), w_uv=narrow.w_uv.float())
        expected = attended(*(x.float() for x in inputs), wide, seen)
        torch.testing.assert_close(torch.cat(parts).float(), expected, atol=tolerance, rtol=tolerance)


def positions(seen: torch.Tensor) -> torch.Tensor:
    """seen [T, length] bool -> as `AttentionMetadata.chosen`."""
    listed = [row.nonzero().flatten().tolist() for row in seen]
    return torch.tensor([row + [-1] * (TOP - len(row)) for row in listed], dtype=torch.int32).view(-1, TOP)


def test_a_token_without_a_slot_stores_no_key() -> None:
    shape = MlaShape(**SIZES, index=INDEX)
    kv = in_slabs(torch.full((4, BLOCK, shape.row_dim), 5.0))
    meta: AttentionMetadata = metadata([(0, 3)], torch.tensor([[2]], dtype=torch.int32))
    meta.slot_mapping[1] = -1
    store_keys(torch.randn(3, DIM), shape, build_cos_sin(RopeConfig(), 8, 64, CPU), kv, meta)
    assert (kv != 5.0).any(-1).nonzero().tolist() == [[2, 0], [2, 2]]


def test_the_memory_plan_covers_scores_and_choices() -> None:
    index = IndexShape(num_heads=64, dim=128, top=2048, interleaved=False)
    shape = MlaShape(
        num_heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, interleaved=True, index=index
    )
    assert shape.scratch_elements(8192, 2048) == replace(shape, index=None).scratch_elements(8192, 2048)
    for queries, context in ((1, 4096), (4096, 4096), (512, 163_840), (8192, 163_840)):
        most, rows = shape.scratch_elements(queries, context), index.rows_at_once(context)
        scores = rows * (64 * min(context, index.keys_at_once(rows)) + context) * 4
        assert most * 2 >= scores + queries * min(2048, context) * 4 + shape.chosen_at_once() * 2048 * 576 * 2
        assert rows * context <= mla_shape.SCRATCH
    assert shape.scratch_elements(8192, 163_840) * 2 < 2 << 30
