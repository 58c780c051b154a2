"""Falcon-H1: attention and Mamba-2 side by side in each layer, and a multiplier almost everywhere."""

from dataclasses import replace

from starling_engine.model_config.bamba import NAMES
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig
from starling_engine.model_config.mamba2 import GatedNorm, Mamba2Config, read_mamba2
from starling_engine.model_config.traits import Traits


def _layers(_config: Fields, num_layers: int) -> tuple[LayerConfig, ...]:
    return (LayerConfig(mixer="attention and mamba2"),) * num_layers


def _multipliers(config: Fields, name: str, count: int) -> tuple[float, ...]:
    found = config.numbers(name) if config.has(name) else (1.0,) * count
    if len(found) != count:
        raise config.error(name, f"must have {count} numbers")
    return found


def _traits(config: Fields) -> Traits:
    """Reads the multipliers. That of keys multiplies scores."""
    bias = config.boolean("attention_bias", False)
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    head = config.number("lm_head_multiplier", 1.0)
    if not head:
        raise config.error("lm_head_multiplier", "must be above 0")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
    return Traits(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        attention_scale=config.number("key_multiplier", 1.0) * head_dim**-0.5,
        attention_in_scale=config.number("attention_in_multiplier", 1.0),
        attention_out_scale=config.number("attention_out_multiplier", 1.0),
        mlp_gate_scale=gate,
        mlp_out_scale=down,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_divisor=1.0 / head,
    )


def _mamba2(config: Fields) -> Mamba2Config:
    norm: GatedNorm = "none"
    if config.boolean("mamba_rms_norm", False):
        norm = "gate last" if config.boolean("mamba_norm_before_gate", True) else "gate first"
    gate, x, b, c, dt = _multipliers(config, "ssm_multipliers", 5)
    return replace(
        read_mamba2(config, config.integer("mamba_d_ssm") if config.has("mamba_d_ssm") else None),
        out_bias=config.boolean("projectors_bias", False),
        norm=norm,
        norm_eps=config.number("rms_norm_eps", 1e-5),
        in_scale=config.number("ssm_in_multiplier", 1.0),
        part_scales=(gate, x, b, c, dt),
        out_scale=config.number("ssm_out_multiplier", 1.0),
    )


FALCON_H1 = ModelDefinition(
    architecture="FalconH1ForCausalLM",
    traits=_traits,
    layers=_layers,
    mamba2=_mamba2,
    rms_eps=1e-5,
    names=NAMES,
)
