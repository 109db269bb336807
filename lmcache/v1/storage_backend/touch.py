"""What touch answers."""

import enum
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, overload

if TYPE_CHECKING:
    from lmcache.v1.cache_key import CacheEngineKey


class TouchVerdict(enum.Enum):
    """What is known of one key.

    REFRESHED: resident in the CPU tier, and its order was moved.
    PRESENT: a tier that `get` would search holds it, but the CPU order was not moved: only a lower
        tier holds it, or the policy has no recency.
    GONE: no searchable tier is known to hold it.
    """

    REFRESHED = "refreshed"
    PRESENT = "present"
    GONE = "gone"


# One byte per position, as the native index gives them, so that a batch costs no Python loop.
CODE_GONE, CODE_REFRESHED, CODE_PRESENT = 0, 1, 2
NO_TIER = 255
_VERDICTS = (TouchVerdict.GONE, TouchVerdict.REFRESHED, TouchVerdict.PRESENT)


class TouchResult(Sequence[TouchVerdict]):
    """One verdict per key given, in that order.

    The verdicts are true as of event `seq` of incarnation `incarnation`: every removal with a
    smaller number is taken into account and none with a larger one.

    Args:
        keys: The keys, as given.
        codes: One CODE_ byte per key.
        tier_codes: One index into `tiers` per key, NO_TIER for none.
        tiers: Names of tiers.
        incarnation, seq: See above.

    Threads: immutable.
    """

    __slots__ = ("_codes", "_keys", "_tier_codes", "_tiers", "incarnation", "seq")

    REFRESHED: ClassVar[TouchVerdict] = TouchVerdict.REFRESHED
    PRESENT: ClassVar[TouchVerdict] = TouchVerdict.PRESENT
    GONE: ClassVar[TouchVerdict] = TouchVerdict.GONE

    def __init__(
        self,
        keys: "Sequence[CacheEngineKey]",
        codes: bytes,
        tier_codes: bytes,
        tiers: Sequence[str],
        incarnation: str,
        seq: int,
    ) -> None:
        self._keys = keys
        self._codes = codes
        self._tier_codes = tier_codes
        self._tiers = tiers
        self.incarnation = incarnation
        self.seq = seq

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> TouchVerdict: ...
    @overload
    def __getitem__(self, index: slice) -> list[TouchVerdict]: ...
    def __getitem__(self, index: int | slice) -> TouchVerdict | list[TouchVerdict]:
        if isinstance(index, slice):
            return [_VERDICTS[code] for code in self._codes[index]]
        return _VERDICTS[self._codes[index]]

    def __iter__(self) -> Iterator[TouchVerdict]:
        return map(_VERDICTS.__getitem__, self._codes)

    def __repr__(self) -> str:
        return (
            f"TouchResult(refreshed={self.refreshed}, present={self.present}, gone={self.gone}, "
            f"seq={self.seq})"
        )

    @property
    def verdicts(self) -> list[TouchVerdict]:
        """One verdict per position."""
        return list(self)

    @property
    def locations(self) -> list[str | None]:
        """Per position, the first tier that would serve the key, or None."""
        tiers = self._tiers
        return [None if code == NO_TIER else tiers[code] for code in self._tier_codes]

    @property
    def refreshed(self) -> int:
        """How many positions are REFRESHED."""
        return self._codes.count(CODE_REFRESHED)

    @property
    def present(self) -> int:
        """How many positions are PRESENT."""
        return self._codes.count(CODE_PRESENT)

    @property
    def gone(self) -> int:
        """How many positions are GONE."""
        return self._codes.count(CODE_GONE)

    @property
    def all_refreshed(self) -> bool:
        """Whether every position is REFRESHED (true of an empty result)."""
        return self.refreshed == len(self._codes)

    @property
    def any_gone(self) -> bool:
        """Whether some position is GONE."""
        return CODE_GONE in self._codes

    def gone_keys(self) -> "list[CacheEngineKey]":
        """Return the keys that are GONE, each once, in the order given."""
        gone = (k for k, code in zip(self._keys, self._codes, strict=True) if code == CODE_GONE)
        return list(dict.fromkeys(gone))
