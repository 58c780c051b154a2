"""Which ranks hold which experts, told to those that load some for a next epoch; and this rank's own, for them to read."""

from collections.abc import Callable, Mapping

from starling_engine.config import WorkerConfig
from starling_engine.expert_parallel.expert_notices import ExpertNotices
from starling_engine.expert_parallel.expert_peers import ExpertPeer, FindPeers
from starling_engine.expert_parallel.expert_server import ExpertServer
from starling_engine.layers.experts import Experts
from starling_engine.parallel.gloo import join_store
from starling_engine.topology.epoch import EpochPlan


class ExpertPublisher:
    """One rank's part. A rank that leaves takes part too: what it holds is what the others lack."""

    def __init__(self, config: WorkerConfig, experts: Mapping[int, Experts]) -> None:
        """`experts` as `Decoder.experts`, before anything is loaded into them by another thread."""
        assert config.rendezvous is not None, "the executor says where this rank can be reached"
        self._layout = config.layout
        self._stage = config.layout.coordinates(config.rank).pp
        self._server = ExpertServer(experts, config.rendezvous.address)

    @property
    def address(self) -> str:
        return self._server.address

    def tell(self, plan: EpochPlan) -> None:
        """What is here, if there is anything. Raises RankLost when nobody is where the epoch's ranks meet."""
        holds = self._server.holds()
        if any(holds.values()):
            self._notices(plan).post(ExpertPeer(self.address, holds))

    def before(self, plan: EpochPlan) -> FindPeers | None:
        """Finds the ranks that serve before the epoch; None where there are none."""
        expected = plan.served * self._layout.tensor
        if not expected:
            return None

        def find(cancelled: Callable[[], bool]) -> list[ExpertPeer]:
            return self._notices(plan).read(expected, cancelled)

        return find

    def _notices(self, plan: EpochPlan) -> ExpertNotices:
        return ExpertNotices(join_store(plan.rendezvous), plan.stage_name(self._stage))
