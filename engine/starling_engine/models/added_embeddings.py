"""Tables that are added to the embeddings of tokens: learnt positions and segments; and the norm of the sum."""

import torch
from torch.nn import functional as F

from starling_engine.layers.low_rank import LowRankTable
from starling_engine.models.build_context import BuildContext
from starling_engine.weights.weight_slot import WeightSlot, copy_slot


class AddedEmbeddings:
    """Adds the row of each token's position, and of its segment, to embeddings, and norms them (arXiv 1810.04805, section 3).

    A model may have any of these. Every rank has them whole.
    """

    def __init__(self, build: BuildContext) -> None:
        config, names, traits = build.config, build.names, build.config.traits
        self._first = traits.positions_from or 0
        self._tables: dict[str, torch.Tensor] = {}
        if traits.positions_from is not None:
            rows = traits.positions_from + config.max_position
            self._tables[names.positions] = torch.empty(rows, config.hidden_size, dtype=build.dtype, device=build.device)
        if traits.token_types:
            self._tables[names.token_types] = torch.empty(
                traits.token_types, config.hidden_size, dtype=build.dtype, device=build.device
            )
        self._positions = self._tables.get(names.positions)
        self._types = self._tables.get(names.token_types)
        self._norm = build.norm(names.embedding_norm) if traits.embedding_norm else None
        self._adapted_types: LowRankTable | None = None
        if config.adapters is not None and traits.token_types:
            shape = (traits.token_types, config.hidden_size)
            self._adapted_types = LowRankTable(config.adapters, names.token_types, shape, build.dtype, build.device)

    def add(
        self, hidden: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None, adapters: torch.Tensor | None = None
    ) -> torch.Tensor:
        """hidden [T, hidden_size], positions [T] int64 -> [T, hidden_size]. `types` [T] int64; None: all tokens have type 0.

        `adapters` are as in `LowRankTable`.
        """
        if self._types is not None:
            hidden = hidden + (self._types[0] if types is None else F.embedding(types, self._types))
        if self._adapted_types is not None and adapters is not None:
            hidden = self._adapted_types.add(hidden, torch.zeros_like(positions) if types is None else types, adapters)
        if self._positions is not None:
            hidden = hidden + F.embedding(positions + self._first, self._positions)
        return hidden if self._norm is None else self._norm.forward(hidden, None)[0]

    def weight_slots(self) -> dict[str, WeightSlot]:
        slots = {f"{name}.weight": copy_slot(table) for name, table in self._tables.items()}
        for part in (self._norm, self._adapted_types):
            slots |= {} if part is None else part.weight_slots()
        return slots
