"""What the tiers hold and did, as it is told outside (`delta.TierStats`)."""

from collections.abc import Mapping

from starling_engine.config import TiersConfig
from starling_engine.delta import TierStats
from starling_engine.kv_offload.orders import LoadChunks, Order, StoreChunks, TierReport, TransferDone
from starling_engine.kv_offload.primary import PrimaryIndex


class OffloadStats:
    """Of the CPU tier what the scheduler knows itself; of the tiers outside what comes with the answers of the ranks."""

    def __init__(self, config: TiersConfig, host: PrimaryIndex, chunk_bytes: int) -> None:
        self.tiers = {"cpu": TierStats(capacity=host.num_slots * chunk_bytes)}
        """By name."""
        if config.fs_path is not None:
            self.tiers["filesystem"] = TierStats(capacity=config.fs_bytes, shared=True)
        if config.store is not None:
            self.tiers["store"] = TierStats(shared=True)
        self._host = host
        self._chunk_bytes = chunk_bytes

    def looked_up(self, asked: int, found: int) -> None:
        """Chunks in slots."""
        self.tiers["cpu"].queries_total += asked
        self.tiers["cpu"].hits_total += found

    def passed_by(self) -> None:
        """A request did not ask the tiers outside."""
        for name in self.tiers.keys() - {"cpu"}:
            self.tiers[name].bypassed_total += 1

    def left_unwritten(self, chunks: int) -> None:
        """So many left their slots before they could be written to any tier outside."""
        for name in self.tiers.keys() - {"cpu"}:
            self.tiers[name].unwritten_total += chunks

    def look(self) -> None:
        """Once the CPU tier may hold something else than before."""
        cpu, held = self.tiers["cpu"], len(self._host)
        cpu.bytes, cpu.objects, cpu.evictions_total = held * self._chunk_bytes, held, self._host.evictions
        cpu.full_total = self._host.full

    def answered(self, order: Order, done: TransferDone) -> None:
        cpu, moved = self.tiers["cpu"], sum(done.done) * self._chunk_bytes
        self.look()
        if isinstance(order, StoreChunks | LoadChunks):
            cpu.errors_total += done.done.count(False)
        match order:
            case StoreChunks():
                cpu.stored_bytes_total += moved
                cpu.store_seconds_total += done.seconds
            case LoadChunks():
                cpu.loaded_bytes_total += moved
                cpu.load_seconds_total += done.seconds
        self.stand(done.far)

    def stand(self, far: Mapping[str, TierReport]) -> None:
        """As the ranks say it, by name."""
        for name, report in far.items():
            _take_report(self.tiers[name], report)


def _take_report(stats: TierStats, report: TierReport) -> None:
    """Reports of several threads and ranks may pass each other: what only grows does so here too."""
    held = report.held
    stats.bytes, stats.objects = held.bytes, held.objects
    stats.queries_total = max(stats.queries_total, report.queries)
    stats.hits_total = max(stats.hits_total, report.hits)
    stats.stored_bytes_total = max(stats.stored_bytes_total, report.written_bytes)
    stats.loaded_bytes_total = max(stats.loaded_bytes_total, report.read_bytes)
    stats.store_seconds_total = max(stats.store_seconds_total, report.write_seconds)
    stats.load_seconds_total = max(stats.load_seconds_total, report.read_seconds)
    stats.evictions_total = max(stats.evictions_total, held.evicted)
    stats.errors_total = max(stats.errors_total, held.errors)
    stats.corrupt_total = max(stats.corrupt_total, held.corrupt)
    stats.refused_total = max(stats.refused_total, held.refused)
    stats.full_total = max(stats.full_total, held.full)
