"""The same run in plain Python, written from the rules alone: the replay's oracle.

Nothing of the engine under test is imported and no planning code is shared with it: only the
settings and the requests. Each tier is one ordered dictionary, coldest entry first. With KV blocks
and images of one size every victim is determined, so each count must equal the engine's. With two
sizes the model evicts the coldest entries until the new one fits, which ignores fragmentation: then
it is a reference, not an oracle.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.replay.model_tiers import IMAGE, KV, Entry, Tiers
from benchmarks.replay.requests import Request
from benchmarks.replay.settings import TOUCH_INTERVAL_MS, Arm, Settings


def _kv(prompt: Sequence[int]) -> list[Entry]:
    return [(KV, block) for block in prompt]


@dataclass
class _Known:
    """What the state index remembers of one advertised image."""

    verified_ms: int
    verified_at: int
    sent_ms: int | None = None
    sent_at: int = -1


@dataclass
class _Verdict:
    image: int
    sent_at: int
    gone: bool


@dataclass
class _Model:
    settings: Settings
    arm: Arm
    tiers: Tiers
    counts: Counter[str] = field(default_factory=Counter)
    index: dict[int, _Known] = field(default_factory=dict)
    verdicts: list[_Verdict] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    stale_since: dict[int, int] = field(default_factory=dict)
    ever_stored: set[int] = field(default_factory=set)
    now_ms: int = 0
    ticks: int = 0

    # ---- one pass -------------------------------------------------------------------------------

    def serve(self, request: Request) -> None:
        self.now_ms = request.timestamp_ms
        prompt = request.prefix_ids
        self.counts["requests"] += 1
        self.counts["input_blocks"] += len(prompt)
        self._hear_removals()
        self._hear_verdicts()
        in_pool, on_disk = self._match_kv(prompt)
        matched = len(in_pool) + len(on_disk)
        resume = self._load(prompt, self._plan(prompt, matched))
        self.counts["recomputed_blocks"] += len(prompt) - resume
        self._compute(prompt, matched, resume)
        self.tiers.pool.let_go(in_pool)
        self.tiers.disk.let_go(on_disk)
        self.counts["index_peak"] = max(self.counts["index_peak"], len(self.index))
        self._note_evictions()

    def _hear_removals(self) -> None:
        if self.arm.hears_events:
            for image in self.told:
                if (IMAGE, image) not in self.tiers:
                    self._forget(image)
        self.told.clear()

    def _hear_verdicts(self) -> None:
        for verdict in self.verdicts:
            known = self.index.get(verdict.image)
            if known is None:
                continue
            if not verdict.gone:
                known.verified_ms = self.now_ms
                known.verified_at = self._tick()
            elif known.verified_at < verdict.sent_at:
                self._forget(verdict.image)
            else:
                self.counts["verdicts_stale"] += 1
        self.verdicts.clear()

    def _match_kv(self, prompt: Sequence[int]) -> tuple[Sequence[Entry], Sequence[Entry]]:
        """Pin and use the longest prefix held, each part in the tier that it was found in."""
        self.counts["lookups"] += bool(prompt)
        in_pool, on_disk = self.tiers.match(_kv(prompt))
        self.tiers.pool.use(in_pool)
        self.tiers.pool.keep(in_pool)
        self.tiers.disk.use(on_disk)
        self.tiers.disk.keep(on_disk)
        return in_pool, on_disk

    def _plan(self, prompt: Sequence[int], matched: int) -> int:
        while True:
            boundary = matched
            while boundary and prompt[boundary - 1] not in self.index:
                boundary -= 1
            if not boundary or not self.arm.touches:
                return boundary
            image = prompt[boundary - 1]
            known = self.index[image]
            fresh = self.now_ms - known.verified_ms <= self.settings.verified_for_ms
            self._touch(image, known)
            if fresh or self.arm.hears_events:
                return boundary
            self.counts["holds"] += 1
            self.counts["lookups"] += 1
            self._hear_verdicts()
            if image in self.index:
                return boundary
            self.counts["replans"] += 1

    def _touch(self, image: int, known: _Known) -> None:
        if known.sent_ms is not None and self.now_ms - known.sent_ms < TOUCH_INTERVAL_MS:
            return
        known.sent_ms = self.now_ms
        known.sent_at = self._tick()
        verdict = "gone"
        if (IMAGE, image) in self.tiers:
            verdict = "refreshed" if (IMAGE, image) in self.tiers.pool else "present"
            self.tiers.use([(IMAGE, image)])
        self.counts[f"touches_{verdict}"] += 1
        self.verdicts.append(_Verdict(image, known.sent_at, gone=verdict == "gone"))

    def _load(self, prompt: Sequence[int], boundary: int) -> int:
        if not boundary:
            return 0
        self.counts["loads_attempted"] += 1
        image = prompt[boundary - 1]
        cause = self._load_cause((IMAGE, image), _kv(prompt[:boundary]))
        if cause is not None:
            self.counts["loads_failed"] += 1
            self.counts[f"failed_{cause}"] += 1
            self._forget(image)
            return 0
        self.index[image].verified_ms = self.now_ms
        self.index[image].verified_at = self._tick()
        self.counts["loads_succeeded"] += 1
        self.counts["loaded_blocks"] += boundary
        return boundary

    def _load_cause(self, image: Entry, blocks: Sequence[Entry]) -> str | None:
        if image not in self.tiers:
            return self._cause(image[1])
        held = self.tiers.pool.keep([image] if image in self.tiers.pool else [])
        in_pool, on_disk = self.tiers.match(blocks)
        self.tiers.pool.use(in_pool)
        has_room = self.tiers.read(on_disk)
        self.tiers.pool.let_go(held)
        if image not in self.tiers.pool:
            has_room = has_room and self.tiers.read([image])
        elif self.arm.touches:
            self.tiers.pool.use([image])
        return None if has_room else "no_room"

    def _cause(self, image: int) -> str:
        if image not in self.ever_stored:
            return "never_stored"
        if self.arm is Arm.TOUCH:
            return "left_between_touches"
        return "evicted_untold"

    # ---- stores ---------------------------------------------------------------------------------

    def _compute(self, prompt: Sequence[int], matched: int, resume: int) -> None:
        done = resume
        while done < len(prompt):
            upto = len(prompt)
            if self.settings.prefill_blocks is not None:
                upto = min(upto, done + self.settings.prefill_blocks)
            self._store_kv(prompt[:upto], max(matched, done))
            self._store_images(prompt, matched, done, upto)
            done = upto

    def _store_kv(self, prompt: Sequence[int], wanted_from: int) -> None:
        step = self.settings.put_blocks or max(1, len(prompt))
        for start in range(wanted_from, len(prompt), step):
            self._store_kv_part(_kv(prompt[: start + step]), start)

    def _store_kv_part(self, entries: Sequence[Entry], wanted_from: int) -> None:
        """Walk the prompt: what is there stays and is used, what is missing goes in until it ends.

        A block that is not wanted and not there is passed over.
        """
        pool = self.tiers.pool
        used, new = list(pool.prefix(entries)), []
        leading = len(used)
        kept_here = pool.keep(used)
        resident = max(0, leading - wanted_from)
        for position in range(leading, len(entries)):
            entry = entries[position]
            if entry in pool:
                kept_here += pool.keep([entry])
                resident += position >= wanted_from
            elif position < wanted_from:
                continue
            elif pool.reserve(KV):
                new.append(entry)
            else:
                break
            used.append(entry)
        pool.add(new)
        self.tiers.write(new)
        self.tiers.use(used)
        pool.let_go(kept_here)
        self.counts["kv_stored"] += len(new)
        self.counts["kv_already_resident"] += resident
        self.counts["kv_no_room"] += len(entries) - wanted_from - len(new) - resident

    def _store_images(self, prompt: Sequence[int], matched: int, done: int, upto: int) -> None:
        every = self.settings.interval_blocks
        branch = matched - matched % every
        for boundary in range(done + 1, upto + 1):
            if boundary == len(prompt):
                self._store_image(prompt[boundary - 1], "prompt_end")
            elif boundary % every == 0:
                self._store_image(
                    prompt[boundary - 1], "branch" if boundary == branch else "interval"
                )

    def _store_image(self, image: int, klass: str) -> None:
        entry, pool = (IMAGE, image), self.tiers.pool
        is_known, is_hot = entry in self.tiers, entry in pool
        if self.arm.touches:
            self.tiers.use([entry])
        if is_hot:
            self.counts["images_already_resident"] += 1
        else:
            spare = self.arm.admits_by_class and klass == "interval"
            if not pool.reserve(IMAGE, may_evict=not spare):
                self.counts["images_refused" if spare else "images_no_room"] += 1
                return
            pool.add([entry], cold=spare)
            self.tiers.write([entry], cold=spare)
            self.counts[f"images_stored_{klass}"] += 1
            self.counts["images_stored_back"] += is_known
        self._note_evictions()
        self._advertise(image)

    # ---- the state index and who watches it -----------------------------------------------------

    def _advertise(self, image: int) -> None:
        self.ever_stored.add(image)
        self._end_stale(image)
        old = self.index.get(image)
        fresh = _Known(self.now_ms, self._tick())
        if old is not None:
            fresh.sent_ms, fresh.sent_at = old.sent_ms, old.sent_at
        self.index[image] = fresh

    def _forget(self, image: int) -> None:
        if self.index.pop(image, None) is not None:
            self._end_stale(image)

    def _end_stale(self, image: int) -> None:
        since = self.stale_since.pop(image, None)
        if since is not None:
            self._count_stale(self.now_ms - since)

    def _count_stale(self, lasted_ms: int) -> None:
        self.counts["stale_images"] += 1
        self.counts["stale_total_ms"] += lasted_ms
        self.counts["stale_max_ms"] = max(self.counts["stale_max_ms"], lasted_ms)

    def _note_evictions(self) -> None:
        for tier, (kind, name), was_last in self.tiers.take_evicted():
            self.counts[f"evicted_{kind}" if tier == "pool" else f"disk_evicted_{kind}"] += 1
            if kind == IMAGE and was_last:
                self.told.append(name)
                if name in self.index:
                    self.stale_since.setdefault(name, self.now_ms)

    def _tick(self) -> int:
        self.ticks += 1
        return self.ticks


def run_model(requests: Sequence[Request], settings: Settings, arm: Arm) -> dict[str, int]:
    """Replay through the model and return its counts; a count that never rose is absent."""
    model = _Model(settings, arm, Tiers(settings))
    for request in requests:
        model.serve(request)
    for since in model.stale_since.values():
        model._count_stale(model.now_ms - since)
    disk = model.tiers.disk
    model.counts["index_size"] = len(model.index)
    model.counts["disk_entries"] = len(disk.order)
    model.counts["disk_used_bytes"] = disk.capacity - disk.free
    model.counts["disk_dropped_no_room"] = model.tiers.num_dropped
    for kind, number in model.tiers.num_written.items():
        model.counts[f"disk_written_{kind}"] = number
    for kind, number in model.tiers.num_promoted.items():
        model.counts[f"promoted_{kind}"] = number
    return {name: value for name, value in model.counts.items() if value}
