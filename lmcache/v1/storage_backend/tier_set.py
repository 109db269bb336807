"""The tiers of one storage manager in search order, and which of them are searched now."""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from lmcache.logging import init_logger
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.pin_table import PinTable
from lmcache.v1.storage_backend.abstract_backend import (
    AllocatorBackendInterface,
    StorageBackendInterface,
)
from lmcache.v1.storage_backend.residency_hint import ResidencyHint
from lmcache.v1.storage_backend.residency_ledger import ResidencyLedger, TierLedger

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier: its backend, and what is known of its residency.

    Attributes:
        page: Its page of the ledger when it reports residency, else None.
        is_allocator: Whether it owns the memory that others use.
        hint: What this process stored or saw there; unused when it reports residency.
        pins: The pins of lookup ids, for a tier that knows no owners.
    """

    name: str
    backend: StorageBackendInterface
    page: TierLedger | None
    is_allocator: bool
    hint: ResidencyHint = field(default_factory=ResidencyHint)
    pins: PinTable | None = None


class TierSet:
    """Tiers in search order.

        tier's state  meaning                                     who may leave it
        searched      get, contains and touch ask it              bypass, freeze, its own breaker
        bypassed      skipped until the bypass is lifted          set_bypass
        frozen out    all but the first allocating tier, while    set_freeze
                      frozen

    Args:
        backends: Shared with the storage manager, whose callers reach into it: read on every call.
        ledger: Where tiers that report residency get their page.
        cpu_name: The only tier that is searched while frozen.
        pin_timeout_seconds, pin_check_interval_seconds: For tiers that know no pin owners.

    Threads: reads are safe from any thread; changes of the set are the owner's.
    """

    def __init__(
        self,
        backends: OrderedDict[str, StorageBackendInterface],
        ledger: ResidencyLedger,
        cpu_name: str,
        pin_timeout_seconds: float,
        pin_check_interval_seconds: float,
    ) -> None:
        self.backends = backends
        self.ledger = ledger
        self.is_frozen = False
        self._cpu_name = cpu_name
        self._pin_seconds = (pin_timeout_seconds, pin_check_interval_seconds)
        self._bypassed: frozenset[str] = frozenset()
        self._tiers: dict[str, Tier] = {}
        self._closed: set[str] = set()
        self._reported: set[str] = set()

    def tier(self, name: str) -> Tier:
        """Return the tier called `name`; a backend seen for the first time is attached."""
        backend = self.backends[name]
        known = self._tiers.get(name)
        if known is not None and known.backend is backend:
            return known
        page = self.ledger.register_tier(name) if backend.reports_residency else None
        made = Tier(
            name,
            backend,
            page,
            isinstance(backend, AllocatorBackendInterface),
            pins=None if backend.takes_pin_owner else self._new_pin_table(),
        )
        self._tiers[name] = made
        if page is not None:
            backend.attach_ledger(page)
        return made

    def _new_pin_table(self) -> PinTable:
        timeout_seconds, interval_seconds = self._pin_seconds
        table = PinTable(timeout_seconds)
        PinMonitor.GetOrCreate().watch(table, interval_seconds)
        return table

    def all(self) -> list[Tier]:
        """Return every tier, in search order."""
        known = self._tiers
        try:
            found = [known[name] for name in self.backends]
            if all(tier.backend is self.backends[tier.name] for tier in found):
                return found
        except (KeyError, RuntimeError):  # a new backend, or one added while we looked
            pass
        return [self.tier(name) for name in list(self.backends)]

    def searched(self, among: Collection[str] | None = None) -> Iterator[Tier]:
        """Yield the tiers that are searched now, of those named in `among`, in search order."""
        for tier in self.all():
            if among is not None and tier.name not in among:
                continue
            if tier.name in self._bypassed:
                continue
            if self.is_frozen and tier.name != self._cpu_name:
                continue
            if self._is_searchable(tier):
                yield tier

    def _is_searchable(self, tier: Tier) -> bool:
        try:
            return tier.backend.is_searchable
        except Exception:  # a plug-in's fault; the call that follows meets it again and counts it
            if tier.name not in self._reported:
                self._reported.add(tier.name)
                logger.exception("%s cannot say whether it is searchable; it is asked", tier.name)
            return True

    def targets(self, location: str | None) -> list[Tier]:
        """Return the tiers that a put goes to: `location`, or all that are not bypassed.

        A location that was closed, and may be made anew at any moment, is none of them.

        Raises:
            ValueError: There is no tier called `location`, and there was none.
        """
        if location is None:
            tiers = self.all()
        else:
            try:
                tiers = [self.tier(location)]
            except KeyError:
                if location in self._closed:
                    return []
                names = ", ".join(self.backends)
                raise ValueError(
                    f"there is no storage backend {location!r}; there are {names}"
                ) from None
        if not self._bypassed:
            return tiers
        return [tier for tier in tiers if tier.name not in self._bypassed]

    def set_bypass(self, name: str, is_bypassed: bool) -> None:
        """Skip a tier, or search it again; ValueError when there is none of that name."""
        if name not in self.backends:
            raise ValueError(
                f"there is no storage backend {name!r}; there are {', '.join(self.backends)}"
            )
        self._bypassed = self._bypassed | {name} if is_bypassed else self._bypassed - {name}

    @property
    def bypassed(self) -> list[str]:
        """Names of bypassed tiers, in search order."""
        return [name for name in self.backends if name in self._bypassed]

    def forget(self, name: str) -> None:
        """Drop what is known of a tier that was closed, but for its name."""
        self._closed.add(name)
        self._tiers.pop(name, None)
        self._bypassed = self._bypassed - {name}
