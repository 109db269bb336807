"""The same run in plain Python, written from the rules alone: the replay's oracle.

Nothing of the engine under test is imported and no planning code is shared with it: only the
settings and the requests. The pool is one ordered dictionary, coldest entry first. With KV blocks
and images of one size every victim is determined, so each count must equal the engine's. With two
sizes the model evicts the coldest entries until the new one fits, which ignores fragmentation: then
it is a reference, not an oracle.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.replay.requests import Request
from benchmarks.replay.settings import TOUCH_INTERVAL_MS, Arm, Settings

_KV = "kv"
_IMAGE = "image"
_Entry = tuple[str, int]


class _LruPool:
    """Entries by kind and prefix id, coldest first; sizes in blocks.

    `kept` are entries that may not leave: those a request has pinned, those a store runs over.
    """

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self.evictable = 0
        self.order: OrderedDict[_Entry, int] = OrderedDict()
        self.kept: set[_Entry] = set()
        self.evicted: list[_Entry] = []

    def use(self, entry: _Entry) -> None:
        self.order.move_to_end(entry)

    def keep(self, entry: _Entry) -> bool:
        """Let an entry stay; False where it does already."""
        if entry in self.kept:
            return False
        self.kept.add(entry)
        self.evictable -= self.order[entry]
        return True

    def let_go(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            self.kept.remove(entry)
            self.evictable += self.order[entry]

    def reserve(self, size: int) -> bool:
        """Take `size` blocks, evicting the coldest entries; False leaves the pool as it was."""
        if self.free + self.evictable < size:
            return False
        while self.free < size:
            victim = next(entry for entry in self.order if entry not in self.kept)
            freed = self.order.pop(victim)
            self.evicted.append(victim)
            self.free += freed
            self.evictable -= freed
        self.free -= size
        return True

    def add(self, entry: _Entry, size: int, *, cold: bool = False) -> None:
        """Make reserved blocks an entry, youngest, or first out when cold."""
        self.order[entry] = size
        self.evictable += size
        if cold:
            self.order.move_to_end(entry, last=False)


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
    pool: _LruPool
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
        matched = self._match_kv(prompt)
        resume = self._load(prompt, self._plan(prompt, matched))
        self.counts["recomputed_blocks"] += len(prompt) - resume
        self._compute(prompt, matched, resume)
        self.pool.let_go([(_KV, block) for block in prompt[:matched]])
        self.counts["index_peak"] = max(self.counts["index_peak"], len(self.index))
        self._note_evictions()

    def _hear_removals(self) -> None:
        if self.arm.hears_events:
            for image in self.told:
                if (_IMAGE, image) not in self.pool.order:
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

    def _match_kv(self, prompt: Sequence[int]) -> int:
        self.counts["lookups"] += bool(prompt)
        matched = 0
        while matched < len(prompt) and (_KV, prompt[matched]) in self.pool.order:
            matched += 1
        for block in reversed(prompt[:matched]):
            self.pool.use((_KV, block))
            self.pool.keep((_KV, block))
        return matched

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
        resident = (_IMAGE, image) in self.pool.order
        if resident:
            self.pool.use((_IMAGE, image))
        self.counts["touches_refreshed" if resident else "touches_gone"] += 1
        self.verdicts.append(_Verdict(image, known.sent_at, gone=not resident))

    def _load(self, prompt: Sequence[int], boundary: int) -> int:
        if not boundary:
            return 0
        self.counts["loads_attempted"] += 1
        image = prompt[boundary - 1]
        if (_IMAGE, image) not in self.pool.order:
            self.counts["loads_failed"] += 1
            self.counts[f"failed_{self._cause(image)}"] += 1
            self._forget(image)
            return 0
        for block in reversed(prompt[:boundary]):
            self.pool.use((_KV, block))
        if self.arm.touches:
            self.pool.use((_IMAGE, image))
        self.index[image].verified_ms = self.now_ms
        self.index[image].verified_at = self._tick()
        self.counts["loads_succeeded"] += 1
        self.counts["loaded_blocks"] += boundary
        return boundary

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
            if matched < upto:
                self._store_kv(prompt[:upto], max(matched, done))
            self._store_images(prompt, matched, done, upto)
            done = upto

    def _store_kv(self, prompt: Sequence[int], wanted_from: int) -> None:
        """Walk the prompt: what is there stays and is used, what is missing goes in until it ends.

        A block that is not wanted and not there is passed over.
        """
        entries = [(_KV, block) for block in prompt]
        leading = 0
        while leading < len(entries) and entries[leading] in self.pool.order:
            leading += 1
        used, new = entries[:leading], []
        kept_here = [entry for entry in used if self.pool.keep(entry)]
        resident = max(0, leading - wanted_from)
        for position in range(leading, len(entries)):
            entry = entries[position]
            if entry in self.pool.order:
                kept_here += [entry] if self.pool.keep(entry) else []
                resident += position >= wanted_from
            elif position < wanted_from:
                continue
            elif self.pool.reserve(1):
                new.append(entry)
            else:
                break
            used.append(entry)
        for entry in new:
            self.pool.add(entry, 1)
        for entry in reversed(used):
            self.pool.use(entry)
        self.pool.let_go(kept_here)
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
        size = self.settings.image_blocks
        if (_IMAGE, image) in self.pool.order:
            self.counts["images_already_resident"] += 1
            if self.arm.touches:
                self.pool.use((_IMAGE, image))
        else:
            spare = self.arm.admits_by_class and klass == "interval"
            if spare and self.pool.free < size:
                self.counts["images_refused"] += 1
                return
            if not self.pool.reserve(size):
                self.counts["images_no_room"] += 1
                return
            self.pool.add((_IMAGE, image), size, cold=spare)
            self.counts[f"images_stored_{klass}"] += 1
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
        for kind, name in self.pool.evicted:
            self.counts[f"evicted_{kind}"] += 1
            if kind == _IMAGE:
                self.told.append(name)
                if name in self.index:
                    self.stale_since.setdefault(name, self.now_ms)
        self.pool.evicted.clear()

    def _tick(self) -> int:
        self.ticks += 1
        return self.ticks


def run_model(requests: Sequence[Request], settings: Settings, arm: Arm) -> dict[str, int]:
    """Replay through the model and return its counts; a count that never rose is absent."""
    model = _Model(settings, arm, _LruPool(settings.pool_blocks))
    for request in requests:
        model.serve(request)
    for since in model.stale_since.values():
        model._count_stale(model.now_ms - since)
    model.counts["index_size"] = len(model.index)
    return {name: value for name, value in model.counts.items() if value}
