"""Reading a storage manager's gauges from its parts."""

from lmcache.v1.gauges import CpuTierGauges, DiskTierGauges, GaugeSource, ManagerGauges, PinTotals
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend
from lmcache.v1.storage_backend.residency_ledger import ResidencyLedger
from lmcache.v1.storage_backend.residency_moves import ResidencyMoves
from lmcache.v1.storage_backend.tier_set import TierSet
from lmcache.v1.storage_backend.tier_walk import TierWalk

__all__ = ["CpuTierGauges", "ManagerGauges", "ManagerGaugesReader", "PinTotals", "pin_totals"]


def pin_totals(tiers: TierSet) -> PinTotals:
    """Add up the pin tables of the tiers that know no pin owners."""
    tables = [tier.pins for tier in tiers.all() if tier.pins is not None]
    return PinTotals(
        num_pins=sum(table.num_pins for table in tables),
        forced_releases=sum(table.num_forced_releases for table in tables),
        unmatched_releases=sum(table.num_unmatched_releases for table in tables),
    )


class ManagerGaugesReader:
    """Reads one manager's gauges; no data call passes through it.

    Args:
        ledger: Residency and events.
        walk, moves: Where errors and verdicts are counted.
        tiers: Whose pins are counted beside the CPU tier's; None: no others.

    Threads: safe from any thread; each lock of the parts is taken on its own and briefly.
    """

    def __init__(
        self,
        ledger: ResidencyLedger,
        walk: TierWalk,
        moves: ResidencyMoves,
        tiers: TierSet | None = None,
    ) -> None:
        self._ledger = ledger
        self._walk = walk
        self._moves = moves
        self._tiers = tiers
        self._source = GaugeSource()
        self._closed_disk = DiskTierGauges()

    def retire(self, disk: LocalDiskBackend) -> None:
        """Keep the totals of a disk tier that is closed: totals never fall."""
        self._closed_disk = disk.gauges().with_totals_of(self._closed_disk)

    def read(
        self, cpu: LocalCPUBackend | None, disk: LocalDiskBackend | None = None
    ) -> ManagerGauges:
        """Return the gauges as of now.

        Args:
            cpu, disk: The local tiers; the part of one that is missing is zeros.
        """
        stored, removed = self._ledger.transition_counts()
        events = self._ledger.event_gauges()
        return ManagerGauges(
            source=self._source,
            touches=self._moves.touch_counts(),
            touch_errors=self._moves.num_errors,
            stored=stored,
            removed={(tier, reason.value): n for (tier, reason), n in removed.items()},
            events_lost=events.num_lost,
            events_pending=events.num_pending,
            event_lag_seconds=events.lag_seconds,
            tier_errors=self._walk.num_tier_errors,
            cpu=CpuTierGauges() if cpu is None else cpu.gauges(),
            disk=(DiskTierGauges() if disk is None else disk.gauges()).with_totals_of(
                self._closed_disk
            ),
            plugin_pins=PinTotals() if self._tiers is None else pin_totals(self._tiers),
        )
