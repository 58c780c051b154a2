"""The decoder: one for all architectures of the registry, driven by `ModelConfig`. Encoders are decoders that cache nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import torch

from starling_engine.attention.base import AttentionWeights
from starling_engine.attention.select import Backend
from starling_engine.expert_parallel.ranks import ExpertRanks
from starling_engine.kernels.attention_metadata import AttentionMetadata
from starling_engine.kernels.attention_plan import QueryBlocks
from starling_engine.kernels.kv_cache import LayerCache
from starling_engine.layers.embedding import Vocabulary
from starling_engine.layers.experts import Experts, ExpertsSelector
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear import Linear, MethodSelector, stacked
from starling_engine.layers.low_rank import LowRankTable, adapter_columns
from starling_engine.layers.rope import build_rotations
from starling_engine.model_config.config import ModelConfig
from starling_engine.model_config.registry import definition_of
from starling_engine.models.added_embeddings import AddedEmbeddings
from starling_engine.models.build_context import BuildContext
from starling_engine.models.classification_head import ClassificationHead, MaskedHead
from starling_engine.models.decoder_layer import Attention, DecoderLayer
from starling_engine.models.disentangled import DistanceTable
from starling_engine.models.distance_bias import DistanceBias
from starling_engine.models.layer_end import LayerInputTable
from starling_engine.models.projections import Projections
from starling_engine.models.splade import add_tokens
from starling_engine.models.streams import StreamHead
from starling_engine.models.streams_layer import StreamsLayer
from starling_engine.models.token_heads import TokenHeads, add_weights
from starling_engine.parallel.communicator import ALONE, Communicator, no_tick
from starling_engine.parallel.rank_part import Rows, whole
from starling_engine.topology.shard import ALL, Shard
from starling_engine.weights.cache_scales import ENDINGS
from starling_engine.weights.weight_slot import WeightSlot


@dataclass(slots=True)
class ForwardContext:
    """Cache and positions of one step, per layer. Valid for one forward pass.

    kv         each layer's cache, written by the pass
    attention  each layer's metadata; layers of one KV group share the object. Block tables of layers with a state alone are of its
               blocks; a layer that caches nothing has any group's
    rows       [R] int64, the tokens whose hidden states are wanted, or None for all: past its attention, the last layer computes
               no others
    tick       called once a layer, so that a watcher sees progress inside a long step
    types      [T] int64, each token's segment, for a model that has segments; None: all are of the first
    adapters   [T] int64, each token's adapter of the checkpoint; their number is none; None: no token has one
    state      metadata of the layers that have a state, for those that attend beside it
    runs       block tables of compressed runs, by the layers that have such
    """

    kv: Sequence[LayerCache]
    attention: list[AttentionMetadata]
    rows: torch.Tensor | None = None
    tick: Callable[[], None] = no_tick
    types: torch.Tensor | None = None
    adapters: torch.Tensor | None = None
    state: AttentionMetadata | None = None
    runs: Mapping[int, torch.Tensor] = field(default_factory=dict)


class HasWeightSlots(Protocol):
    """A part of the model that a checkpoint fills."""

    def weight_slots(self) -> dict[str, WeightSlot]: ...


class Decoder:
    """Embedding, layers, final norm and logits head. Built empty; `weights/loader.py` fills it.

    max_position             the longest sequence, in tokens, that the table of rotations is for; default: the model's limit
    experts_method_selector  default: the one that is best on this machine
    tensor                   the ranks that split every matrix among them; all of them make the same calls
    stage                    the layers that are here: the first stage embeds, the last one has the final norm and the head
    expert_ranks             as in `BuildContext`; `weight_slots` then names the experts that the placement in force gives this rank
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        linear_method_selector: MethodSelector,
        attention_backend: Backend,
        max_position: int | None = None,
        experts_method_selector: ExpertsSelector | None = None,
        tensor: Communicator = ALONE,
        stage: Shard = ALL,
        expert_ranks: ExpertRanks | None = None,
    ) -> None:
        self.config = config
        self.stage = stage
        self.layers = config.stage_layers(stage)
        self._names = definition_of(config.architecture).names
        self._distance_bias: DistanceBias | None = None
        if config.traits.distance_buckets:
            self._distance_bias = DistanceBias(config, self._names.distance_bias, tensor, dtype, device)
        build = BuildContext(
            config=config,
            names=self._names,
            dtype=dtype,
            device=device,
            methods=linear_method_selector,
            experts=experts_method_selector or select_experts_method(dtype, device),
            backend=attention_backend,
            rotations=build_rotations(config, max_position or config.max_position, device),
            tensor=tensor,
            expert_ranks=expert_ranks,
            distance_bias=self._distance_bias,
        )
        distances = config.traits.distances
        self._distances = None if distances is None else DistanceTable(build, distances)
        build = replace(build, distances=self._distances)
        self._build = build
        self._arithmetic = build.arithmetic
        self._embedding_scale = torch.tensor(config.traits.embedding_scale, dtype=dtype).item()
        adapters = config.adapters
        self._adapter_columns = torch.empty(0) if adapters is None else adapter_columns(adapters, dtype, device)
        self._elsewhere = self._held_elsewhere(build)
        self.projections = Projections(config.pooler.projections if stage.last else (), device)
        has_heads = config.pooler.retrieval is not None and stage.last
        self.token_heads = TokenHeads(config.hidden_size, device) if has_heads else None
        streams = config.traits.streams
        self._layers = [] if streams is not None else [DecoderLayer(build, index) for index in self.layers]
        self._streams_layers = [] if streams is None else [StreamsLayer(build, index) for index in self.layers]
        """Layers of a model with several residual streams, in place of others."""
        self._stream_head = StreamHead(build) if streams is not None and stage.last else None
        self._norm = build.norm(self._names.norm) if config.traits.final_norm else None
        self._build_ends(build)

    def forward(self, ids: torch.Tensor, ctx: ForwardContext, arrived: torch.Tensor | None = None) -> torch.Tensor:
        """ids [T] int64 -> hidden [R, hidden_size] of `ctx.rows` (or of all tokens) after the final norm.

        With `arrived` [T, hidden_size] ids are not embedded: later stages take the output of the stage before. All but the last
        return [T, hidden_size] for the next one, or all residual streams of a model with several. Writes the step's keys and values
        to `ctx.kv`.
        """
        hidden, adapters = arrived, None if ctx.adapters is None else self._adapter_columns[ctx.adapters]
        if hidden is None:
            hidden = self.embed(ids, ctx.attention[0].positions, ctx.types, adapters)
        if self._streams_layers:
            return self._through_streams(hidden, ids, ctx)
        inputs = None if self._layer_inputs is None else self._layer_inputs.forward(ids, hidden)
        x: Rows = hidden
        residual: torch.Tensor | None = None
        last = len(self._layers) - 1 if self.stage.last else -1
        for index, (layer, kv, meta) in enumerate(zip(self._layers, ctx.kv, ctx.attention, strict=True)):
            rows = ctx.rows if index == last else None
            layer_input = None if inputs is None else inputs[index]
            x, residual = layer.forward(x, residual, kv, meta, rows, ctx.state, adapters, layer_input)
            ctx.tick()
        if not self.stage.last or self._norm is None:
            return whole(x) if residual is None else self._arithmetic.add(whole(x), residual)
        return self._norm.forward(x, residual)[0]

    def _through_streams(self, x: torch.Tensor, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Takes x [T, streams * hidden_size] through the layers, or embeddings [T, hidden_size], with which each stream begins."""
        streams = self.config.traits.streams
        assert streams is not None and self._norm is not None, "its layers have several residual streams"
        x = x.view(len(x), -1, self.config.hidden_size)
        if self.stage.first:
            x = x.expand(-1, streams.count, -1)
        for index, layer, kv, meta in zip(self.layers, self._streams_layers, ctx.kv, ctx.attention, strict=True):
            rows = ctx.rows if index == self.config.num_layers - 1 else None
            x = layer.forward(x, kv, meta, ids, ctx.runs.get(index), rows)
            ctx.tick()
        return x.flatten(1) if self._stream_head is None else self._norm.forward(self._stream_head.forward(x), None)[0]

    def embed(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        types: torch.Tensor | None = None,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Looks up ids and positions [T] int64 -> [T, hidden_size], in the first stage.

        `types` and `adapters` are as in `AddedEmbeddings.add`.
        """
        found = self._embed(ids)
        found = found if self._embedding_scale == 1 else self._arithmetic.multiply(found, self._embedding_scale)
        if self._adapted_embedding is not None and adapters is not None:
            found = self._adapted_embedding.add(found, ids, adapters)
        return found if self._added_embeddings is None else self._added_embeddings.add(found, positions, types, adapters)

    def forward_without_tokens(self, tick: Callable[[], None] = no_tick) -> None:
        """Runs a step without tokens of its own: makes the exchanges of `forward` with the ranks that have some, layer by layer."""
        for layer in self._all_layers:
            if layer.moe is not None:
                layer.moe.forward_without_tokens()
            tick()

    @property
    def _all_layers(self) -> Sequence[DecoderLayer | StreamsLayer]:
        return [*self._layers, *self._streams_layers]

    @property
    def experts(self) -> dict[int, Experts]:
        """The experts of each layer here that has any, by its index among all such layers of the model."""
        return {layer.moe.moe_layer: layer.moe.experts for layer in self._all_layers if layer.moe is not None}

    @property
    def kv_scaled(self) -> dict[str, AttentionWeights]:
        """Attention weights that have scales for a cache in fp8, by the name of the attention in the checkpoint."""
        mixers = [mixer for layer in self._layers for mixer in layer.mixers]
        attentions = [mixer for mixer in mixers if isinstance(mixer, Attention)]
        return {attention.name: attention.weights for attention in attentions if attention.weights.stores}

    @property
    def attention_weights(self) -> dict[int, AttentionWeights]:
        """Weights of attention to keys and values, by the place of their layer among those here."""
        found = ((at, layer.attention) for at, layer in enumerate(self._layers))
        return {at: attention.weights for at, attention in found if isinstance(attention, Attention)}

    def share_kv_scales(self) -> None:
        """Gives layers that read another one's cache the scales of that."""
        first = self.layers.start
        for at, layer in zip(self.layers, self._layers, strict=False):
            source, reader = self.config.layers[at].cache_of, layer.attention
            if source is not None and isinstance(reader, Attention):
                owner = self._layers[source - first].attention
                assert isinstance(owner, Attention), "it has keys and values"
                reader.weights.key_scale, reader.weights.value_scale = owner.weights.key_scale, owner.weights.value_scale

    @property
    def cascades(self) -> bool:
        """True where attention can read common blocks of sequences once for all of them."""
        return self._build.backend.cascades

    @property
    def tensor_ranks(self) -> int:
        """Returns how many ranks share each layer."""
        return self._build.tensor.shard.count

    @property
    def query_blocks(self) -> QueryBlocks | None:
        """Returns how the query blocks of prompts are listed for attention; None where it takes no list."""
        config, shard = self.config, self._build.tensor.shard
        if not self._build.backend.takes_query_blocks:
            return None
        itemsize = self._build.dtype.itemsize
        if config.mla is not None:
            return QueryBlocks.of_latents(shard.of(config.mla.num_heads).size, itemsize)
        heads = shard.of(config.num_heads).size
        kinds = {QueryBlocks.of(own.dim, itemsize, heads // shard.heads(own.count).size) for own in config.kv_heads}
        return kinds.pop() if len(kinds) == 1 else None  # programs search where layers have blocks of several sizes

    @property
    def eager_reason(self) -> str | None:
        """The reason why a step cannot be recorded and replayed, since the host takes part in it; None where it can be."""
        build = self._build
        if self.config.has_state:
            return "layers with a recurrent state are not recorded"
        if not build.tensor.capturable:
            return "sums over ranks pass through the host"
        if build.expert_ranks is not None and not build.expert_ranks.capturable:
            return "the host exchanges the numbers of tokens that go to experts of other ranks"
        if not build.backend.capturable:
            return f"{build.backend.name} attention reads lengths on the host"
        methods = {experts.method.name for experts in self.experts.values() if not experts.method.capturable}
        return f"{', '.join(sorted(methods))} experts are counted on the host" if methods else None

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [S, hidden_size] -> [S, vocab_size] fp32, on every rank; written to `out`, if given."""
        assert self._lm_head is not None, "an encoder gives no tokens"
        if self._masked_head is not None:
            states = self._masked_head.forward(hidden)
            return self._masked_head.add_bias(self._vocabulary.gather(self._lm_head.forward(states, torch.float32)))
        if out is None:
            return self._finished(self._vocabulary.gather(self._lm_head.forward(hidden, torch.float32)))
        if self._vocabulary.is_whole:
            self._lm_head.forward_into(hidden, out)
        else:
            # A GPU's ranks send logits in the model's dtype: one copy widens them.
            out.copy_(self._vocabulary.gather(self._lm_head.forward(hidden, torch.float32 if out.is_cpu else None)))
        return self._finished(out)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden_size], pooled or not -> [N, labels] fp32, in the last stage of a model with such a head."""
        assert self._head is not None, "this stage has no head"
        return self._head.forward(hidden)

    def add_lexical(self, hidden: torch.Tensor, ids: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """hidden [N, hidden_size], ids [N] -> weights [vocab_size] fp32 of these tokens and those `before`."""
        if self.token_heads is not None:
            weights = hidden.new_zeros(self.config.vocab_size, dtype=torch.float32) if before is None else before
            return add_weights(ids, self.token_heads.weights(hidden.float()), weights)
        assert self.config.pooler.splade is not None, "checked with the parameters"
        return add_tokens(self.config.pooler.splade, self.logits(hidden), before)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes states [..., hidden_size] fp32, pooled or not, through the model's dense modules of sentence-transformers."""
        return self.projections.forward(hidden)

    def project_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Makes the vectors of tokens of their states [N, hidden_size] fp32."""
        return self.project(hidden) if self.token_heads is None else self.token_heads.vectors(hidden)

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        """Divides and caps logits, in place, where the model does."""
        divisor, cap = self.config.traits.logit_divisor, self.config.traits.logit_cap
        return logits if divisor == 1 and cap == 0 else self._arithmetic.finish_logits(logits, divisor, cap)

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        for part in self._parts:
            slots.update(part.weight_slots())
        return slots

    def duplicates(self) -> dict[str, str]:
        if not self.config.tie_word_embeddings or not self.config.causal:
            return {}
        return {f"{self._names.lm_head}.weight": f"{self._names.embedding}.weight"}

    def ignores(self, name: str) -> bool:
        """Returns whether a tensor without a slot is harmless.

        Tensors of other ranks are, and experts that this rank may load later. So are draft layers behind the last one, and scales
        of a cache in fp8.
        """
        return name.endswith((*self._names.ignored, *ENDINGS)) or name.startswith(self._elsewhere)

    def _held_elsewhere(self, build: BuildContext) -> tuple[str, ...]:
        """Returns prefixes of the names of tensors that this rank does not load with the model."""
        config, names = self.config, self._names
        behind = range(config.num_layers, config.num_layers + config.traits.num_draft_layers)
        layers = [i for i in (*range(config.num_layers), *behind) if i not in self.layers]
        others = [*names.left_out, *(f"{names.layer.format(i)}." for i in layers)]
        if not self.stage.first:
            others += [f"{name}." for name in (names.embedding, names.positions, names.token_types, names.embedding_norm)]
        if not config.causal:
            others.append(f"{names.lm_head}.")
        if not self.stage.last:
            others += [f"{name}." for name in (names.norm, names.lm_head, names.other_lm_head) if name]
            others.append(names.head_streams)
        # Some checkpoints have them, and nothing reads them.
        readers = [names.layer.format(i) for i, layer in enumerate(config.layers) if layer.cache_of is not None]
        others += [f"{layer}.{name}." for layer in readers for name in (names.k, names.v, names.k_norm)]
        if config.moe is not None and build.expert_ranks is not None:
            # Experts that this rank has are known by their slots, in spite of the prefix.
            experts = (f"{names.experts}.", *chain(*names.fused_experts))
            others += [f"{names.layer.format(i)}.{name}" for i in self.layers for name in experts]
        return tuple(others)

    def _build_ends(self, build: BuildContext) -> None:
        """Builds embedding and head. Tied, they are one matrix under either name. Those of other stages stay empty."""
        config, names = self.config, self._names
        tied = config.tie_word_embeddings
        self._vocabulary = Vocabulary(config.vocab_size, build.tensor)
        rows, traits = self._vocabulary.share, config.traits
        self._lm_head: Linear | None = None
        if config.causal or config.masked_head:
            head, other = (names.embedding, names.lm_head) if tied else (names.lm_head, names.other_lm_head)
            shape = stacked([head], [rows], config.hidden_size, traits.head_bias, lookup=tied, fused=other)
            self._lm_head = build.linear(shape)
        table = self._lm_head if tied else None
        if table is None:
            table = build.linear(stacked([names.embedding], [rows], config.hidden_size, only_lookup=True))
        self._embed = self._vocabulary.lookup(table.method.lookup)
        has_table = traits.positions_from is not None or traits.token_types or traits.embedding_norm
        self._added_embeddings = AddedEmbeddings(build) if has_table and self.stage.first else None
        self._adapted_embedding: LowRankTable | None = None
        if config.adapters is not None and self.stage.first:
            sizes = (config.vocab_size, config.hidden_size)
            self._adapted_embedding = LowRankTable(config.adapters, names.embedding, sizes, build.dtype, build.device)
        inputs = traits.layer_inputs
        self._layer_inputs = None if inputs is None else LayerInputTable(build, inputs)
        ends = (table, self._adapted_embedding, self._added_embeddings, self._layer_inputs)
        first: tuple[HasWeightSlots | None, ...] = ends if self.stage.first else ()
        first = (*first, self._distance_bias, self._distances)
        self._head = ClassificationHead(build, config.classifier) if config.classifier and self.stage.last else None
        self._masked_head = MaskedHead(build, config.masked_head) if config.masked_head and self.stage.last else None
        heads = (self._stream_head, self._norm, self._lm_head, self._head, self._masked_head)
        last: tuple[HasWeightSlots | None, ...] = heads if self.stage.last else ()
        self._parts: tuple[HasWeightSlots, ...] = tuple(part for part in (*first, *self._all_layers, *last) if part is not None)
