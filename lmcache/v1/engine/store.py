"""Store: copy the chunks of a prompt that are not there yet, and refresh the whole prefix."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.engine.chunk_specs import ChunkSpecs
from lmcache.v1.engine.parts import ChunkCopier, EngineParts
from lmcache.v1.engine.residents import HotResidents, Residents, TierResidents
from lmcache.v1.memory_format import MemoryFormat
from lmcache.v1.memory_object import MemoryObj, release_all
from lmcache.v1.stats import StoreDone
from lmcache.v1.storage_backend.local_cpu_backend import NAME as LOCAL_CPU
from lmcache.v1.token_database import Chunks
from lmcache.v1.token_ids import TokenIds


@dataclass(slots=True)
class _Batch:
    """Chunks on their way in, head first; the references are ours until they were put."""

    keys: list[CacheEngineKey] = field(default_factory=list)
    objs: list[MemoryObj] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def release(self) -> None:
        release_all(self.objs)


class Store:
    """One call of `LMCacheEngine.store`.

    What is resident is not copied again. What is missing is allocated head first; where memory
    ends, the store ends: the prompt keeps a shorter prefix, and never evicts its own. In the end
    the whole prefix is one use, head youngest, so eviction takes its tail first however many calls
    stored it. A chunk is listed after its bytes were copied, never before.

    Args:
        parts: The engine's.
        connector: Copies the bytes.
        fmt: Layout of the chunks.
    """

    def __init__(self, parts: EngineParts, connector: ChunkCopier, fmt: MemoryFormat) -> None:
        self._parts = parts
        self._connector = connector
        self._fmt = fmt
        self._started_s = parts.clock.monotonic()
        self._specs = ChunkSpecs(parts.metadata)

    def run(
        self,
        chunks: Chunks,
        tokens: TokenIds | None,
        request_configs: Mapping[str, object] | None,
        transfer_spec: Any,
        connector_kwargs: Mapping[str, Any],
    ) -> None:
        """Store the chunks that the mask does not leave out.

        Raises:
            Exception: What the connector raised; nothing was stored then.
        """
        parts = self._parts
        keys = parts.token_database.make_keys(chunks.hashes, request_configs)
        tier = parts.storage_manager.first_put_tier(parts.store_location)
        if tier is None:  # nothing takes puts: the hot cache is off, and there is no other tier
            return
        residents: Residents = (
            HotResidents(parts.storage_manager)
            if tier == LOCAL_CPU
            else TierResidents(parts.storage_manager, tier)
        )
        batch = _Batch()
        try:
            kept = self._collect(chunks, keys, residents, batch)
            collected_s = parts.clock.monotonic()
            copied_s = self._copy(chunks, batch, connector_kwargs)
            self._put(batch, chunks, tokens, transfer_spec)
            parts.storage_manager.touch([keys[position] for position in kept])
        finally:
            try:
                batch.release()
                residents.release()
            finally:  # an interrupt on the way into one of them
                batch.release()
                residents.release()
        self._report(chunks, kept, batch, collected_s, copied_s)

    def _collect(
        self,
        chunks: Chunks,
        keys: Sequence[CacheEngineKey],
        residents: Residents,
        batch: _Batch,
    ) -> list[int]:
        """Fill the batch with what is missing; returns the positions that are or will be there."""
        sizes = self._specs.sizes(chunks.starts, chunks.ends)
        num_leading = residents.hold_prefix(keys, sizes)
        kept = list(range(num_leading))
        for position in range(num_leading, len(keys)):
            one = slice(position, position + 1)
            if position > num_leading and residents.hold_prefix(keys[one], sizes[one]):
                kept.append(position)
            elif position >= chunks.num_masked:
                may_wait = not batch.objs and self._could_fit(residents, sizes[position])
                num_tokens = chunks.ends[position] - chunks.starts[position]
                memory_obj = self._allocate(num_tokens, may_wait)
                if memory_obj is None:
                    break
                batch.keys.append(keys[position])
                batch.objs.append(memory_obj)
                batch.positions.append(position)
                kept.append(position)
        return kept

    def _allocate(self, num_tokens: int, may_wait: bool) -> MemoryObj | None:
        spec = self._specs.of(num_tokens)
        return self._parts.storage_manager.allocate(
            spec.shapes, spec.dtypes, self._fmt, busy_loop=may_wait
        )

    def _could_fit(self, residents: Residents, size_bytes: int) -> bool:
        # A store that holds new chunks does not wait for more: two such stores would wait for each
        # other. Nor does it wait for what its own prefix occupies.
        if not self._parts.waits_for_room:
            return False
        capacity_bytes = self._parts.storage_manager.gauges().cpu.capacity_bytes
        return residents.held_bytes + size_bytes <= capacity_bytes

    def _copy(self, chunks: Chunks, batch: _Batch, connector_kwargs: Mapping[str, Any]) -> float:
        """Let the connector fill the batch; returns when it was done."""
        if batch.objs:
            starts = [chunks.starts[position] for position in batch.positions]
            ends = [chunks.ends[position] for position in batch.positions]
            # A copy of the list: a connector that changes it must not change who is released.
            self._connector.batched_from_gpu(list(batch.objs), starts, ends, **connector_kwargs)
        return self._parts.clock.monotonic()

    def _put(
        self, batch: _Batch, chunks: Chunks, tokens: TokenIds | None, transfer_spec: Any
    ) -> None:
        if not batch.objs:
            return
        parts = self._parts
        if parts.kv_events is not None:
            parts.kv_events.describe(batch.keys, batch.positions, chunks, tokens)
        parts.storage_manager.batched_put(
            batch.keys, batch.objs, transfer_spec, parts.store_location
        )
        batch.objs.clear()  # the put dropped our references

    def _report(
        self, chunks: Chunks, kept: list[int], batch: _Batch, collected_s: float, copied_s: float
    ) -> None:
        stored_tokens = _num_tokens(chunks, batch.positions)
        kept_tokens = _num_tokens(chunks, kept[bisect_left(kept, chunks.num_masked) :])
        now_s = self._parts.clock.monotonic()
        self._parts.stats.store_done(
            StoreDone(
                requested_tokens=chunks.num_wanted_tokens,
                stored_tokens=stored_tokens,
                resident_tokens=kept_tokens - stored_tokens,
                seconds=now_s - self._started_s,
                process_tokens_seconds=collected_s - self._started_s,
                from_gpu_seconds=copied_s - collected_s,
                put_seconds=now_s - copied_s,
            )
        )


def _num_tokens(chunks: Chunks, positions: Sequence[int]) -> int:
    return sum(chunks.ends[position] - chunks.starts[position] for position in positions)
