"""The contract of lookup clients."""

import abc
from collections.abc import Mapping
from types import TracebackType

from lmcache.v1.token_ids import TokenIds

NOT_LOOKED_UP = -1


class LookupClientInterface(abc.ABC):
    """Asks, from the scheduler's process, how much of a prompt the workers have cached.

    Threads: safe from any thread; lookups wait for one another.
    """

    @abc.abstractmethod
    def lookup(
        self,
        token_ids: TokenIds,
        lookup_id: str,
        request_configs: Mapping[str, object] | None = None,
    ) -> int | None:
        """Return the tokens of the longest prefix that every rank has; None: ask again later.

        The ranks keep the prefix for `lookup_id` until it is unpinned there, or its pins expire. A
        rank that cannot be reached counts as having nothing.

        Args:
            token_ids: [num_tokens] ids; list or tensor.
            lookup_id: Of the request; asking again under it pins and uses a chunk once.
            request_configs: Options of the request; its tags are part of its keys.

        Raises:
            ValueError: Tokens or options that cannot be sent.
            TypeError: `lookup_id` is no str.
        """

    @abc.abstractmethod
    def lookup_cache(self, lookup_id: str) -> int | None:
        """Return the last answer for a lookup id: tokens, -1 for none, None while it is awaited."""

    @abc.abstractmethod
    def clear_lookup_status(self, lookup_id: str) -> None:
        """Forget the last answer for a lookup id. Pins stay: they are the workers'."""

    @abc.abstractmethod
    def supports_producer_reuse(self) -> bool:
        """Whether a producer of KV may itself load what is cached."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connections. Twice is a no-op."""

    def __enter__(self) -> "LookupClientInterface":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
