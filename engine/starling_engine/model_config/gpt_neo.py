"""GPT-Neo: GPT-2 whose scores are not scaled; every second layer slides; queries, keys and values have no biases."""

from dataclasses import replace

from starling_engine.model_config.definition import TensorNames, fixed_traits
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gpt2 import GPT2
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.traits import Traits

DEFAULT_WINDOW = 256
TRAITS = Traits(o_bias=True, mlp_bias=True, mlp_gate=False, norm="biased layer", positions_from=0, attention_scale=1.0)
KINDS = ("global", "local")
NAMES = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    q="attn.attention.q_proj",
    k="attn.attention.k_proj",
    v="attn.attention.v_proj",
    o="attn.attention.out_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    ignored=(".attn.attention.bias", ".attn.attention.masked_bias"),  # masks
)


def _layers(config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    """Returns layers of which those that are "local" slide.

    `attention_layers` lists the kinds, or `attention_types` has them in runs; else every second layer is local.
    """
    window = config.integer("window_size", DEFAULT_WINDOW)
    usual = [KINDS[layer % 2] for layer in range(num_layers)]
    kinds = config.texts("attention_layers") or _of_runs(config, num_layers) or usual
    if len(kinds) != num_layers or not set(kinds) <= set(KINDS):
        name = "attention_layers" if config.has("attention_layers") else "attention_types"
        raise config.error(name, f"must have num_layers ({num_layers}) of {' or '.join(KINDS)}")
    return tuple(LayerConfig(rope=None, window=window if kind == "local" else 0) for kind in kinds)


def _of_runs(config: Fields, num_layers: int) -> list[str]:
    """Returns the layers' kinds of `attention_types`: lists of kinds, and how often each list comes."""
    kinds: list[str] = []
    runs = config.get("attention_types") or []
    for run in runs if isinstance(runs, list) else [runs]:
        match run:
            case [[*names], int(times)] if all(isinstance(name, str) for name in names) and 0 < times <= num_layers:
                kinds += names * times
            case _:
                raise config.error("attention_types", "must have lists of kinds, each with how often it comes")
    return kinds


def _mlp_size(config: Fields, hidden_size: int) -> int:
    return config.integer("intermediate_size", 4 * hidden_size)


GPT_NEO = replace(
    GPT2,
    architecture="GPTNeoForCausalLM",
    traits=fixed_traits(TRAITS),
    layers=_layers,
    mlp_size=_mlp_size,
    defaults={"hidden_act": "gelu_new", "max_position_embeddings": 2048},
    field_names={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "hidden_act": "activation_function"},
    names=NAMES,
)
