"""The serving engine of one arm: lookup, plan, load, compute, as described in the package."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay.kv_service import LoadOutcome
from benchmarks.replay.naming import image_key, image_of
from benchmarks.replay.observer import Observer
from benchmarks.replay.pool import ReplayPool
from benchmarks.replay.requests import Request
from benchmarks.replay.settings import Arm, ImageClass, Settings
from benchmarks.replay.state_index import StateIndex, TouchTicket, VerdictEffect
from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.storage_backend.cache_events import EventKind, Subscription
from lmcache.v1.storage_backend.local_cpu_backend import NAME as CPU_TIER
from lmcache.v1.storage_backend.placement import Placement
from lmcache.v1.storage_backend.touch import TouchVerdict

EVENTS_CAPACITY = 65_536

_CAUSES = {
    LoadOutcome.LOADED: None,
    LoadOutcome.MISSING: "unexplained",
    LoadOutcome.NO_ROOM: "no_room",
    LoadOutcome.WRONG_BYTES: "wrong_bytes",
}


class ReplayEngine:
    """Serves requests one after another in the manner of one arm and counts what happens.

    `events_capacity` bounds what may wait for the state index between two passes; what is lost
    beyond it is made good from a snapshot. `disk_dir` is where the disk tier's directory is made.
    """

    def __init__(
        self,
        settings: Settings,
        arm: Arm,
        *,
        events_capacity: int = EVENTS_CAPACITY,
        disk_dir: Path | None = None,
    ) -> None:
        self._settings = settings
        self._arm = arm
        self._pool = ReplayPool(settings, disk_dir)
        self._index = StateIndex()
        self._counts: Counter[str] = Counter()
        self._observer = Observer(self._pool.manager, self._index, self._counts)
        self._events = self._subscribed(events_capacity) if arm.hears_events else None
        self._verdicts: list[tuple[TouchTicket, TouchVerdict]] = []
        self._now_ms = 0
        self._lookup_id = ""

    def _subscribed(self, capacity: int) -> Subscription:
        kinds = {EventKind.STORED, EventKind.REMOVED}
        try:
            return self._pool.manager.subscribe(kinds=kinds, capacity=capacity)
        except BaseException:  # nobody gets an engine to close
            self._pool.close()
            raise

    def serve(self, request: Request) -> None:
        """Run one request through one engine pass (two or more while it is held)."""
        self._now_ms = request.timestamp_ms
        self._lookup_id = f"request-{self._counts['requests']}"
        self._counts["requests"] += 1
        prompt = request.prefix_ids
        self._hear_events()
        self._hear_verdicts()
        num_matched = self._pool.kv.match(prompt, self._lookup_id)
        resume = self._load(prompt, self._plan(prompt, num_matched))
        self._counts["input_blocks"] += len(prompt)
        self._counts["recomputed_blocks"] += len(prompt) - resume
        self._compute(prompt, num_matched, resume)
        self._pool.kv.release(self._lookup_id)
        self._counts["index_peak"] = max(self._counts["index_peak"], len(self._index))
        self._observer.look(self._now_ms)

    def finish(self) -> dict[str, int]:
        """End the run, close the engine, and return the counts; one that never rose is absent.

        Raises:
            RuntimeError: The engine's own report of its stores contradicts the run.
        """
        self._observer.close(self._now_ms)
        self._count_disk()
        self.close()
        self._counts["index_size"] = len(self._index)
        totals = self._pool.kv.totals()
        self._counts["lookups"] = totals.lookups
        self._counts["kv_stored"] = totals.stored
        self._counts["kv_already_resident"] = totals.resident
        self._counts["kv_no_room"] = totals.no_room
        self._count_entries()
        return {name: value for name, value in self._counts.items() if value}

    def _count_disk(self) -> None:
        disk = self._pool.manager.gauges().disk
        self._counts["disk_entries"] = disk.num_entries
        self._counts["disk_used_bytes"] = disk.used_bytes
        self._counts["disk_dropped_queue_full"] = disk.dropped_queue_full
        self._counts["disk_dropped_no_room"] = disk.dropped_no_room
        self._counts["disk_faults"] = disk.failed_writes + disk.failed_reads

    def _count_entries(self) -> None:
        """What entered the pool and was not stored by us came back from disk."""
        num_images = sum(self._counts[f"images_stored_{klass.value}"] for klass in ImageClass)
        self._counts["promoted_image"] = self._counts.pop("entered_image", 0) - num_images
        self._counts["promoted_kv"] = self._counts.pop("entered_kv", 0) - self._counts["kv_stored"]
        for kind in ("image", "kv"):
            self._counts[f"disk_written_{kind}"] = self._counts.pop(f"disk_entered_{kind}", 0)

    def close(self) -> None:
        """Close everything, also in the middle of a run. Twice is a no-op."""
        if self._events is not None:
            self._events.close()
        self._pool.close()

    # ---- what the engine is told ----------------------------------------------------------------

    def _hear_events(self) -> None:
        if self._events is None:
            return
        resynced_to = -1
        for event in self._events.take():
            if event.kind is EventKind.LOST:
                resynced_to = self._resync()
            if event.key is None or event.seq <= resynced_to:
                continue
            image = image_of(event.key)
            if image is None:
                continue
            if event.kind is EventKind.STORED:
                self._index.hear_stored(image, event.seq, self._now_ms)
            elif not event.still_in and self._index.hear_gone(image, event.seq):
                self._observer.note_forgotten(image, self._now_ms)

    def _resync(self) -> int:
        """Rebuild the index after lost events; returns the moment it is true for."""
        snapshot = self._pool.manager.snapshot()
        images = {image_of(key) for key in snapshot.residents}
        for image in self._index.resync({image for image in images if image is not None}):
            self._observer.note_forgotten(image, self._now_ms)
        return snapshot.seq

    def _hear_verdicts(self) -> None:
        for ticket, verdict in self._verdicts:
            is_resident = verdict is not TouchVerdict.GONE
            effect = self._index.apply_verdict(ticket, is_resident, self._now_ms)
            if effect is VerdictEffect.FORGOTTEN:
                self._observer.note_forgotten(ticket.image, self._now_ms)
            elif effect is VerdictEffect.STALE:
                self._counts["verdicts_stale"] += 1
        self._verdicts.clear()

    # ---- plan and load --------------------------------------------------------------------------

    def _plan(self, prompt: Sequence[int], num_matched: int) -> int:
        """Return the block to resume at; holds passes and steps down as verdicts demand."""
        while True:
            boundary = self._index.deepest_boundary(prompt, num_matched)
            if not boundary or not self._arm.touches:
                return boundary
            image = prompt[boundary - 1]
            may_go = self._arm.hears_events or self._index.is_verified(
                image, self._now_ms, self._settings.verified_for_ms
            )
            self._send_touch(image)
            if may_go:
                return boundary
            self._counts["holds"] += 1
            self._look_up_again(prompt, num_matched)
            self._hear_verdicts()
            if image in self._index:
                return boundary
            self._counts["replans"] += 1

    def _look_up_again(self, prompt: Sequence[int], num_matched: int) -> None:
        """A held request asks anew in its next pass: pinned as it is, nothing has changed."""
        if self._pool.kv.match(prompt, self._lookup_id) != num_matched:
            raise RuntimeError(f"pins of {self._lookup_id} did not keep its {num_matched} blocks")

    def _send_touch(self, image: int) -> None:
        ticket = self._index.want_touch(image, self._now_ms)
        if ticket is None:
            return
        (verdict,) = self._pool.touch(image_key(image))
        self._counts[f"touches_{verdict.name.lower()}"] += 1
        self._verdicts.append((ticket, verdict))

    def _load(self, prompt: Sequence[int], boundary: int) -> int:
        """Load image and KV up to `boundary`; returns where computing starts, 0 after a failure."""
        if not boundary:
            return 0
        self._counts["loads_attempted"] += 1
        image = prompt[boundary - 1]
        cause = self._load_cause(image, prompt[:boundary])
        if cause is not None:
            self._counts["loads_failed"] += 1
            self._counts[f"failed_{cause}"] += 1
            self._index.forget(image)
            self._observer.note_forgotten(image, self._now_ms)
            return 0
        self._index.note_loaded(image, self._now_ms)
        self._counts["loads_succeeded"] += 1
        self._counts["loaded_blocks"] += boundary
        return boundary

    def _load_cause(self, image: int, prefix: Sequence[int]) -> str | None:
        """Load; returns why it failed, or None."""
        key = image_key(image)
        if self._pool.tier_of(key) is None:
            has_touches_only = self._arm.touches and not self._arm.hears_events
            return self._observer.why_missing(image, has_touches_only=has_touches_only)
        with self._pool.kept(key):  # KV that is read from disk makes room in the pool
            outcome = self._pool.kv.load(prefix)
        if outcome is LoadOutcome.MISSING:
            return "kv_missing"
        if outcome is LoadOutcome.LOADED:
            outcome = self._pool.load_image(key, is_use=self._arm.touches)
        return _CAUSES[outcome]

    # ---- compute and store ----------------------------------------------------------------------

    def _compute(self, prompt: Sequence[int], num_matched: int, resume: int) -> None:
        """Compute what was not loaded, step by step; each step stores its KV, then its images."""
        step = self._settings.prefill_blocks or max(1, len(prompt))
        for start in range(resume, len(prompt), step):
            end = min(start + step, len(prompt))
            first = max(start, num_matched)
            if first < end:
                self._pool.kv.store(prompt[:end], first)
            self._store_images(prompt, num_matched, start, end)

    def _store_images(self, prompt: Sequence[int], num_matched: int, start: int, end: int) -> None:
        """Store the images of the boundaries in (start, end], shallow first."""
        interval = self._settings.interval_blocks
        branch = num_matched // interval * interval
        first = (start // interval + 1) * interval
        for boundary in range(first, min(end + 1, len(prompt)), interval):
            klass = ImageClass.BRANCH if boundary == branch else ImageClass.INTERVAL
            self._store_image(prompt[boundary - 1], klass)
        if end == len(prompt):
            self._store_image(prompt[-1], ImageClass.PROMPT_END)

    def _store_image(self, image: int, klass: ImageClass) -> None:
        """Store an image, unless the pool holds it: one that is on disk only comes back."""
        key = image_key(image)
        if self._arm.touches:
            (tier,) = self._pool.touch(key).locations
        else:
            tier = self._pool.tier_of(key)
        if tier == CPU_TIER:
            self._counts["images_already_resident"] += 1
        elif self._put_image(key, klass):
            self._counts["images_stored_back"] += tier is not None
        else:
            return
        self._observer.look(self._now_ms)
        self._observer.note_stored(image, self._now_ms)
        self._index.note_stored(image, self._now_ms, as_of_seq=self._pool.newest_event)

    def _put_image(self, key: CacheEngineKey, klass: ImageClass) -> bool:
        placement = Placement.YOUNG
        if self._arm.admits_by_class and klass is ImageClass.INTERVAL:
            placement = Placement.SPARE
            if not self._pool.has_spare_room():
                self._counts["images_refused"] += 1
                return False
        if not self._pool.store_image(key, placement):
            self._counts["images_no_room"] += 1
            return False
        self._counts[f"images_stored_{klass.value}"] += 1
        return True
