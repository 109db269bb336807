"""What the engine reports about its operations, and whom it may report to."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LookupDone:
    """One lookup has answered.

    Attributes:
        requested_tokens: Tokens that were looked up.
        hit_tokens: Length of the prefix that was found.
        seconds: From call to answer.
    """

    requested_tokens: int
    hit_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreDone:
    """One store has ended.

    Attributes:
        requested_tokens: Tokens the mask asked to store.
        stored_tokens: Tokens whose KV was copied and handed to the tiers.
        resident_tokens: Tokens that were there already and were refreshed instead. Those behind
            the point where memory ended count as neither.
        seconds: From call to return.
        process_tokens_seconds: Hashing, finding what is resident, and allocating the rest.
        from_gpu_seconds, put_seconds: Copying, and handing over to the tiers.
    """

    requested_tokens: int
    stored_tokens: int
    resident_tokens: int
    seconds: float
    process_tokens_seconds: float
    from_gpu_seconds: float
    put_seconds: float


@dataclass(frozen=True, slots=True)
class RetrieveDone:
    """One retrieve has ended.

    Attributes:
        requested_tokens: Tokens the mask asked to load.
        hit_tokens: Tokens whose KV was loaded.
        seconds: From call to return.
        process_tokens_seconds: Hashing, and getting the memory objects from their tiers.
        to_gpu_seconds: Copying.
    """

    requested_tokens: int
    hit_tokens: int
    seconds: float
    process_tokens_seconds: float
    to_gpu_seconds: float


class EngineStats(Protocol):
    """Hears of every operation that ended, a failed one excepted. Threads: called from any."""

    def lookup_done(self, done: LookupDone) -> None:
        """Take note of a lookup."""
        ...

    def store_done(self, done: StoreDone) -> None:
        """Take note of a store."""
        ...

    def retrieve_done(self, done: RetrieveDone) -> None:
        """Take note of a retrieve."""
        ...


class NullStats:
    """Takes note of nothing."""

    def lookup_done(self, done: LookupDone) -> None:
        """Ignore it."""

    def store_done(self, done: StoreDone) -> None:
        """Ignore it."""

    def retrieve_done(self, done: RetrieveDone) -> None:
        """Ignore it."""
