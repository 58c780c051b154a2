"""Counters of the tiers (`delta.TierStats`)."""

from collections.abc import Mapping

from starling_engine.config import TiersConfig
from starling_engine.delta import TierStats
from starling_engine.kv_offload.orders import TransferDone, TransferOrder
from starling_engine.kv_offload.primary import PrimaryIndex


class OffloadStats:
    """The primary tier's counters are the scheduler's own; the secondary tiers' come with the ranks' answers."""

    def __init__(self, config: TiersConfig, primary: PrimaryIndex, chunk_bytes: int) -> None:
        self.cpu = TierStats(capacity=primary.num_slots * chunk_bytes)
        self.secondary: dict[str, TierStats] = {}
        """Counters by the tier's name."""
        if config.fs_path is not None:
            self.secondary["filesystem"] = TierStats(capacity=config.fs_bytes, shared=True)
        if config.store is not None:
            self.secondary["store"] = TierStats(shared=True)
        self._primary = primary
        self._chunk_bytes = chunk_bytes

    @property
    def tiers(self) -> dict[str, TierStats]:
        """Counters of all tiers, by name."""
        cpu, held = self.cpu, len(self._primary)
        cpu.bytes, cpu.objects, cpu.evictions_total = held * self._chunk_bytes, held, self._primary.evictions
        cpu.full_total = self._primary.full
        return {"cpu": cpu, **self.secondary}

    def bypassed(self) -> None:
        """A request did not look up in the secondary tiers."""
        for tier in self.secondary.values():
            tier.bypassed_total += 1

    def left_unwritten(self) -> None:
        """A chunk has left its slot before it could be written back."""
        for tier in self.secondary.values():
            tier.unwritten_total += 1

    def completed(self, order: TransferOrder, done: TransferDone) -> None:
        """An order has been answered."""
        moved = sum(done.done) * self._chunk_bytes
        match order.kind:
            case "store":
                self.cpu.stored_bytes_total += moved
                self.cpu.store_seconds_total += done.seconds
                self.cpu.errors_total += done.done.count(False)
            case "load":
                self.cpu.loaded_bytes_total += moved
                self.cpu.load_seconds_total += done.seconds
                self.cpu.errors_total += done.done.count(False)
        self.update(done.secondary)

    def update(self, reports: Mapping[str, TierStats]) -> None:
        """Takes over the ranks' reports, by the tier's name; one that others have overtaken makes no counter smaller."""
        for name, report in reports.items():
            stats = self.secondary[name]
            stats.bytes, stats.objects = report.bytes, report.objects
            for total in (field for field in TierStats.__struct_fields__ if field.endswith("_total")):
                setattr(stats, total, max(getattr(stats, total), getattr(report, total)))
