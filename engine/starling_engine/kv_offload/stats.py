"""Counters of the tiers (`delta.TierStats`)."""

from collections.abc import Mapping

from starling_engine.config import TiersConfig
from starling_engine.delta import TierStats
from starling_engine.kv_offload.orders import LoadChunks, Order, StoreChunks, TierReport, TransferDone
from starling_engine.kv_offload.primary import PrimaryIndex


class OffloadStats:
    """The primary tier's counters are the scheduler's own; the secondary tiers' come with the ranks' answers."""

    def __init__(self, config: TiersConfig, primary: PrimaryIndex, chunk_bytes: int) -> None:
        self.tiers = {"cpu": TierStats(capacity=primary.num_slots * chunk_bytes)}
        """Counters by the tier's name."""
        if config.fs_path is not None:
            self.tiers["filesystem"] = TierStats(capacity=config.fs_bytes, shared=True)
        if config.store is not None:
            self.tiers["store"] = TierStats(shared=True)
        self._primary = primary
        self._chunk_bytes = chunk_bytes

    def looked_up(self, wanted: int, found: int) -> None:
        """A request looked for so many chunks in slots."""
        self.tiers["cpu"].queries_total += wanted
        self.tiers["cpu"].hits_total += found

    def bypassed(self) -> None:
        """A request did not look up in the secondary tiers."""
        for name in self.tiers.keys() - {"cpu"}:
            self.tiers[name].bypassed_total += 1

    def left_unwritten(self, chunks: int) -> None:
        """Chunks have left their slots before they could be written back."""
        for name in self.tiers.keys() - {"cpu"}:
            self.tiers[name].unwritten_total += chunks

    def refresh(self) -> None:
        """Counts again what the primary tier holds."""
        cpu, held = self.tiers["cpu"], len(self._primary)
        cpu.bytes, cpu.objects, cpu.evictions_total = held * self._chunk_bytes, held, self._primary.evictions
        cpu.full_total = self._primary.full

    def completed(self, order: Order, done: TransferDone) -> None:
        cpu, moved = self.tiers["cpu"], sum(done.done) * self._chunk_bytes
        self.refresh()
        if isinstance(order, StoreChunks | LoadChunks):
            cpu.errors_total += done.done.count(False)
        match order:
            case StoreChunks():
                cpu.stored_bytes_total += moved
                cpu.store_seconds_total += done.seconds
            case LoadChunks():
                cpu.loaded_bytes_total += moved
                cpu.load_seconds_total += done.seconds
        self.update(done.secondary)

    def update(self, reports: Mapping[str, TierReport]) -> None:
        """Takes over the ranks' reports, by the tier's name."""
        for name, report in reports.items():
            _take_report(self.tiers[name], report)


def _take_report(stats: TierStats, report: TierReport) -> None:
    """Reports of several threads and ranks may overtake each other: a counter that only grows does so here too."""
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
