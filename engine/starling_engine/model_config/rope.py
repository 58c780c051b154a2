"""The rotary embedding of a config. `layers/rope.py` makes the tables.

Both forms are read: `rope_theta` beside `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

import math
from dataclasses import dataclass, field

from starling_engine.errors import UnsupportedModel
from starling_engine.model_config.fields import Fields

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, the band between is interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation: every frequency is divided by `factor`. `original_max_position` is 0 where the config has none."""

    factor: float
    original_max_position: int = 0


@dataclass(frozen=True, kw_only=True)
class NtkScaling:
    """GTE's: the base is multiplied by `factor`, and frequencies are divided so that the slowest one is `factor` times slower."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071). `attention_factor` multiplies cosines and sines; by default the usual one by `attn_factor`."""

    factor: float
    original_max_position: int
    attention_factor: float | None = None
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753): each frequency is divided by a factor of its own. `attention_factor` as in `YarnScaling`.

    There are `short` factors for sequences of up to `original_max_position` tokens and `long` ones for others. Keys of the one do
    not go with keys of the other: an engine takes one kind for all sequences, by the longest that it serves.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float

    def factors(self, max_model_len: int) -> tuple[float, ...]:
        """Returns the factors of an engine that serves so many tokens a sequence."""
        return self.long if self.is_long(max_model_len) else self.short

    def is_long(self, max_model_len: int) -> bool:
        """Says whether these are the factors for long sequences."""
        return max_model_len > self.original_max_position


@dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """Gemma 4's: frequencies are spread over whole heads, of which only the fastest rotate, each divided by `factor`.

    Element i of a head rotates with element i + head_dim / 2, as if all did.
    """

    factor: float = 1.0


Scaling = LinearScaling | Llama3Scaling | NtkScaling | YarnScaling | LongRopeScaling | ProportionalScaling | None


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Base wavelength and scaling; `scaling` None is the plain rotary embedding.

    `partial` is the share of a head's elements that are rotated: the first ones. `head_dim` is that of layers whose heads are of
    another size than the model's; 0: they are of the model's.
    """

    theta: float = DEFAULT_THETA
    scaling: Scaling = field(default=None)
    partial: float = 1.0
    head_dim: int = 0

    def rotary_dim(self, head_dim: int) -> int:
        """Returns how many elements of a head are rotated, where the model's have `head_dim`."""
        return int((self.head_dim or head_dim) * self.partial)

    def max_position(self, written: int) -> int:
        """Returns the longest context in tokens, where the config's max_position_embeddings is `written`.

        With Llama 3.1's scaling that is the length after it. With YaRN it may be either, and with linear scaling, too, if the
        config has the length before: without that, it is taken for it (see `within_training`).
        """
        match self.scaling:
            case LinearScaling(factor=factor, original_max_position=0):
                return int(written * factor)
            case (
                LinearScaling(factor=factor, original_max_position=original)
                | YarnScaling(factor=factor, original_max_position=original)
            ):
                return max(written, int(original * factor))
            case _:
                return written


def read_rope(config: Fields, default_theta: float = DEFAULT_THETA, partial: float | None = None) -> RopeConfig:
    """Reads the rotary embedding. Raises UnsupportedModel for an unknown kind of scaling, ModelError for a bad field.

    `partial` is the default of a family that may rotate a part of each head; None: this one does not.
    """
    fields = _rope_fields(config)
    rotated = config.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial or 1.0))
    if partial is None and rotated != 1.0:
        raise UnsupportedModel(f"{config.source}: partial_rotary_factor: this family's heads are rotated whole")
    if not 0 < rotated <= 1:
        raise config.error("partial_rotary_factor", "must be above 0, and at most 1")
    return _read(fields, config, _theta(config, default_theta), rotated)


def read_rope_of(fields: Fields, config: Fields, theta: float, partial: float) -> RopeConfig:
    """Reads the rotary embedding that `fields` of a config describe, for layers that rotate that part of each head."""
    return _read(fields, config, theta, partial)


def read_ropes(config: Fields, theta: float, sliding_theta: float | None = None) -> tuple[RopeConfig, ...]:
    """Reads the rotary embeddings of layers with full attention, and of those that slide, which old configs never scale.

    `sliding_theta` is the default of sliding layers whose base has a field of its own (Gemma 3); None: it is that of all layers.
    """
    own = None if sliding_theta is None else config.number("rope_local_base_freq", sliding_theta, low=1.0)
    nested = config.child("rope_parameters")
    if nested.has("full_attention"):
        shared = _theta(config, theta)
        full, sliding = nested.child("full_attention"), nested.child("sliding_attention")
        return _read(full, config, shared), _read(sliding, config, shared if own is None else own)
    full_rope = read_rope(config, theta)
    return full_rope, RopeConfig(theta=full_rope.theta if own is None else own)


def _theta(config: Fields, default: float) -> float:
    """Reads the base of all layers that have none of their own."""
    return config.number("rope_theta", default, low=1.0)


def _read(fields: Fields, config: Fields, default_theta: float, partial: float = 1.0) -> RopeConfig:
    theta = fields.number("rope_theta", default_theta, low=1.0)
    kind = fields.text("rope_type", fields.text("type", "default"))
    return RopeConfig(theta=theta, scaling=_read_scaling(kind, fields, config), partial=partial)


def _rope_fields(config: Fields) -> Fields:
    fields = config.child("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    nested = [fields.get(name) for name in fields.names() if isinstance(fields.get(name), dict)]
    if not nested:
        return fields
    if any(other != nested[0] for other in nested):
        raise UnsupportedModel(f"{fields.source}: layer types with different rotary embeddings are not supported")
    return Fields(nested[0], fields.source)


def _read_scaling(kind: str, fields: Fields, config: Fields) -> Scaling:
    match kind:
        case "default" | "mrope":  # of text, positions in time, height and width are the same
            return None
        case "dynamic" if not fields.has("alpha"):
            return None  # it stretches sequences beyond max_position_embeddings alone, which is the longest one here
        case "proportional":
            return ProportionalScaling(factor=fields.number("factor", 1.0, low=1.0))
        case "linear":
            original = fields.integer("original_max_position_embeddings", 0, low=0)
            return LinearScaling(factor=fields.number("factor", low=1.0), original_max_position=original)
        case "ntk":
            if fields.has("mixed_b"):
                raise fields.error("mixed_b", "must be left out: mixed NTK scaling is not supported")
            return NtkScaling(factor=fields.number("factor", low=1.0))
        case "llama3":
            return Llama3Scaling(
                factor=fields.number("factor", low=1.0),
                low_freq_factor=fields.number("low_freq_factor"),
                high_freq_factor=fields.number("high_freq_factor"),
                original_max_position=_original_max_position(fields, config),
            )
        case "yarn":
            return _read_yarn(fields, config)
        case "longrope" | "su":
            return _read_longrope(fields, config)
    supported = "default, dynamic without alpha, linear, llama3, longrope, ntk, proportional, yarn"
    raise UnsupportedModel(f"{fields.source}: rope_type {kind!r} is not supported; supported: {supported}")


def _read_yarn(fields: Fields, config: Fields) -> YarnScaling:
    original = _original_max_position(fields, config)
    implied = config.integer("max_position_embeddings") / original
    return YarnScaling(
        factor=fields.number("factor", implied, low=1.0),
        original_max_position=original,
        attention_factor=fields.number("attention_factor") if fields.has("attention_factor") else None,
        attn_factor=fields.number("attn_factor", 1.0),
        beta_fast=fields.number("beta_fast", 0.0) or 32.0,
        beta_slow=fields.number("beta_slow", 0.0) or 1.0,
        mscale=fields.number("mscale", 0.0),
        mscale_all_dim=fields.number("mscale_all_dim", 0.0),
        truncate=fields.boolean("truncate", True),
    )


def _read_longrope(fields: Fields, config: Fields) -> LongRopeScaling:
    original = _original_max_position(fields, config, low=2)  # its logarithm divides
    factor = fields.number("factor", config.integer("max_position_embeddings") / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short=fields.numbers("short_factor"),
        long=fields.numbers("long_factor"),
        original_max_position=original,
        attention_factor=fields.number("attention_factor", default),
    )


def _original_max_position(fields: Fields, config: Fields, low: int = 1) -> int:
    """Reads the length before scaling. As in transformers, the config's own field wins over the one in the scaling's object."""
    if config.has("original_max_position_embeddings"):
        return config.integer("original_max_position_embeddings", low=low)
    return fields.integer("original_max_position_embeddings", config.integer("max_position_embeddings"), low=low)
