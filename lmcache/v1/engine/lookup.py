"""Lookup: how long a prefix of a prompt is cached, pinned for its request if so asked."""

from collections.abc import Collection, Mapping

from lmcache.v1.engine.parts import EngineParts
from lmcache.v1.pin_table import PinOwner
from lmcache.v1.stats import LookupDone
from lmcache.v1.token_database import Chunks


def lookup(
    parts: EngineParts,
    chunks: Chunks,
    search_range: Collection[str] | None,
    owner: PinOwner | None,
    request_configs: Mapping[str, object] | None,
    started_s: float,
) -> int:
    """Return the tokens of the prefix that the tiers hold together.

    Args:
        search_range: Names of the tiers to search; None: those of `retrieve_locations`, or all.
        owner: Pin the prefix for this lookup id, which counts as one use of each key; None: pin
            nothing and move nothing.
        started_s: When the call began.
    """
    keys = parts.token_database.make_keys(chunks.hashes, request_configs)
    among = parts.retrieve_locations if search_range is None else search_range
    num_hit, _ = parts.storage_manager.batched_contains(keys, among, owner is not None, owner)
    if owner is not None:
        parts.storage_manager.touch_cache(owner)
    hit_tokens = chunks.ends[num_hit - 1] if num_hit else 0
    parts.stats.lookup_done(
        LookupDone(
            requested_tokens=chunks.num_tokens,
            hit_tokens=hit_tokens,
            seconds=parts.clock.monotonic() - started_s,
        )
    )
    return hit_tokens
