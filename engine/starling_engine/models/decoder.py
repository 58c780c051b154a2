"""The decoder: written once, driven by `ModelConfig`; every architecture of the registry runs through it."""

from typing import Protocol

import torch

from starling_engine.attention.selector import Backend
from starling_engine.layers.embedding import Embedding
from starling_engine.layers.experts import ExpertsSelector
from starling_engine.layers.experts_select import select_experts_method
from starling_engine.layers.linear import MethodSelector, stacked
from starling_engine.layers.rope import build_cos_sin
from starling_engine.models.blocks import DecoderLayer
from starling_engine.models.build import BuildContext
from starling_engine.models.config import ModelConfig
from starling_engine.models.context import ForwardContext
from starling_engine.models.registry import DEFINITIONS
from starling_engine.weights.slot import Slot


class HasSlots(Protocol):
    """A part of the model that a checkpoint fills."""

    def slots(self) -> dict[str, Slot]: ...


class Decoder:
    """Embedding, layers, final norm and logits head. Built empty; `weights/loader.py` fills it.

    `max_position` is the longest sequence that will be run, in tokens; without it the model's own limit. It bounds only the
    table of rotations. Without `experts_method_selector` the experts of a model that has any are stored as this machine does best.
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
    ) -> None:
        self.config = config
        self._names = DEFINITIONS[config.architecture].names
        build = BuildContext(
            config=config,
            names=self._names,
            dtype=dtype,
            device=device,
            methods=linear_method_selector,
            experts=experts_method_selector or select_experts_method(dtype, device),
            backend=attention_backend,
            cos_sin=build_cos_sin(config.rope, config.rotary_dim, max_position or config.max_position, device),
        )
        self._layers = [DecoderLayer(build, index) for index in range(config.num_layers)]
        self._norm = build.norm(self._names.norm)
        self._build_ends(build)

    def forward(self, ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """ids [T] int64 -> hidden [R, hidden_size] of `ctx.rows` (or of all tokens) after the final norm.

        Writes the step's keys and values to `ctx.kv`.
        """
        hidden, residual = self._embed(ids), None
        last = len(self._layers) - 1
        for index, (layer, kv, meta) in enumerate(zip(self._layers, ctx.kv, ctx.attention, strict=True)):
            hidden, residual = layer.forward(hidden, residual, kv, meta, ctx.rows if index == last else None)
            ctx.tick()
        return self._norm.forward(hidden, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden_size] -> [S, vocab_size] fp32."""
        return self._head.forward(hidden, torch.float32)

    def slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        for part in self._parts:
            slots.update(part.slots())
        return slots

    def duplicates(self) -> dict[str, str]:
        if not self.config.tie_word_embeddings:
            return {}
        return {f"{self._names.head}.weight": f"{self._names.embedding}.weight"}

    def ignores(self, name: str) -> bool:
        """Also the layers behind the last one: they draft tokens for speculative decoding."""
        first = self.config.num_layers
        drafts = tuple(f"{self._names.layer.format(i)}." for i in range(first, first + self.config.num_draft_layers))
        return name.endswith(self._names.ignored) or name.startswith(drafts)

    def _build_ends(self, build: BuildContext) -> None:
        """The embedding and the head; tied, they are one matrix under the embedding's name."""
        config, names = self.config, self._names
        tied = config.tie_word_embeddings
        name = names.embedding if tied else names.head
        self._head = build.linear(stacked([name], [config.vocab_size], config.hidden_size, lookup=tied))
        middle: tuple[HasSlots, ...] = (*self._layers, self._norm)
        self._parts: tuple[HasSlots, ...]
        if tied:
            self._embed = self._head.method.lookup
            self._parts = (self._head, *middle)
        else:
            table = Embedding(names.embedding, config.vocab_size, config.hidden_size, build.dtype, build.device)
            self._embed = table.forward
            self._parts = (table, *middle, self._head)
