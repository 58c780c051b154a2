"""Low-rank adapters of matrices and tables, several at once: each token has its own, or none."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from starling_engine.model_config.adapters import AdapterConfig
from starling_engine.topology.shard import Share
from starling_engine.weights.weight_slot import Alias, WeightSlot, part_slot


def adapter_columns(config: AdapterConfig, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns [adapters + 1, columns]: the scale where a column is of the row's adapter, else 0. The last row is of none."""
    each = torch.eye(len(config.names) + 1, len(config.names), dtype=dtype, device=device) * config.scale
    return each.repeat_interleave(config.rank, 1)


class LowRankMatrix:
    """Adapters of one matrix, as this rank holds it: y + scale * B A x, of each token's A and B.

    Those of all adapters are one product, since they are small. `columns` [T, columns] leave a token's own, and scale them.
    `names` are the modules whose rows the matrix has one behind the other. They are below `fused` together, if there are several.
    """

    def __init__(
        self,
        config: AdapterConfig,
        names: tuple[str, ...],
        fused: str,
        outs: tuple[Share, ...],
        ins: Share,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config, self._names, self._outs, self._ins = config, names, outs, ins
        self._module = fused if len(names) > 1 else names[0]
        self._a = torch.empty(config.columns, ins.size, dtype=dtype, device=device)
        self._b = torch.empty(sum(share.size for share in outs), config.columns, dtype=dtype, device=device)

    def add(self, out: torch.Tensor, x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Adds to out [T, rows], in place, what the adapters make of x [T, ins]."""
        return out.add_(F.linear(F.linear(x, self._a) * columns, self._b))

    def weight_slots(self) -> dict[str, WeightSlot]:
        count, rank = Share.all(len(self._config.names)), Share.all(self._config.rank)
        whole, before, start = sum(share.whole for share in self._outs), 0, 0
        slots = {f"{self._module}.lora_A": part_slot([count, rank, self._ins], self._load_a)}
        for name, share in zip(self._names, self._outs, strict=True):
            at = slice(before + share.start, before + share.start + share.size)
            alias = Alias((f"{self._module}.lora_B",), (count.size, whole, rank.size), (slice(None), at))
            rows = _into_rows(self._b[start : start + share.size])
            slots[f"{name}.lora_B"] = part_slot([count, share, rank], rows, alias)
            start, before = start + share.size, before + share.whole
        return slots

    def _load_a(self, tensor: torch.Tensor) -> None:
        self._a.copy_(tensor.flatten(0, 1))


class LowRankTable:
    """Adapters of a table whose rows are looked up, which every rank has whole; `columns` are as in `LowRankMatrix`."""

    def __init__(self, config: AdapterConfig, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._name, self._shape = config, name, shape
        self._a = torch.empty(shape[0], config.columns, dtype=dtype, device=device)
        self._b = torch.empty(shape[1], config.columns, dtype=dtype, device=device)

    def add(self, out: torch.Tensor, ids: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Adds to out [T, size], in place, what the adapters add to the rows `ids` [T]."""
        return out.add_(F.linear(F.embedding(ids, self._a) * columns, self._b))

    def weight_slots(self) -> dict[str, WeightSlot]:
        (rows, size), count, rank = self._shape, len(self._config.names), self._config.rank
        return {
            f"{self._name}.lora_A": WeightSlot((count, rows, rank), _into_rows(self._a)),
            f"{self._name}.lora_B": WeightSlot((count, rank, size), self._load_b),
        }

    def _load_b(self, tensor: torch.Tensor) -> None:
        self._b.copy_(tensor.flatten(0, 1).T)


def _into_rows(target: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """Returns what fills target [rows, columns] with a tensor [adapters, rows, rank]."""
    return lambda tensor: target.copy_(tensor.transpose(0, 1).flatten(1))
