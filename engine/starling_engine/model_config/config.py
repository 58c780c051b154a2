"""A model's config, read from its config.json and generation_config.json. Imports no torch."""

import logging
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from starling_engine.errors import InvalidRequest, ModelError, UnsupportedModel
from starling_engine.gguf.config import read_config, read_pooling
from starling_engine.gguf.reader import GgufFile, is_gguf, open_gguf
from starling_engine.model_config.adapters import AdapterConfig
from starling_engine.model_config.attention_heads import MAX_WIDTH, NO_HEADS, check_own_heads, read_attention
from starling_engine.model_config.base_model import is_base_model
from starling_engine.model_config.classifier import MASKED_ENDING, ClassifierConfig, HeadShape, read_classifier
from starling_engine.model_config.compressed import CompressedShape
from starling_engine.model_config.definition import LENGTH_FIELD, ModelDefinition
from starling_engine.model_config.fields import Fields
from starling_engine.model_config.gated_delta import GatedDeltaConfig
from starling_engine.model_config.layer import FeedForward, KVHeads, LayerConfig
from starling_engine.model_config.mamba import MambaConfig
from starling_engine.model_config.mamba2 import Mamba2Config
from starling_engine.model_config.mla_shape import MlaShape
from starling_engine.model_config.moe import MoeConfig, check_experts
from starling_engine.model_config.pooler import PoolerConfig, pooler_of, read_pooler
from starling_engine.model_config.quantization import QuantizationConfig, read_config_json, read_quantization
from starling_engine.model_config.registry import definition_of, find_definition
from starling_engine.model_config.rope import LongRopeScaling, RopeConfig
from starling_engine.model_config.scaled_length import within_training
from starling_engine.model_config.short_conv import ShortConvConfig
from starling_engine.model_config.tied_head import has_own_head
from starling_engine.model_config.tokenizer_end import end_of_tokenizer
from starling_engine.model_config.traits import Traits
from starling_engine.params import SamplingParams
from starling_engine.topology.shard import Shard

logger = logging.getLogger("starling.models")

GENERATION_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty")
DTYPES = ("float32", "bfloat16", "float16")
TIED = "tie_word_embeddings"
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")
MAX_LENGTH, MAX_VOCABULARY = 1 << 24, 1 << 24
"""More than any model has of tokens in a sequence, and of known ones. A config with more is damaged.

Rotations of so many positions are made before a checkpoint's tensors are compared with it. The longest sequences are Llama 4's, of
10 M tokens.
"""
STATE_LENGTH = 1 << 15
"""Tokens of the longest sequence where neither the model nor the engine's arguments say one: a state has room for any number."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model's shape: a decoder's, or an encoder's, which is not `causal`. Sizes are in elements, `max_position` in tokens.

    Where no layer attends, there are no heads: their numbers and sizes are 0. So is the width of an MLP that no layer has.

    intermediate_size   of a plain MLP; layers of `moe` have experts instead
    hidden_act          activation of the MLP's gate, or of its one matrix if it has no gate
    num_kv_heads        of layers that have no others of their own; so is head_dim (`heads_of`)
    ropes               rotary embeddings, which layers name by their index
    layers              what layers differ in, from the first to the last
    traits              what they have in common
    mla                 sizes of multi-head latent attention, where the model has it; head_dim is then a query's
    compressed          sizes of attention with compressed runs of tokens, where layers have such
    gated_delta         sizes of Gated DeltaNet, where layers have it; `mamba` those of Mamba, `mamba2` those of Mamba-2,
                        `short_conv` those of gated short convolutions
    quantization        how the checkpoint has quantized its weights, where it has
    generation_defaults sampling parameters that the model's authors recommend, by OpenAI's names
    pooler              how the authors make vectors and scores
    has_lm_head         False for a checkpoint of a base model, which gives vectors and no tokens; its head counts as tied
    """

    architecture: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_eps: float
    hidden_act: str
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...]
    traits: Traits
    tie_word_embeddings: bool
    mla: MlaShape | None
    moe: MoeConfig | None
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: QuantizationConfig | None
    generation_defaults: dict[str, float]
    pooler: PoolerConfig = field(default_factory=PoolerConfig)
    has_lm_head: bool = True
    classifier: ClassifierConfig | None = None
    """The head for classification; such a model gives no tokens."""
    masked_head: HeadShape | None = None
    """The head for masked tokens, of a model that makes sparse vectors by it."""
    gated_delta: GatedDeltaConfig | None = None
    mamba: MambaConfig | None = None
    mamba2: Mamba2Config | None = None
    short_conv: ShortConvConfig | None = None
    compressed: CompressedShape | None = None
    adapters: AdapterConfig | None = None
    """Low-rank adapters that a request for vectors may name, of a checkpoint that has some."""
    causal: bool = True
    """Tokens see those before them alone. Where they see all, nothing is cached, and there are no tokens to sample."""

    @property
    def stream_size(self) -> int:
        """Elements of a token between layers: of all its residual streams."""
        return self.hidden_size * (1 if self.traits.streams is None else self.traits.streams.count)

    @property
    def vector_size(self) -> int:
        """Numbers of a vector that is not cut."""
        projections = self.pooler.projections
        return projections[-1].out_features if projections else self.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_state(self) -> bool:
        """Says if there are layers with a recurrent state."""
        return any(layer.has_state for layer in self.layers)

    @property
    def attends(self) -> bool:
        """Says if there are layers with keys and values."""
        return any(layer.attends for layer in self.layers)

    @property
    def usual_length(self) -> int:
        """The longest sequence, in tokens, of an engine whose arguments do not say."""
        chunk = max((layer.attention_chunk for layer in self.layers), default=0)
        if chunk:  # the length after which such a model needs the more memory that few have
            return min(self.max_position, chunk)
        if self.pooler.max_length is not None and not self.has_lm_head:
            return min(self.max_position, self.pooler.max_length)
        return STATE_LENGTH if not self.attends and self.max_position == MAX_LENGTH else self.max_position

    @property
    def windows(self) -> tuple[int, ...]:
        """Each layer's window."""
        return tuple(layer.window for layer in self.layers)

    @property
    def rotary_dims(self) -> tuple[int, ...]:
        """Elements of a head that each of `ropes` rotates."""
        return tuple(self.mla.rope_dim if self.mla else rope.rotary_dim(self.head_dim) for rope in self.ropes)

    @property
    def rotation_columns(self) -> int:
        """Columns of all tables of rotations; one that rotates nothing has two."""
        return sum(2 if at is None else self.rotary_dims[at] for at in self.named_ropes)

    @property
    def named_ropes(self) -> set[int | None]:
        """Rotary embeddings that layers need, by their index; None is of layers whose attention rotates nothing."""
        rotated_before = self.traits.qk_norm == "rotated head"
        return {layer.rope for layer in self.layers if layer.attends} | ({None} if rotated_before else set())

    def heads_of(self, layer: LayerConfig) -> KVHeads:
        """Returns the key-value heads of a layer."""
        return layer.kv_heads or KVHeads(self.num_kv_heads, self.head_dim)

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        """The key-value heads that layers have: one kind in most models. Without layers that attend there is none."""
        return tuple(dict.fromkeys(self.heads_of(layer) for layer in self.layers if layer.attends))

    @property
    def widest_mlp(self) -> int:
        """Width of the widest plain MLP."""
        return max((layer.mlp_size or 0 for layer in self.layers), default=0) or self.intermediate_size

    def stage_layers(self, stage: Shard) -> range:
        """Returns the layers of a pipeline stage: as many as any other's, or some more or fewer.

        Layers that share a choice of tokens stay with the one that makes it, and those that read another one's cache with that.
        """
        share = stage.balanced(self.num_layers)
        return range(self._border(share.start), self._border(share.start + share.size))

    def _border(self, at: int) -> int:
        """Returns the last layer up to `at` with which a stage may begin; the end is one, too."""
        while at < self.num_layers and (self.layers[at].shares_choice or self._is_read_across(at)):
            at -= 1
        return at

    def _is_read_across(self, at: int) -> bool:
        """Says if a layer from `at` on reads the cache of one before."""
        return any(layer.cache_of is not None and layer.cache_of < at for layer in self.layers[at:])

    def attention_scratch(self, queries: int, context: int) -> int:
        """Returns the most elements that a layer's attention takes beside its inputs and outputs, where it is torch's own.

        It is of a step with at most `queries` tokens, and sequences of at most `context`.
        """
        if self.mla is not None:
            return self.mla.scratch_elements(queries, context)
        shape = self.compressed
        layers = {(layer.window, layer.runs) for layer in self.layers}
        return 0 if shape is None else max(shape.scratch_elements(queries, context, *layer) for layer in layers)

    def rope_factors(self, max_model_len: int) -> str:
        """Names the factors that an engine of this longest sequence takes of LongRoPE's; empty for all other models.

        Keys that were rotated by the others are no good to it.
        """
        scalings = [rope.scaling for rope in self.ropes if isinstance(rope.scaling, LongRopeScaling)]
        return ", ".join("long" if scaling.is_long(max_model_len) else "short" for scaling in scalings)


def load_model_config(path: Path, tokenizer: Path | None = None) -> ModelConfig:
    """Reads the configs of the checkpoint at `path`, a folder or a GGUF file. Its tokenizer may lie in another folder.

    Raises ModelError naming the field that is missing or wrong, UnsupportedModel for an architecture or a feature that this
    engine does not have.
    """
    if is_gguf(path):
        return read_gguf_config(open_gguf(path))
    config = read_config_json(path)
    generation = path / "generation_config.json"
    extra = Fields.read(generation) if generation.exists() else Fields({}, generation.name)
    model = replace(parse_model_config(config, extra), pooler=read_pooler(path, config))
    _check_projections(model)
    model = replace(model, pooler=_possible(model))
    if model.pooler.splade is None:
        model = replace(model, masked_head=None)
    model = replace(model, max_position=within_training(path, model.ropes, model.max_position))
    model = _with_end(model, end_of_tokenizer(tokenizer or path))
    if not model.has_lm_head:
        return model
    if model.tie_word_embeddings:
        return replace(model, tie_word_embeddings=not has_own_head(path, definition_of(model.architecture).names))
    return replace(model, tie_word_embeddings=True, has_lm_head=False) if is_base_model(path) else model


def _check_projections(model: ModelConfig) -> None:
    """Raises ModelError for a dense module that does not take what comes before it."""
    width = model.hidden_size
    for one in model.pooler.projections:
        if one.in_features != width:
            raise ModelError(
                f"{one.folder}/config.json: in_features must be {width}, as what comes before it, got {one.in_features}"
            )
        width = one.out_features


def _possible(model: ModelConfig) -> PoolerConfig:
    """Returns the pooler, with a fault where the layers cannot leave a query's expansion unseen, or a head is not there."""
    if model.pooler.splade is not None and (model.masked_head is None or not model.tie_word_embeddings):
        why = f"its SpladePooling needs a head for masked tokens, tied to the embedding, and {model.architecture} has none here"
        return replace(model.pooler, fault=why)
    multi = model.pooler.multi_vector
    if multi is None or multi.expansion is None or multi.expansion.seen:
        return model.pooler
    if model.causal or any(0 < window < multi.expansion.length for window in model.windows):
        why = "its query_expansion has attend: false, which is not supported in a decoder, or beyond a window"
        return replace(model.pooler, fault=why)
    return model.pooler


def _with_end(model: ModelConfig, token: int | None) -> ModelConfig:
    """Adds the tokenizer's end. Chat models that were trained from a base one often have only that base's in the other files."""
    if token is None or token >= model.vocab_size or token in model.eos_token_ids:
        return model
    return replace(model, eos_token_ids=(*model.eos_token_ids, token))


@lru_cache(maxsize=2)
def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Does the same as `load_model_config`, for a file that is open; once a file."""
    config, generation = read_config(file)
    model = parse_model_config(Fields(config, file.path.name), Fields(generation, file.path.name))
    return replace(model, pooler=pooler_of(read_pooling(file)))


def parse_model_config(config: Fields, generation: Fields) -> ModelConfig:
    """Does the same as `load_model_config`, from the fields of the two files."""
    definition = find_definition(config.texts("architectures"))
    if definition.nested and config.has(definition.nested):
        nested = config.child(definition.nested)
        definition = definition.texts.get(nested.text("model_type", ""), definition)
        # The head is the whole model's, and so is what is said of it.
        of_text = {name: nested.get(name) for name in nested.names() if name != TIED or not config.has(TIED)}
        config = Fields({**config.values, **of_text}, nested.source)
    config = config.renamed(definition.field_names)
    if definition.defaults:
        config = config.with_defaults(definition.defaults)
    causal = config.boolean("is_causal", definition.causal) and not _sees_both(config)
    quantization = read_quantization(config)
    if quantization is not None and definition.names.transposed:
        what = "weights in codes (quantization_config): its matrices have a column for each output"
        raise UnsupportedModel(f"{config.source}: {definition.architecture} is not supported with {what}")
    num_layers = definition.num_layers(config)
    moe = definition.moe(config, num_layers)
    if moe:
        check_experts(config, moe)
    layers = _with_experts(definition.layers(config, num_layers), moe)
    heads = read_attention(config, definition) if any(layer.attends for layer in layers) else NO_HEADS
    length_field = definition.length_field if config.has(definition.length_field) else LENGTH_FIELD
    # A model of a state alone need not name a longest sequence.
    length = config.integer(length_field, None if heads.count else MAX_LENGTH)
    ropes = heads.ropes
    max_position = _within_one_chunk(config, min((rope.max_position(length) for rope in ropes), default=length))
    for layer in layers:
        check_own_heads(config, heads.count, layer)
    traits, classifier = definition.traits(config), read_classifier(config, definition.head, definition.token_head)
    tied = config.boolean(TIED, definition.tie_word_embeddings)
    max_position -= (traits.positions_from or 0) if traits.positions_counted else 0
    has_state = any(layer.has_state for layer in layers)
    gated_delta = definition.gated_delta(config) if has_state else None
    mamba = definition.mamba(config) if has_state else None
    mamba2 = definition.mamba2(config) if has_state else None
    short_conv = definition.short_conv(config) if has_state else None
    if not causal and (traits.attention_cap or traits.attention_sinks or heads.mla is not None or has_state):
        has_no = "soft caps, sinks, latents or layers with a recurrent state"
        raise UnsupportedModel(f"{config.source}: attention in both directions has no {has_no} here")
    if max_position < 1:
        raise config.error(length_field, f"must be above {traits.positions_from}, the rows that no position takes")
    if max_position > MAX_LENGTH:
        raise config.error(length_field, f"must leave sequences of at most {MAX_LENGTH} tokens, scaling included")
    bos = config.token_ids("bos_token_id")
    return ModelConfig(
        architecture=definition.architecture,
        hidden_size=config.integer("hidden_size", high=MAX_WIDTH),
        num_heads=heads.count,
        num_kv_heads=heads.kv_count,
        head_dim=heads.dim,
        intermediate_size=_read_mlp_size(config, definition, layers),
        vocab_size=config.integer("vocab_size", high=MAX_VOCABULARY),
        max_position=max_position,
        rms_eps=config.number(definition.eps_field, definition.rms_eps),
        hidden_act=_read_activation(config, definition, moe),
        ropes=ropes,
        layers=layers,
        traits=traits,
        tie_word_embeddings=tied or classifier is not None,
        mla=heads.mla,
        moe=moe,
        dtype=_read_dtype(config, is_quantized=quantization is not None),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_read_eos(config, generation),
        quantization=quantization,
        generation_defaults=_read_generation_defaults(generation, config.integer("vocab_size")),
        has_lm_head=causal and classifier is None,
        classifier=classifier,
        masked_head=_masked_head(config, definition),
        gated_delta=gated_delta,
        mamba=mamba,
        mamba2=mamba2,
        short_conv=short_conv,
        compressed=heads.compressed,
        adapters=definition.adapters(config),
        causal=causal,
    )


def _masked_head(config: Fields, definition: ModelDefinition) -> HeadShape | None:
    is_there = any(name.endswith(MASKED_ENDING) for name in config.texts("architectures"))
    return definition.masked_head(config) if is_there and definition.masked_head else None


def _within_one_chunk(config: Fields, max_position: int) -> int:
    """Returns the longest sequence that dual chunk attention (Qwen 2.5 1M) computes as plain attention does."""
    chunked = config.child("dual_chunk_attention_config")
    length = chunked.integer("original_max_position_embeddings", max_position)
    if length >= max_position:
        return max_position
    _log_chunks(length, max_position)
    return length


@lru_cache
def _log_chunks(length: int, written: int) -> None:
    """Logs once a process, and not each time that the config is read."""
    logger.info("sequences have at most %d of %d tokens: there is no attention in chunks, which longer ones need", length, written)


def _with_experts(layers: tuple[LayerConfig, ...], moe: MoeConfig | None) -> tuple[LayerConfig, ...]:
    """Gives layers experts."""
    if moe is None:
        return layers
    part: FeedForward = "mlp and experts" if moe.beside_mlp else "experts"
    having = frozenset(moe.layers)
    return tuple(replace(layer, feed_forward=part) if at in having else layer for at, layer in enumerate(layers))


def _read_mlp_size(config: Fields, definition: ModelDefinition, layers: tuple[LayerConfig, ...]) -> int:
    """Returns the width of a plain MLP, which models with experts alone may write, too."""
    if all(layer.feed_forward == "none" for layer in layers):
        return 0
    return definition.mlp_size(config, config.integer(definition.mlp_field))


def _read_activation(config: Fields, definition: ModelDefinition, moe: MoeConfig | None) -> str:
    """Reads `hidden_activation`, which is Gemma's name for it, or `hidden_act`. Experts without a gate of their own have SiLU."""
    field = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    written = config.text(field, definition.activation)
    name = definition.activation_names.get(written, written)
    possible: tuple[str, ...] = tuple(dict.fromkeys((*ACTIVATIONS, definition.activation)))
    where = ""
    if moe and moe.gate is None and moe.gated:
        possible, where = ("silu",), " for experts"
    if definition.activation == "gelu_pytorch_tanh":  # what "gelu" means there, transformers does not read from this field
        possible = tuple(each for each in possible if each != "gelu")
    if name not in possible:
        names = ", ".join((*possible, *(each for each, ours in definition.activation_names.items() if ours in possible)))
        raise UnsupportedModel(f"{config.source}: {config.written(field)} {written!r} is not supported{where}; supported: {names}")
    return name


def _read_dtype(config: Fields, *, is_quantized: bool) -> str:
    """Reads `dtype` of transformers 5, or `torch_dtype` of 4. Without either the weights are float32.

    Quantized weights, which often name float16, are computed in bfloat16: the kernels for their codes are.
    """
    name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"{config.source}: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return "bfloat16" if is_quantized else name


def _sees_both(config: Fields) -> bool:
    """Says if tokens see those behind them. Gemma 4 has a word for it, and another one for images, which text is not."""
    written = config.get("use_bidirectional_attention")
    return written == "all" or (written != "vision" and config.boolean("use_bidirectional_attention", False))


def _read_eos(config: Fields, generation: Fields) -> tuple[int, ...]:
    """Reads the ids of both files: chat models often list the end of a turn only in generation_config.json."""
    ids = config.token_ids("eos_token_id") + generation.token_ids("eos_token_id")
    return tuple(dict.fromkeys(token for token in ids if token < config.integer("vocab_size")))


def _read_generation_defaults(generation: Fields, vocab_size: int) -> dict[str, float]:
    """Reads what requests take that do not say. Raises ModelError for what each of them would be refused for."""
    found: dict[str, Any] = {name: generation.number(name) for name in GENERATION_FIELDS if generation.has(name)}
    if generation.has("top_k"):
        found["top_k"] = generation.integer("top_k", low=-1)
    if generation.has("max_new_tokens"):
        found["max_tokens"] = generation.integer("max_new_tokens")
    try:
        SamplingParams(**found).validate(vocab_size)
    except InvalidRequest as error:
        raise ModelError(f"{generation.source}: {error}") from error
    return found
