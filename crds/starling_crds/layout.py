"""Size arithmetic of a group: how many ranks and pods it has, and which sizes fill its pods. No I/O.

The CRD's CEL rules enforce the same in the API server, and the engine checks again.
"""

import math
from dataclasses import dataclass, replace

MOST_NODES = 4096
"""Pods of one group. More are a slip of the pen, and each reconcile would count them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """One group at one data parallel size. Ranks fill its nodes (pods) one after the other.

    tensor, pipeline, data   parallel sizes
    per_node                 ranks in one node
    """

    tensor: int
    pipeline: int
    data: int
    per_node: int = 1

    def __str__(self) -> str:
        return f"TP{self.tensor} PP{self.pipeline} DP{self.data}"

    @property
    def core_ranks(self) -> int:
        """Ranks of one engine core, that is of one data parallel rank."""
        return self.tensor * self.pipeline

    @property
    def ranks(self) -> int:
        return self.data * self.core_ranks

    @property
    def nodes(self) -> int:
        return max(1, -(-self.ranks // self.per_node))

    @property
    def expert(self) -> int:
        """Expert parallel size if the model is MoE."""
        return self.data * self.tensor

    @property
    def data_step(self) -> int:
        """Smallest data parallel size whose ranks fill whole nodes. Exactly its multiples do."""
        return self.per_node // math.gcd(self.core_ranks, self.per_node)

    @property
    def fills_nodes(self) -> bool:
        return self.data % self.data_step == 0

    @property
    def core_fits_nodes(self) -> bool:
        """True if every engine core fills whole nodes, or every node holds whole engine cores."""
        return self.core_ranks % self.per_node == 0 or self.per_node % self.core_ranks == 0

    def with_data(self, data: int) -> "GroupLayout":
        return replace(self, data=data)

    def sizes(self, least: int, most: int) -> tuple[int, ...]:
        """Returns the data parallel sizes from `least` to `most` that fill whole nodes."""
        step = self.data_step
        return tuple(range(-(-least // step) * step, most + 1, step))
