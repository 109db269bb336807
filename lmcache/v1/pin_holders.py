"""The pins themselves, by who holds them: lookup ids, and threads or tasks without one.

Plain books without a lock; `PinTable` guards them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

from lmcache.v1.cache_key import CacheEngineKey

Key = CacheEngineKey
PinOwner = NewType("PinOwner", str)


class Pinned(Protocol):
    """What carries pins: a memory object, or a key in a tier that counts its pins itself."""

    @property
    def pin_count(self) -> int:
        """Pins it carries now, over all holders."""
        ...

    def unpin(self) -> object:
        """Lose one of them."""
        ...


@dataclass(frozen=True, slots=True)
class AnonymousHolder:
    """Holder of pins without an owner: the thread, and the asyncio task in it, that took them."""

    thread_id: int
    task_id: int


@dataclass(slots=True)
class Released:
    """What a release took out of the books.

    Attributes:
        carriers: One entry per pin that its carrier must lose now.
        uncounted: Keys of these pins whose use was not counted yet.
        num_unmatched: Keys for which there was no such pin.
    """

    carriers: list[Pinned] = field(default_factory=list)
    uncounted: list[Key] = field(default_factory=list)
    num_unmatched: int = 0


@dataclass(slots=True)
class _Lookup:
    deadline_s: float
    carriers: dict[Key, Pinned]
    uncounted: dict[Key, None]


class LookupPins:
    """Pins of lookup ids: at most one a key, however often the request repeats its lookup.

    The pins of one id expire together, counted from its last lookup. Everything is done a batch at
    a time: a lookup of a long prompt holds hundreds of keys.
    """

    def __init__(self) -> None:
        self._lookups: dict[PinOwner, _Lookup] = {}

    def add(
        self, owner: PinOwner, keys: Sequence[Key], carriers: Sequence[Pinned], deadline_s: float
    ) -> list[Pinned]:
        """Take over one pin of each carrier; returns those that have a pin too many now."""
        lookup = self._lookups.get(owner)
        if lookup is None:
            made = dict(zip(keys, carriers, strict=True))
            if len(made) == len(keys):
                if made:
                    self._lookups[owner] = _Lookup(deadline_s, made, dict.fromkeys(made))
                return []
            lookup = self._lookups[owner] = _Lookup(deadline_s, {}, {})
        lookup.deadline_s = deadline_s
        surplus = []
        for key, carrier in zip(keys, carriers, strict=True):
            known = lookup.carriers.get(key)
            lookup.carriers[key] = carrier
            if known is None:
                lookup.uncounted[key] = None
            else:  # the newer copy is the pinned one, where they differ
                surplus.append(known)
        return surplus

    def holds(self, owner: PinOwner, keys: Sequence[Key], carriers: Sequence[Pinned]) -> bool:
        """Whether these very carriers are in the book for `owner`."""
        lookup = self._lookups.get(owner)
        return lookup is not None and all(
            lookup.carriers.get(key) is carrier for key, carrier in zip(keys, carriers, strict=True)
        )

    def uncounted(self, owner: PinOwner) -> list[Key]:
        """Return the keys whose use is not in the order yet, as pinned."""
        lookup = self._lookups.get(owner)
        return list(lookup.uncounted) if lookup is not None else []

    def take_uncounted(self, owner: PinOwner) -> list[Key]:
        """As `uncounted`; they count as of now."""
        keys = self.uncounted(owner)
        if keys:
            self._lookups[owner].uncounted = {}
        return keys

    def release(self, owner: PinOwner, keys: Iterable[Key], released: Released) -> None:
        """Move the pins of `owner` on `keys` to `released`."""
        lookup = self._lookups.get(owner)
        for key in keys:
            carrier = lookup.carriers.pop(key, None) if lookup is not None else None
            if lookup is None or carrier is None:
                released.num_unmatched += 1
                continue
            released.carriers.append(carrier)
            if key in lookup.uncounted:
                del lookup.uncounted[key]
                released.uncounted.append(key)
        if lookup is not None and not lookup.carriers:
            del self._lookups[owner]

    def release_all(self, owner: PinOwner, released: Released) -> None:
        """Move every pin of `owner` to `released`."""
        lookup = self._lookups.pop(owner, None)
        if lookup is not None:
            released.carriers += lookup.carriers.values()
            released.uncounted += lookup.uncounted

    def expire(self, now_s: float, released: Released) -> None:
        """Move the pins of every owner that is past its deadline to `released`."""
        late = [owner for owner, lookup in self._lookups.items() if lookup.deadline_s <= now_s]
        for owner in late:
            self.release_all(owner, released)

    def keys_by_owner(self) -> dict[PinOwner, list[Key]]:
        """Return what each owner holds, as pinned."""
        return {owner: list(lookup.carriers) for owner, lookup in self._lookups.items()}

    @property
    def num_pins(self) -> int:
        """Pins held now."""
        return sum(len(lookup.carriers) for lookup in self._lookups.values())

    @property
    def num_uncounted(self) -> int:
        """Keys whose use is not in the order yet."""
        return sum(len(lookup.uncounted) for lookup in self._lookups.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when a pin is not on its carrier, or an owner holds none."""
        for owner, lookup in self._lookups.items():
            if not lookup.carriers:
                raise AssertionError(f"{owner} is listed without a pin")
            if not lookup.uncounted.keys() <= lookup.carriers.keys():
                raise AssertionError(f"{owner} has uncounted keys without a pin")
            for key, carrier in lookup.carriers.items():
                if carrier.pin_count < 1:
                    raise AssertionError(f"{key} lacks the pin of {owner}")


@dataclass(slots=True)
class _Pin:
    carrier: Pinned
    count: int
    deadline_s: float
    is_counted: bool = False


class AnonymousPins:
    """Owner-less pins, counted one by one; those of one key are interchangeable.

    A release takes this thread's or task's first, then another's: callers of 0.5.6 pin and unpin on
    different threads.
    """

    def __init__(self) -> None:
        self._pins: dict[AnonymousHolder, dict[Key, _Pin]] = {}
        self._holders: dict[Key, dict[AnonymousHolder, None]] = {}

    def add(
        self,
        holder: AnonymousHolder,
        keys: Sequence[Key],
        carriers: Sequence[Pinned],
        deadline_s: float,
    ) -> list[Pinned]:
        """Take over one pin of each carrier; returns those that have a pin too many now."""
        pins = self._pins.setdefault(holder, {}) if keys else {}
        surplus: list[Pinned] = []
        for key, carrier in zip(keys, carriers, strict=True):
            pin = pins.get(key)
            if pin is None:
                pins[key] = _Pin(carrier, 1, deadline_s)
                self._holders.setdefault(key, {})[holder] = None
                continue
            pin.deadline_s = deadline_s
            if pin.carrier is carrier:
                pin.count += 1
                pin.is_counted = False
            else:  # replaced meanwhile: the newer copy is the pinned one
                surplus += [pin.carrier] * pin.count
                pin.carrier, pin.count = carrier, 1
        return surplus

    def holds(
        self, holder: AnonymousHolder, keys: Sequence[Key], carriers: Sequence[Pinned]
    ) -> bool:
        """Whether these very carriers are in the book for `holder`."""
        pins = self._pins.get(holder, {})
        return all(
            key in pins and pins[key].carrier is carrier
            for key, carrier in zip(keys, carriers, strict=True)
        )

    def uncounted(self, holder: AnonymousHolder) -> list[Key]:
        """Return the keys whose use is not in the order yet, as pinned."""
        return [key for key, pin in self._pins.get(holder, {}).items() if not pin.is_counted]

    def take_uncounted(self, holder: AnonymousHolder) -> list[Key]:
        """As `uncounted`; they count as of now."""
        keys = self.uncounted(holder)
        for key in keys:
            self._pins[holder][key].is_counted = True
        return keys

    def release(self, holder: AnonymousHolder, keys: Iterable[Key], released: Released) -> None:
        """Move one pin of each key to `released`, the holder's own first."""
        for key in keys:
            holders = self._holders.get(key, {})
            whose = holder if holder in holders else next(iter(holders), None)
            if whose is None:
                released.num_unmatched += 1
                continue
            pin = self._pins[whose][key]
            released.carriers.append(pin.carrier)
            if not pin.is_counted:
                released.uncounted.append(key)
                pin.is_counted = True
            if pin.count <= 1:
                self._forget(whose, key)
            else:
                pin.count -= 1

    def expire(self, now_s: float, released: Released) -> None:
        """Move every pin past its deadline to `released`."""
        for holder, pins in list(self._pins.items()):
            for key, pin in list(pins.items()):
                if pin.deadline_s <= now_s:
                    released.carriers += [pin.carrier] * pin.count
                    self._forget(holder, key)

    def _forget(self, holder: AnonymousHolder, key: Key) -> None:
        del self._pins[holder][key]
        if not self._pins[holder]:
            del self._pins[holder]
        del self._holders[key][holder]
        if not self._holders[key]:
            del self._holders[key]

    @property
    def num_pins(self) -> int:
        """Pins held now."""
        return sum(pin.count for pins in self._pins.values() for pin in pins.values())

    @property
    def num_uncounted(self) -> int:
        """Keys whose use is not in the order yet."""
        return sum(not pin.is_counted for pins in self._pins.values() for pin in pins.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when a pin is not on its carrier, or the two books differ."""
        listed = {(key, holder) for key, holders in self._holders.items() for holder in holders}
        held = {(key, holder) for holder, pins in self._pins.items() for key in pins}
        if listed != held:
            raise AssertionError(f"{len(listed ^ held)} owner-less pins are in one book only")
        for holder, pins in self._pins.items():
            for key, pin in pins.items():
                if pin.count <= 0 or pin.carrier.pin_count < pin.count:
                    raise AssertionError(f"{key} lacks pins of {holder}")
