"""The ranks that share the experts of every layer, and the placement in force: which rank holds which experts."""

import logging
from typing import Literal

import torch

from starling_engine.errors import ConfigError
from starling_engine.expert_parallel.exchange import AllGather, AllToAll, Combine, Compute, ExpertExchange, ExpertRoutes
from starling_engine.expert_parallel.load import LoadWindow
from starling_engine.model_config.config import ModelConfig
from starling_engine.parallel.communicator import ALONE, Communicator
from starling_engine.topology.placement import Layer, Placement, spread

logger = logging.getLogger("starling.parallel")

ExchangeName = Literal["auto", "all_to_all", "all_gather"]


class ExpertRanks:
    """One object for all layers of a model. `set_placement` changes it between two steps, at the same step on all ranks.

    Layers are counted as in `Placement`. This rank is number `communicator.shard.index` of the placement; the tensor ranks of a
    data parallel rank are neighbours. Without a placement the rank stands by: it is alone and has no experts, but it can warm up.
    """

    def __init__(
        self,
        num_experts: int,
        slots: int,
        tensor: Communicator = ALONE,
        exchange: ExchangeName = "auto",
        device: torch.device | None = None,
        window: LoadWindow | None = None,
    ) -> None:
        """`slots`: the experts of a layer that this rank has room for, now and after every change to come.

        `window` counts the tokens that come to this rank's experts. Summed over all ranks, that is the load of each expert.
        """
        self.num_experts = num_experts
        self.slots = slots
        self.placement: Placement | None = None
        self.communicator: Communicator = ALONE
        self.window = window
        self._tensor = tensor
        self._wanted = exchange
        self._device = device or torch.device("cpu")
        self._exchange: ExpertExchange | None = None
        self._routes: list[ExpertRoutes] = []
        self._step = self._layer = 0

    @property
    def capturable(self) -> bool:
        """True where a step can be recorded: nothing passes through the host, and experts have no copies that take turns.

        False while the rank stands by: its exchanges are known with a placement only, and a recording would leave them out.
        """
        exchange = self._exchange is None or self._exchange.capturable
        copies = any(routes.has_copies for routes in self._routes)
        return self.placement is not None and self.window is None and exchange and not copies

    @property
    def rank(self) -> int:
        return self.communicator.shard.index

    def held(self, layer: int) -> tuple[int, ...]:
        """Returns the experts of a layer that the placement gives this rank."""
        return self.placement.layers[layer][self.rank] if self.placement is not None else ()

    def set_placement(self, communicator: Communicator, placement: Placement) -> None:
        """Takes effect at the next step. Raises ConfigError for a placement that does not fit the ranks or their slots."""
        self._check(communicator, placement)
        self.communicator, self.placement = communicator, placement
        self._routes = [ExpertRoutes(layer, self.num_experts, self._device) for layer in placement.layers]
        self._step = self._layer = 0  # the same on all ranks from here on
        self._exchange = None if communicator.shard.count == 1 else _select(self._wanted, communicator, self._tensor)

    def set_layer(self, layer: int, ranks: Layer) -> None:
        """Changes the placement of one layer, among the same ranks."""
        assert self.placement is not None and len(ranks) == self.placement.ranks
        layers = self.placement.layers
        self.placement = Placement(self.num_experts, (*layers[:layer], ranks, *layers[layer + 1 :]))
        self._routes[layer] = ExpertRoutes(ranks, self.num_experts, self._device)

    def dispatch(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Combine:
        """Calls `ExpertExchange.dispatch`, and counts. Layers come in order, each once a step."""
        if layer <= self._layer:
            self._next_step()
        self._layer = layer
        combine = self._dispatch(layer, x, ids, weights)
        if self.window is None:
            return combine
        window = self.window

        def counted(compute: Compute) -> torch.Tensor:
            def count(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                window.add(layer, ids)
                return compute(x, ids, weights)

            return combine(count)

        return counted

    def _dispatch(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Combine:
        if self._exchange is None:
            return lambda compute: compute(x, ids, weights)
        return self._exchange.dispatch(self._routes[layer], x, ids, weights, self._step)

    def _next_step(self) -> None:
        self._step += 1
        if self.window is not None:
            self.window.next_step()

    def _check(self, communicator: Communicator, placement: Placement) -> None:
        if placement.ranks != communicator.shard.count:
            raise ConfigError(f"a placement on {placement.ranks} ranks, of which {communicator.shard.count} are here")
        if placement.slots > self.slots:
            raise ConfigError(
                f"{placement.ranks} ranks would each hold up to {placement.slots} experts of a layer, with slots for {self.slots}",
                "data_parallel_size",
            )


def spread_over_tensor(model: ModelConfig, tensor: Communicator, device: torch.device) -> ExpertRanks:
    """Returns the ranks of a core that spreads its experts over its tensor ranks alone."""
    assert model.moe is not None
    placement = spread(model.moe.num_experts, tensor.shard.count, len(model.moe.layers))
    ranks = ExpertRanks(model.moe.num_experts, placement.slots, tensor, device=device)
    ranks.set_placement(tensor, placement)
    return ranks


def _select(wanted: ExchangeName, ranks: Communicator, tensor: Communicator) -> ExpertExchange:
    """Logs the choice and its reason."""
    if wanted == "auto":
        same = ranks.shard.count == tensor.shard.count
        kind = "all_gather" if same else "all_to_all"
        reason = (
            "all ranks have the same tokens, so only sums are exchanged" if same else "tokens go only to ranks with their experts"
        )
    else:
        kind, reason = wanted, "asked for"
    logger.info("experts of %d ranks: %s (%s)", ranks.shard.count, kind, reason)
    return AllGather(ranks, tensor) if kind == "all_gather" else AllToAll(ranks, tensor)
