"""GLM-5, 5.1 and 5.2: DeepSeek-V3.2's latents, indexers and experts; layers may share the tokens that one of them chooses.

Which do is listed (`indexer_types`), or follows from a pattern or a step (arXiv 2603.12201).
"""

from dataclasses import replace

from starling_engine.model_config.deepseek import indexed_layers, listed_expert_layers, read_latents, read_sigmoid_moe, with_indexer
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import MoeConfig
from starling_engine.model_config.traits import Traits

LETTERS = {"F": "full", "S": "shared"}


def _traits(config: Fields) -> Traits:
    bias = config.boolean("attention_bias", False)
    return Traits(qkv_bias=bias, o_bias=bias, num_draft_layers=_num_drafts(config))


def _num_drafts(config: Fields) -> int:
    return config.integer("num_nextn_predict_layers", 1, low=0)


def _shape(config: Fields, num_heads: int) -> MlaShape:
    config.only("rope_interleave", True)
    shape = read_latents(config, num_heads, interleaved=True, nope_dim=192, value_dim=256)
    return with_indexer(config, shape, q_rank=2048, heads=32, interleaved=True)


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    kinds = _indexer_types(config, num_layers)
    layers = zip(indexed_layers(config, num_layers), kinds, strict=False)
    return tuple(replace(layer, shares_choice=kind == "shared") for layer, kind in layers)


def _indexer_types(config: Fields, num_layers: int) -> list[str]:
    """Returns "full" or "shared" for each layer, and maybe for layers for drafts behind them."""
    name = next((each for each in ("indexer_types", "index_topk_pattern") if config.has(each)), None)
    if name is None:
        step, offset = config.integer("index_topk_freq", 1, low=0), config.integer("index_skip_topk_offset", 2, low=0)
        kinds = ["shared" if max(layer - offset + 1, 0) % max(step, 1) else "full" for layer in range(num_layers)]
    else:
        written = config.get(name)
        kinds = [LETTERS.get(each, each) for each in written] if isinstance(written, str) else config.texts(name)
        lengths = range(num_layers, num_layers + _num_drafts(config) + 1)
        if len(kinds) not in lengths or not set(kinds) <= set(LETTERS.values()):
            raise config.error(name, f"must have num_hidden_layers ({num_layers}) of {' or '.join(LETTERS.values())}")
    if kinds[0] != "full":
        raise config.error(name or "index_skip_topk_offset", "must let the first layer be full: none before it chooses tokens")
    return kinds


def _moe(config: Fields, num_layers: int) -> MoeConfig | None:
    listed = listed_expert_layers(config, num_layers)
    return read_sigmoid_moe(config, num_layers, first=3, groups=(1, 1), scaling=2.5, layers=listed)


GLM_MOE_DSA = ModelDefinition(
    architecture="GlmMoeDsaForCausalLM", traits=_traits, layers=_layers, mla=_shape, moe=_moe, rms_eps=1e-5
)
