"""Size of one elastic group, from its leader's report and from the status."""

from dataclasses import dataclass

from starling_agent.contract.config import LayoutConfig
from starling_agent.contract.report import Report
from starling_crds.v1alpha1.status import OperationStatus, Size

ENDED = ("done", "failed", "cancelled", "refused")
COMMITTED = ("releasing", "done")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticState:
    """Sizes are data parallel ranks.

    layout   layout of the group's revision, which need not be the target
    leader   newest report of node 0; None while it has not answered
    stored   operation in the status; None: there was none, or the status was lost
    """

    layout: LayoutConfig
    leader: Report | None = None
    stored: OperationStatus | None = None

    @property
    def effective(self) -> int:
        """Size of the serving epoch; 0: there is none yet. While the leader is silent, the last known one."""
        if self.leader is not None:
            return self.leader.size.effective
        if self.stored is None:
            return 0
        return self.stored.target.data if self.stored.phase in COMMITTED else self.stored.source.data

    @property
    def is_changing(self) -> bool:
        return self.stored is not None and not ended(self.stored)

    @property
    def gang(self) -> int | None:
        """Pods that hold the ranks of the serving epoch; None while there is none."""
        return self.nodes(self.effective) if self.effective else None

    @property
    def needed(self) -> int | None:
        """Pods that have to serve for the group to serve. While it changes size, those of the smaller size.

        Nodes learn of a commit one after the other, and new ones get ready after it.
        """
        if not self.effective or self.stored is None or not self.is_changing:
            return self.gang
        sizes = {self.effective, self.stored.source.data, self.stored.target.data}
        return self.nodes(min(sizes - {0}))

    def nodes(self, data: int) -> int:
        """Pods of a group of this size."""
        return self.layout.at(data).nodes

    def size(self, data: int) -> Size:
        return Size(data=data, expert=self.layout.at(data).expert)


def ended(operation: OperationStatus) -> bool:
    return operation.phase in ENDED
