"""Where a layer's experts are, as the ranks look it up for each token."""

import torch

from starling_engine.topology.placement import Layer


class ExpertRoutes:
    """The ranks that hold each expert of one layer."""

    def __init__(self, layer: Layer, num_experts: int, device: torch.device) -> None:
        ranks: list[list[int]] = [[] for _ in range(num_experts)]
        for rank, experts in enumerate(layer):
            for expert in experts:
                ranks[expert].append(rank)
        most = max(map(len, ranks))
        self._ranks = torch.tensor([(held * most)[:most] for held in ranks], device=device)
        self.copies = most > 1
        """Whether there are experts that several ranks hold."""
        self._copies = torch.tensor([len(held) for held in ranks], device=device) if most > 1 else None

    def choose(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """ids [T, top_k] of experts -> the EP ranks [T, top_k] int64 that the pairs go to.

        Tokens take copies of an expert in turn, of which the first token is `first`.
        """
        if self._copies is None:
            return self._ranks[ids, 0]
        turn = torch.arange(first, first + len(ids), device=ids.device).unsqueeze(1)
        return self._ranks[ids, turn % self._copies[ids]]
