"""A model's config, read from its config.json and generation_config.json. Imports no torch."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from starling_engine.errors import ModelError, UnsupportedModel
from starling_engine.gguf.config import read_config
from starling_engine.gguf.reader import GgufFile, is_gguf, open_gguf
from starling_engine.model_config.definition import ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import MoeConfig
from starling_engine.model_config.quantization import QuantizationConfig, read_config_json, read_quantization
from starling_engine.model_config.registry import find_definition
from starling_engine.model_config.rope import RopeConfig, read_rope

GENERATION_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty")
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu",)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's shape. Sizes are in elements, `max_position` in tokens.

    intermediate_size   of a plain MLP; layers of `moe` have experts instead
    windows             per layer the tokens that a query sees, itself included; 0 means all
    mla                 sizes of multi-head latent attention, where the model has it; head_dim is then a query's
    qkv_bias, o_bias    biases of the attention's projections (with `mla` qkv_bias: of those that compress)
    mlp_bias            biases of the MLP's projections
    qk_norm             RMSNorm of each query and key head before rotation
    quantization        how the checkpoint has quantized its weights, where it has
    num_draft_layers    layers for drafts that a checkpoint may hold behind the last one; not loaded
    generation_defaults sampling parameters that the model's authors recommend, by OpenAI's names
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_eps: float
    hidden_act: str
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    mla: MlaShape | None
    num_draft_layers: int
    moe: MoeConfig | None
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None
    generation_defaults: dict[str, float]

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.mla.rope_dim if self.mla else self.head_dim


def load_model_config(path: Path) -> ModelConfig:
    """Reads the configs of the checkpoint at `path`, a folder or a GGUF file.

    Raises ModelError naming the field that is missing or wrong, UnsupportedModel for an architecture or a feature that this
    engine does not have.
    """
    if is_gguf(path):
        return read_gguf_config(open_gguf(path))
    config = read_config_json(path)
    generation = path / "generation_config.json"
    extra = Fields.read(generation) if generation.exists() else Fields({}, generation.name)
    return parse_model_config(config, extra)


@lru_cache(maxsize=2)
def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Does the same as `load_model_config`, for a file that is open; once a file."""
    config, generation = read_config(file)
    return parse_model_config(Fields(config, file.path.name), Fields(generation, file.path.name))


def parse_model_config(config: Fields, generation: Fields) -> ModelConfig:
    """Does the same as `load_model_config`, from the fields of the two files."""
    definition = find_definition(config.texts("architectures"))
    quantization = read_quantization(config)
    num_layers = config.integer("num_hidden_layers")
    num_heads, num_kv_heads = _read_heads(config)
    rope = read_rope(config, definition.rope_theta)
    traits = definition.traits(config)
    mla = definition.mla(config, num_heads)
    bos = config.token_ids("bos_token_id")
    return ModelConfig(
        architecture=definition.architecture,
        hidden_size=config.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=mla.key_dim if mla else _read_head_dim(config, num_heads, definition),
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position=rope.max_position(config.integer("max_position_embeddings")),
        rms_eps=config.number("rms_norm_eps", definition.rms_eps),
        hidden_act=_read_activation(config),
        rope=rope,
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        windows=definition.windows(config, num_layers),
        mla=mla,
        num_draft_layers=traits.num_draft_layers,
        moe=definition.moe(config, num_layers),
        dtype=_read_dtype(config, is_quantized=quantization is not None),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_read_eos(config, generation),
        quantization=quantization,
        generation_defaults=_read_generation_defaults(generation),
    )


def _read_heads(config: Fields) -> tuple[int, int]:
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{config.source}: num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    return num_heads, num_kv_heads


def _read_head_dim(config: Fields, num_heads: int, definition: ModelDefinition) -> int:
    if config.has("head_dim") or definition.head_dim:
        head_dim = config.integer("head_dim", definition.head_dim)
    else:
        hidden_size = config.integer("hidden_size")
        if hidden_size % num_heads:
            raise ModelError(
                f"{config.source}: hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads}) "
                "when there is no head_dim"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"{config.source}: head_dim must be even to be rotated, got {head_dim}")
    return head_dim


def _read_activation(config: Fields) -> str:
    name = config.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{config.source}: hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return name


def _read_dtype(config: Fields, *, is_quantized: bool) -> str:
    """Reads `dtype` of transformers 5, or `torch_dtype` of 4. Without either the weights are float32.

    Quantized weights, which often name float16, are computed in bfloat16: the kernels for their codes are.
    """
    name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"{config.source}: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return "bfloat16" if is_quantized else name


def _read_eos(config: Fields, generation: Fields) -> tuple[int, ...]:
    """Reads the ids of both files: chat models often list the end of a turn only in generation_config.json."""
    ids = config.token_ids("eos_token_id") + generation.token_ids("eos_token_id")
    return tuple(dict.fromkeys(token for token in ids if token < config.integer("vocab_size")))


def _read_generation_defaults(generation: Fields) -> dict[str, float]:
    found = {name: generation.number(name) for name in GENERATION_FIELDS if generation.has(name)}
    if generation.has("top_k"):
        found["top_k"] = generation.integer("top_k", low=-1)
    if generation.has("max_new_tokens"):
        found["max_tokens"] = generation.integer("max_new_tokens")
    return found
