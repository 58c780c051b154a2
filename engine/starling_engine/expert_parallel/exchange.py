"""Two ways to bring tokens and experts of other ranks together: tokens go to their experts, or every rank sees all tokens."""

from collections.abc import Callable
from typing import Protocol

import torch

from starling_engine.parallel.communicator import Communicator
from starling_engine.topology.placement import Layer
from starling_engine.topology.shard import Shard

ALIGNMENT = 8
"""Bytes, of what a token's row holds."""

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(x [N, hidden_size], ids [N, top_k], weights [N, top_k] fp32) -> [N, hidden_size].

Sums each token's results of those of its experts that are on this rank, by weight. The ids of other experts are -1.
"""

Combine = Callable[[Compute], torch.Tensor]
"""Second half of an exchange: computes the tokens that came here, and returns this rank's results [T, hidden_size]."""


class ExpertRoutes:
    """The ranks that hold each expert of one layer."""

    def __init__(self, layer: Layer, num_experts: int, device: torch.device) -> None:
        ranks: list[list[int]] = [[] for _ in range(num_experts)]
        for rank, experts in enumerate(layer):
            for expert in experts:
                ranks[expert].append(rank)
        most = max(map(len, ranks))
        self._ranks = torch.tensor([(held * most)[:most] for held in ranks], device=device)
        self.has_copies = most > 1
        """True where several ranks hold the same expert."""
        self._copies = torch.tensor([len(held) for held in ranks], device=device) if most > 1 else None

    def choose(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        """ids [T, top_k] of experts -> [T, top_k] int64, the EP rank that computes each pair of token and expert.

        Copies of an expert take turns from token to token; `first` is the turn of the first token.
        """
        if self._copies is None:
            return self._ranks[ids, 0]
        turn = torch.arange(first, first + len(ids), device=ids.device).unsqueeze(1)
        return self._ranks[ids, turn % self._copies[ids]]


class TokenRows:
    """Packs each token into one row of bytes, so that one exchange carries all of it.

    A row has the hidden state [hidden_size] of `dtype`, then the weights [top_k] fp32, then the experts [top_k] int32.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype, top_k: int) -> None:
        self._dtype = dtype
        self._hidden = hidden_size * dtype.itemsize
        self._weights = -(-self._hidden // ALIGNMENT) * ALIGNMENT
        self._ids = self._weights + 4 * top_k
        self._end = self._ids + 4 * top_k
        self.size = -(-self._end // ALIGNMENT) * ALIGNMENT

    def pack(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [N, hidden_size], ids [N, top_k], weights [N, top_k] -> [N, size] uint8."""
        rows = torch.empty(len(x), self.size, dtype=torch.uint8, device=x.device)
        for part, values in zip(self._parts(rows), (x, ids, weights), strict=True):
            part.copy_(values)
        return rows

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, size] uint8 -> x, ids int64 and weights; x and weights are in the same memory."""
        x, ids, weights = self._parts(rows)
        return x, ids.long(), weights

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[N, size] uint8 -> x, ids int32 and weights, in the same memory."""
        return (
            rows[:, : self._hidden].view(self._dtype),
            rows[:, self._ids : self._end].view(torch.int32),
            rows[:, self._weights : self._ids].view(torch.float32),
        )


class ExpertExchange(Protocol):
    """Exchanges the tokens of one layer in one step. Every rank dispatches and combines once for each layer.

    Ranks of a tensor group give the same tokens, and get the same results.
    """

    @property
    def capturable(self) -> bool:
        """True where it may be recorded with a step, since the host has no part in it. All ranks have the same answer."""
        ...

    def dispatch(self, routes: ExpertRoutes, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, step: int) -> Combine:
        """Sends this rank's tokens x [T, hidden_size], with ids [T, top_k] int64 and weights [T, top_k] fp32; T may be 0.

        `step` is the same number on all ranks and changes with each step, so that copies of an expert take turns.
        """
        ...


class AllToAll:
    """Sends a token once to each rank that holds some of its experts; each of these ranks sends one sum back.

    Ranks of a tensor group send a share of the tokens each, and gather the results.
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
    """Shows all tokens of the step to every rank. Each computes its own experts' part, and the parts are summed on all ranks.

    Ranks of one tensor group have the same tokens anyway.
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
            part = compute(all_x, here, all_weights)
            sums = self._ranks.all_reduce(part.to(self._ranks.part_dtype(part.dtype)))
            return sums[mine].to(x.dtype)

        return combine

    @property
    def capturable(self) -> bool:
        return self._ranks.shard.count == self._tensor.shard.count and self._ranks.capturable

    def _see_all(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]:
        """Returns the tokens of all ranks, and the slice of them that is this rank's."""
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
        return all_x, all_ids, all_weights, slice(first, first + len(x))


def _share(tensors: tuple[torch.Tensor, ...], shard: Shard) -> list[torch.Tensor]:
    """Returns the part of the tokens that this rank sends."""
    return [tensor[shard.balanced(len(tensor)).slice] for tensor in tensors]


def _gather(part: torch.Tensor, total: int, tensor: Communicator) -> torch.Tensor:
    """Returns the parts of all ranks of the group, [total, ...]."""
    count = tensor.shard.count
    if count == 1 or not total:
        return part
    sizes = [Shard(rank, count).balanced(total).size for rank in range(count)]
    gathered = tensor.all_gather(_padded(part, max(sizes)))
    return torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])]) if len(x) < size else x
