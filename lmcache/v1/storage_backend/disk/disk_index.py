"""What the disk tier holds: index, order and budget, and the work that they leave to the writer."""

import threading
from collections.abc import Iterable, Sequence

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.gauges import DiskTierGauges
from lmcache.v1.memory_object import MemoryObj, release_all
from lmcache.v1.native import HotIndex, Pool
from lmcache.v1.storage_backend.abstract_backend import PutCallback
from lmcache.v1.storage_backend.cache_events import RemovalReason
from lmcache.v1.storage_backend.cache_policy import honours_placement
from lmcache.v1.storage_backend.disk.backlog import Backlog
from lmcache.v1.storage_backend.disk.chunk_directory import FoundFile, digest_of
from lmcache.v1.storage_backend.disk.disk_chunk import DiskChunk, has_contents_of
from lmcache.v1.storage_backend.disk.fork_guard import guard_at_fork
from lmcache.v1.storage_backend.disk.steps import Aftermath, Dropped, Round, Wanted
from lmcache.v1.storage_backend.disk.write_queue import Trash, WriteQueue
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.residency_ledger import REASON_NUMBER, TierLedger

_MAX_ROUND_FOUND = 64


class DiskIndex:
    """Key to chunk, with the order in which chunks leave, an exact budget, and a bounded queue.

        state    meaning                                               who may leave it
        listing  files of an earlier run are not known: no round       begin_adoption
                 begins, puts wait in the queue
        serving  rounds begin when there is work                       begin_close
        closing  puts are refused; the queue is still written          end
        closed   nothing is listed, and no round begins                nobody

    A chunk may be queued, being written or on disk; all three are resident, and STORED is told at
    admission. Files of an earlier run make room before anything that is listed.

    `lock` guards every member. It is never held over I/O; in the lock order it is the disk tier's.

    Args:
        capacity_bytes: Of files, heads included.
        queue_bytes: See `WriteQueue`.
        policy_name: LRU, LFU, FIFO or MRU.
        page: Where transitions are reported.
    """

    def __init__(
        self, capacity_bytes: int, queue_bytes: int, policy_name: str, page: TierLedger
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.lock = threading.Lock()
        self._has_work = threading.Condition(self.lock)
        self._has_settled = threading.Condition(self.lock)
        self.pool = Pool(0)
        self.index = HotIndex(self.pool, policy_name, page.ledger, page.number, self.lock)
        self._page = page
        self._queue = WriteQueue(queue_bytes)
        self._backlog = Backlog(newest_first=honours_placement(policy_name))
        self._unlisted_bytes = 0  # files of what a put admitted and will list in the end
        self._is_closing = self._is_closed = False
        self._num_dropped = dict.fromkeys(Dropped, 0)
        self._num_failed_writes = 0
        self._num_adopted = 0
        guard_at_fork(self)

    def attach_ledger(self, page: TierLedger) -> None:
        """Report to `page` from now on, beginning with what is resident."""
        with self.lock:
            self._page.forget()
            self._page = page
            self.index.attach(page.ledger, page.number)

    @property
    def used_bytes(self) -> int:
        """Bytes of the budget that are taken."""
        listed_bytes: int = self.index.cached_bytes
        return listed_bytes + self._unlisted_bytes + self._backlog.nbytes + self._queue.stuck_bytes

    # --- storing ---------------------------------------------------------------------------------
    def admit(
        self, wanted: Sequence[Wanted], placement: Placement, callback: PutCallback | None
    ) -> Aftermath:
        """List chunks, given head first, and queue them; stop at the first that finds no room.

        A resident key of the same contents is used again (a cold put moves nothing); of others, it
        is replaced. Nothing is evicted for a chunk that cannot be admitted, nor for a SPARE one,
        and never another chunk of the same batch.
        """
        after = Aftermath()
        held: list[DiskChunk] = []
        listed: dict[CacheEngineKey, DiskChunk] = {}
        with self.lock:
            if self._is_closing:
                return after
            try:
                self._unlisted_bytes = 0  # whatever an interrupted put left there
                residents = self._hold_residents(wanted, held)
                for position, want in enumerate(wanted):
                    resident = residents.get(want.key)
                    if want.key in listed:
                        continue
                    if resident is not None and has_contents_of(resident, want.obj):
                        listed[want.key] = resident
                    elif want.chunk is not None:
                        after.dropped = self._admit_one(want.chunk, resident, placement, after)
                        if after.dropped is not None:
                            self._count_dropped(after.dropped, wanted[position:])
                            break
                        held.append(want.chunk)  # its first reference is ours
                        listed[want.key] = want.chunk
            finally:
                if listed:
                    chunks = tuple(listed.values())
                    self.index.put(tuple(listed), chunks, placement.is_cold, holds_lock=True)
                self._unlisted_bytes = 0
                self._has_work.notify()
                release_all(held)
            if callback is not None:
                after.remember(callback, listed)
        return after

    def _hold_residents(
        self, wanted: Sequence[Wanted], held: list[DiskChunk]
    ) -> dict[CacheEngineKey, DiskChunk]:
        residents: dict[CacheEngineKey, DiskChunk] = {}
        for want in wanted:
            resident: DiskChunk | None = self.index.peek(want.key)
            if resident is not None and want.key not in residents:
                resident.ref_count_up()
                held.append(resident)
                residents[want.key] = resident
        return residents

    def _admit_one(
        self, chunk: DiskChunk, old: DiskChunk | None, placement: Placement, after: Aftermath
    ) -> Dropped | None:
        """Queue a chunk; returns why it cannot be."""
        if not self._queue.takes(chunk.nbytes):
            return Dropped.QUEUE_FULL
        more_bytes = chunk.file_bytes - (0 if old is None else old.file_bytes)
        if not self._make_room(more_bytes, placement is not Placement.SPARE, after):
            return Dropped.NO_ROOM
        if old is not None:  # the index tells of it when it lists the new one
            self._let_go(old, after)
        if self._backlog.may_bring_back:
            self._backlog.condemn(chunk.digest)
        self._unlisted_bytes += more_bytes
        self._queue.add(chunk)
        return None

    def _count_dropped(self, why: Dropped, rest: Sequence[Wanted]) -> None:
        self._num_dropped[why] += len({want.key for want in rest if want.chunk is not None})

    def _make_room(self, nbytes: int, may_evict: bool, after: Aftermath) -> bool:
        """Make `nbytes` more fit the budget; False, and nothing evicted, when they cannot."""
        lacking = self.used_bytes + nbytes - self.capacity_bytes
        if lacking <= 0:
            return True
        if not may_evict:
            return False
        if lacking > self._backlog.nbytes:
            rest = lacking - self._backlog.nbytes
            victims: list[DiskChunk] | None = self.index.make_room(rest, holds_lock=True)
            if victims is None:
                return False
            for victim in victims:
                self._let_go(victim, after)
        while self._backlog.nbytes and self.used_bytes + nbytes > self.capacity_bytes:
            file = self._backlog.drop_oldest()
            if file is not None:
                self._queue.throw_away(file.name, file.size_bytes)
        return True

    def _let_go(self, chunk: DiskChunk, after: Aftermath) -> None:
        """Settle what a chunk that leaves the index leaves behind."""
        after.sources += self._queue.let_go(chunk)

    # --- reading ---------------------------------------------------------------------------------
    def get_many(
        self,
        keys: Sequence[CacheEngineKey],
        chunks: list[DiskChunk | None],
        sources: list[MemoryObj | None],
    ) -> None:
        """Append per key its chunk, or None, and the object that serves it while it is in flight.

        Each with a reference, in the caller's lists whatever interrupts the call. Keys are given
        head first; one use each, head youngest.
        """
        with self.lock:
            self.index.get_many(keys, holds_lock=True, into=chunks)
            for chunk in chunks:
                source = None if chunk is None else chunk.source
                if source is not None:
                    source.ref_count_up()
                sources.append(source)

    def is_in_flight(self, key: CacheEngineKey) -> bool:
        """Whether a put of `key` is not on disk yet."""
        with self.lock:
            chunk: DiskChunk | None = self.index.peek(key)
            return chunk is not None and chunk.source is not None

    # --- removing --------------------------------------------------------------------------------
    def remove(self, keys: Sequence[CacheEngineKey], reason: RemovalReason) -> int:
        """Unlist keys, held ones too; returns how many were there."""
        after = Aftermath()
        with self.lock:
            num_removed = self._remove(keys, reason, after)
        release_all(after.sources)
        return num_removed

    def remove_locked(self, key: CacheEngineKey) -> bool:
        """As `remove` of one key to make room; the caller holds `lock`."""
        after = Aftermath()
        num_removed = self._remove((key,), RemovalReason.CAPACITY, after)
        release_all(after.sources)
        return num_removed == 1

    def remove_chunk(self, chunk: DiskChunk) -> bool:
        """Unlist a chunk whose file is of no use; False when it had left already."""
        after = Aftermath()
        with self.lock:
            is_listed = self.index.peek(chunk.key) is chunk
            if is_listed:
                self._remove((chunk.key,), RemovalReason.ERROR, after)
        release_all(after.sources)
        return is_listed

    def _remove(
        self, keys: Sequence[CacheEngineKey], reason: RemovalReason, after: Aftermath
    ) -> int:
        if self._backlog.may_bring_back:
            for key in keys:
                self._backlog.condemn(digest_of(key.to_string()))
        gone: list[DiskChunk] = self.index.remove(
            tuple(keys), REASON_NUMBER[reason], holds_lock=True
        )
        for chunk in gone:
            self._let_go(chunk, after)
        self._has_work.notify()
        return len(gone)

    def clear(self) -> int:
        """Unlist what nobody holds; returns its tokens."""
        after = Aftermath()
        with self.lock:
            gone: list[DiskChunk] = self.index.clear(
                True, False, REASON_NUMBER[RemovalReason.CLEAR], holds_lock=True
            )
            for chunk in gone:
                self._let_go(chunk, after)
            for file in self._backlog.condemn_all():
                self._queue.throw_away(file.name, file.size_bytes)
            self._has_work.notify()
        release_all(after.sources)
        return sum(chunk.get_num_tokens() for chunk in gone)

    # --- the writer's side -----------------------------------------------------------------------
    def begin_adoption(self, files: Iterable[FoundFile]) -> None:
        """Take in the files of an earlier run; the oldest that exceed the budget are removed."""
        with self.lock:
            room_bytes = self.capacity_bytes - self.used_bytes
            for file in self._backlog.begin(files, room_bytes):
                self._queue.throw_away(file.name, file.size_bytes)
            self._has_settled.notify_all()

    def next_round(self) -> Round | None:
        """Wait for work and return it; None when there will be no more."""
        with self.lock:
            while not self._is_closed:
                if self._queue.has_work or (len(self._backlog) and not self._is_closing):
                    if self._queue.has_work:  # so that what cannot be read keeps nobody busy
                        self._backlog.retry()
                    found = [] if self._is_closing else self._backlog.take(_MAX_ROUND_FOUND)
                    return Round(*self._queue.begin_round(), found)
                if self._is_closing:
                    return None
                self._has_work.wait()
            return None

    def finish_writes(self, chunks: Sequence[DiskChunk], are_whole: Sequence[bool]) -> Aftermath:
        """Note what became of a round's chunks."""
        after = Aftermath()
        with self.lock:
            for chunk, is_whole in zip(chunks, are_whole, strict=True):
                after.sources += self._queue.finish(chunk, is_whole)
                if chunk.is_doomed:
                    continue
                if is_whole:
                    after.callbacks += [(callback, chunk.key) for callback in chunk.callbacks]
                elif self.index.peek(chunk.key) is chunk:
                    self._num_failed_writes += 1
                    number = REASON_NUMBER[RemovalReason.ERROR]  # it has no file to be removed
                    self.index.remove((chunk.key,), number, holds_lock=True)
                if is_whole and self.index.peek(chunk.key) is not chunk and not self._is_closed:
                    self._queue.throw_away(chunk.name, chunk.file_bytes)  # lost to an interrupt
                chunk.callbacks.clear()
        return after

    def adopt(self, found: Sequence[tuple[FoundFile, DiskChunk | None]]) -> None:
        """List what files of an earlier run hold; one without a chunk, or known, is removed."""
        listed: dict[CacheEngineKey, DiskChunk] = {}
        with self.lock:
            for file, chunk in found:
                may_adopt = self._backlog.settle(file)
                if may_adopt and self._is_closing:
                    continue
                is_new = chunk is not None and chunk.key not in listed
                if chunk is None or not may_adopt or not is_new or chunk.key in self.index:
                    self._queue.throw_away(file.name, file.size_bytes)
                    continue
                listed[chunk.key] = chunk
            if listed:
                chunks = tuple(listed.values())
                self.index.put(tuple(listed), chunks, True, holds_lock=True)
                release_all(list(chunks))
                self._num_adopted += len(chunks)

    def note_stuck(self, stuck: Iterable[Trash]) -> int:
        """Note that files could not be removed; returns by how many bytes that is too much."""
        with self.lock:
            self._queue.note_stuck(stuck)
            return self.used_bytes - self.capacity_bytes

    def defer(self, file: FoundFile) -> bool:
        """Look at a file of an earlier run later; False when nobody wants it any more."""
        with self.lock:
            return self._backlog.defer(file)

    def end_round(self) -> None:
        """Note that a round is done."""
        with self.lock:
            self._queue.end_round()
            self._has_settled.notify_all()

    def drain(self) -> None:
        """Wait until old files are adopted, and what was admitted or thrown away so far is done.

        The objects that were written are released then.
        """
        with self.lock:
            while not (self._backlog.is_settled or self._is_closing):
                self._has_settled.wait()
            mark = self._queue.mark()
            while not (self._queue.is_done(mark) or self._is_closed):
                self._has_settled.wait()

    # --- the end ---------------------------------------------------------------------------------
    def begin_close(self) -> None:
        """Refuse puts, and let the writer end when the queue is empty."""
        with self.lock:
            self._is_closing = True
            for file in self._backlog.abandon():
                self._queue.throw_away(file.name, file.size_bytes)
            self._has_work.notify_all()
            self._has_settled.notify_all()

    def end(self) -> None:
        """Unlist everything, and forget what was not written; the files stay."""
        with self.lock:
            self._is_closing = self._is_closed = True
            self.index.clear(False, True, REASON_NUMBER[RemovalReason.CLEAR], holds_lock=True)
            sources = self._queue.abandon()
            self._has_work.notify_all()
            self._has_settled.notify_all()
        release_all(sources)

    def make_inert(self) -> None:
        """In the child of a fork, which has no writer: puts are refused, drains return."""
        self._is_closing = self._is_closed = True

    # --- looking ---------------------------------------------------------------------------------
    def gauges(self) -> DiskTierGauges:
        """Return what the index counts and holds now; the facade adds what it counts itself."""
        with self.lock:
            return DiskTierGauges(
                capacity_bytes=self.capacity_bytes,
                used_bytes=self.used_bytes,
                num_entries=len(self.index),
                num_queued=len(self._queue),
                in_flight_bytes=self._queue.in_flight_bytes,
                dropped_queue_full=self._num_dropped[Dropped.QUEUE_FULL],
                dropped_no_room=self._num_dropped[Dropped.NO_ROOM],
                failed_writes=self._num_failed_writes,
                adopted_entries=self._num_adopted,
                evicted_entries=self.index.num_evicted,
            )

    def check_integrity(self) -> None:
        """Raise AssertionError naming what does not add up."""
        with self.lock:
            faults: list[str] = self.index.check_integrity()
            if self._unlisted_bytes:
                faults.append(f"{self._unlisted_bytes} bytes were admitted and not listed")
            if self.used_bytes > self.capacity_bytes:
                faults.append(f"{self.used_bytes} bytes are used of {self.capacity_bytes}")
            self._queue.check_integrity()
        if faults:
            raise AssertionError("; ".join(faults))
