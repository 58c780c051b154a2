"""How tokens meet experts of other ranks: tokens go to them, or every rank sees all tokens."""

from collections.abc import Callable
from typing import Protocol

import torch

from starling_engine.expert_parallel.expert_routes import ExpertRoutes
from starling_engine.expert_parallel.token_rows import TokenRows
from starling_engine.parallel.communicator import Communicator
from starling_engine.topology.shard import Shard

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [N, hidden_size], ids [N, top_k], weights [N, top_k] fp32) -> [N, hidden_size]: each token's weighted sum over those of its
experts that are on this rank; ids of others are -1."""

Combine = Callable[[Compute], torch.Tensor]
"""What is left to do when tokens are on their way: to compute what came here, and bring the results home [T, hidden_size]."""


class ExpertExchange(Protocol):
    """One step's layer: x [T, hidden_size], ids [T, top_k] int64 and weights [T, top_k] fp32 of this rank's tokens, T may be 0.
    `step` is a number that is the same on all ranks and changes with each step, so that copies of an expert take turns.

    Every rank dispatches and combines once for each layer. Ranks of a tensor group give the same tokens, and get the same results.
    """

    @property
    def capturable(self) -> bool:
        """Whether it may be recorded with a step, which is the same for all: the host has no part in it."""
        ...

    def dispatch(self, routes: ExpertRoutes, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step: int) -> Combine: ...


class AllToAll:
    """A token goes once to each rank that holds some of its experts; what comes back is one sum of each of these ranks.

    Ranks of a tensor group share the tokens out, and gather the results.
    """

    capturable = False

    def __init__(self, ranks: Communicator, tensor: Communicator) -> None:
        self._ranks = ranks
        self._tensor = tensor

    def dispatch(self, routes: ExpertRoutes, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step: int) -> Combine:
        me, count, total = self._ranks.shard.index, self._ranks.shard.count, len(x)
        x, ids, weights = _share((x, ids, weights), self._tensor.shard)
        chosen = routes.choose(ids, me + step)
        goes = torch.zeros(len(x), count, dtype=torch.bool, device=x.device).scatter_(1, chosen, True)
        to, tokens = goes.T.nonzero(as_tuple=True)  # by rank, then by token
        counts = self._ranks.all_gather(goes.sum(0))
        sent, received = counts[me].tolist(), counts[:, me].tolist()
        rows = TokenRows(x.shape[1], x.dtype, ids.shape[1])
        there = torch.where(chosen[tokens] == to.unsqueeze(1), ids[tokens], -1)
        arriving = self._ranks.all_to_all(rows.pack(x[tokens], there, weights[tokens]), sent, received)

        def combine(compute: Compute) -> torch.Tensor:
            results = self._ranks.all_to_all(compute(*rows.unpack(arriving())), received, sent)()
            out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            out.index_add_(0, tokens, results.float())  # in the order of the ranks
            return _gather(out.to(x.dtype), total, self._tensor)

        return combine


class AllGather:
    """Every rank sees all tokens of the step and computes what its own experts make of them; the parts are added up everywhere.

    Where the ranks are one tensor group they have the same tokens anyway.
    """

    def __init__(self, ranks: Communicator, tensor: Communicator) -> None:
        self._ranks = ranks
        self._tensor = tensor

    def dispatch(self, routes: ExpertRoutes, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step: int) -> Combine:
        all_x, all_ids, all_weights, mine = self._see_all(x, ids, weights)

        def combine(compute: Compute) -> torch.Tensor:
            if not len(all_x):  # on no rank
                return x.clone()
            here = torch.where(routes.choose(all_ids, step) == self._ranks.shard.index, all_ids, -1)
            sums = self._ranks.all_reduce(compute(all_x, here, all_weights).float())
            return sums[mine].to(x.dtype)

        return combine

    @property
    def capturable(self) -> bool:
        return self._ranks.shard.count == self._tensor.shard.count and self._ranks.capturable

    def _see_all(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]:
        """The tokens of all ranks, and which of them are this one's."""
        ranks, tensor = self._ranks.shard, self._tensor.shard
        if ranks.count == tensor.count:
            return x, ids, weights, slice(None)
        rows = TokenRows(x.shape[1], x.dtype, ids.shape[1])
        packed = rows.pack(*_share((x, ids, weights), tensor))
        counts = self._ranks.all_gather(torch.tensor([len(packed)])).flatten().tolist()
        if not any(counts):
            return x, ids, weights, slice(None)
        gathered = self._ranks.all_gather(_padded(packed, max(counts)))
        everyone = torch.cat([part[:size] for part, size in zip(gathered, counts, strict=True)])
        first = sum(counts[: ranks.index - tensor.index])
        all_x, all_ids, all_weights = rows.unpack(everyone)
        return all_x, all_ids.long(), all_weights, slice(first, first + len(x))


def _share(tensors: tuple[torch.Tensor, ...], shard: Shard) -> list[torch.Tensor]:
    """This rank's part of the tokens."""
    return [tensor[shard.balanced(len(tensor)).slice] for tensor in tensors]


def _gather(part: torch.Tensor, total: int, tensor: Communicator) -> torch.Tensor:
    """The parts of all ranks of the group, [total, ...]."""
    count = tensor.shard.count
    if count == 1 or not total:
        return part
    sizes = [Shard(rank, count).balanced(total).size for rank in range(count)]
    gathered = tensor.all_gather(_padded(part, max(sizes)))
    return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])]) if len(x) < size else x
