"""Mamba, Falcon Mamba and Mamba-2: each layer is a mixer with a state, and nothing else. None attends."""

from collections.abc import Callable
from dataclasses import replace

from starling_engine.model_config.definition import ModelDefinition, TensorNames, no_ropes
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.layer import LayerConfig, Mixer
from starling_engine.model_config.mamba import MambaConfig, MambaNames, no_mamba, read_mamba
from starling_engine.model_config.mamba2 import MIXER, Mamba2Config, read_mamba2
from starling_engine.model_config.traits import Traits

NAMES = TensorNames(
    embedding="backbone.embeddings",
    norm="backbone.norm_f",
    layer="backbone.layers.{}",
    attention_norm="norm",
    mamba=MambaNames(
        inputs="mixer.in_proj",
        conv="mixer.conv1d",
        made="mixer.x_proj",
        steps="mixer.dt_proj",
        a_log="mixer.A_log",
        skip="mixer.D",
        out="mixer.out_proj",
    ),
    mamba2=MIXER,
)
FIELD_NAMES = {
    "mamba_channels": "intermediate_size",
    "mamba_expand": "expand",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_rank": "time_step_rank",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
"""The families' names of fields, by ours."""


def _all_layers(mixer: Mixer) -> Callable[[Fields, int], tuple[LayerConfig, ...]]:
    return lambda _config, num_layers: (LayerConfig(mixer=mixer, feed_forward="none", rope=None),) * num_layers


def _traits(config: Fields) -> Traits:
    config.only("rms_norm", True)
    return Traits()


def _falcon_mamba(config: Fields) -> MambaConfig:
    return read_mamba(config, "without weights", "mixer_rms_eps")


def _mamba2(config: Fields) -> Mamba2Config:
    """Reads the sizes; the defaults are those of this family."""
    defaults = {"mamba_n_groups": 8, "mamba_d_state": 128}
    own = {"rms_norm_eps": config.number("layer_norm_epsilon", 1e-5)}
    return read_mamba2(config.with_defaults(defaults).with_values(own))


MAMBA = ModelDefinition(
    architecture="MambaForCausalLM",
    traits=_traits,
    layers=_all_layers("mamba"),
    ropes=no_ropes,
    mamba=read_mamba,
    eps_field="layer_norm_epsilon",
    rms_eps=1e-5,
    field_names=FIELD_NAMES,
    tie_word_embeddings=True,
    names=NAMES,
)
FALCON_MAMBA = replace(MAMBA, architecture="FalconMambaForCausalLM", mamba=_falcon_mamba)
MAMBA2 = replace(
    MAMBA,
    architecture="Mamba2ForCausalLM",
    layers=_all_layers("mamba2"),
    mamba=no_mamba,
    mamba2=_mamba2,
    field_names={**FIELD_NAMES, "mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_n_groups": "n_groups"},
    tie_word_embeddings=False,
)
