"""Inputs that each layer has of a token beside the residual stream, and what ends a layer that has them (Gemma 4)."""

import torch

from starling_engine.layers.activation import activation_of, gate_mul
from starling_engine.layers.embedding import Vocabulary
from starling_engine.layers.linear import stacked
from starling_engine.model_config.traits import LayerInputs
from starling_engine.models.build_context import BuildContext
from starling_engine.weights.weight_slot import WeightSlot, copy_slot


class LayerInputTable:
    """Makes the inputs of all layers of a step's tokens: half of their ids, half of their embeddings.

    The table of ids is split over ranks as the embedding is. Each rank has the projection whole.
    """

    def __init__(self, build: BuildContext, inputs: LayerInputs) -> None:
        config, names = build.config, build.names
        self._layers, self._size = config.num_layers, inputs.size
        width = self._layers * inputs.size
        vocabulary = Vocabulary(inputs.rows, build.tensor)
        self._table = build.linear(stacked([names.layer_table], [vocabulary.share], width, only_lookup=True))
        self._look_up = vocabulary.lookup(self._table.method.lookup)
        self._projection = build.linear(stacked([names.layer_projection], [width], config.hidden_size))
        self._norm = build.norm(names.layer_projection_norm, inputs.size)
        self._id_scale = torch.tensor(inputs.size**0.5, dtype=build.dtype).item()
        self._scale = config.hidden_size**-0.5
        self._arithmetic = build.arithmetic

    def forward(self, ids: torch.Tensor, embeddings: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """ids [T] int64, embeddings [T, hidden_size] -> of each layer [T, size]."""
        projected = self._arithmetic.multiply(self._projection.forward(embeddings), self._scale).view(-1, self._size)
        of_ids = self._arithmetic.multiply(self._look_up(ids), self._id_scale).view(-1, self._size)
        both = self._arithmetic.add(self._norm.forward(projected, None)[0], of_ids)
        return self._arithmetic.multiply(both, 2**-0.5).view(len(ids), self._layers, self._size).unbind(1)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {**self._table.weight_slots(), **self._projection.weight_slots(), **self._norm.weight_slots()}


class LayerEnd:
    """Adds a gated projection of the layer's input to the stream, where it has one, and multiplies the stream by a number.

    The projection is small, so each rank has it whole.
    """

    def __init__(self, build: BuildContext, prefix: str) -> None:
        config, names, inputs = build.config, build.names, build.config.traits.layer_inputs
        self._arithmetic = build.arithmetic
        self._scalar = torch.empty(1, dtype=build.dtype, device=build.device)
        self._scalar_name = f"{prefix}.{names.layer_scalar}"
        self._activate = activation_of(config.hidden_act, build.dtype, build.device)
        self._open = gate_mul(build.dtype, build.device)
        self._slots = {self._scalar_name: copy_slot(self._scalar)}
        if inputs is None:
            return
        self._gate = build.linear(stacked([f"{prefix}.{names.layer_input_gate}"], [inputs.size], config.hidden_size))
        self._projection = build.linear(stacked([f"{prefix}.{names.layer_input_projection}"], [config.hidden_size], inputs.size))
        self._norm = build.norm(f"{prefix}.{names.layer_input_norm}")
        for part in (self._gate, self._projection, self._norm):
            self._slots |= part.weight_slots()

    def forward(self, stream: torch.Tensor, layer_input: torch.Tensor | None) -> torch.Tensor:
        """stream [T, hidden_size], layer_input [T, size] -> the stream behind the layer, which is overwritten."""
        if layer_input is not None:
            opened = self._open(self._activate(self._gate.forward(stream)), layer_input)
            stream = self._arithmetic.add(stream, self._norm.forward(self._projection.forward(opened), None)[0])
        return self._arithmetic.multiply_rows(stream, self._scalar)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return self._slots
