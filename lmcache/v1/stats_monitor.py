"""Adding up what one engine reports, until somebody reads it."""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from lmcache.logging import init_logger
from lmcache.v1.clock import Clock, SystemClock
from lmcache.v1.stats import LookupDone, RetrieveDone, StoreDone

logger = init_logger(__name__)

MAX_SAMPLES = 16_384  # of each operation, in an interval that nobody reads
_WARNING_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class LMCacheStats:
    """What happened in one interval; the names are those of 0.5.6 where it has them.

    Counts are exact. The lists hold one number per operation, at most the newest MAX_SAMPLES, and
    leave out operations that have none: a speed without tokens, a part that did not take place.

    Attributes:
        interval_requested_tokens, interval_hit_tokens: Of retrieves.
        interval_stored_tokens: Copied and handed to the tiers, whether or not one kept them; what
            was resident is in `interval_resident_tokens`.
        interval_lookup_tokens, interval_lookup_hits: Tokens looked up, and found.
        interval_vllm_hit_tokens, interval_prompt_tokens: As the serving engine reported them.
        interval_num_slow_retrieval_by_time, interval_num_slow_retrieval_by_speed: Retrieves past
            the monitor's thresholds.
        interval_dropped_samples: Operations that are missing from the lists.
        retrieve_hit_rate, lookup_hit_rate: Hit tokens over requested ones, 0 when there were none.
        time_to_retrieve, time_to_store, time_to_lookup: Seconds.
        retrieve_speed, store_speed: Tokens per second.
        interval_lookup_hit_rates: Of the lookups that found something.
    """

    interval_retrieve_requests: int
    interval_store_requests: int
    interval_lookup_requests: int
    interval_requested_tokens: int
    interval_hit_tokens: int
    interval_stored_tokens: int
    interval_resident_tokens: int
    interval_lookup_tokens: int
    interval_lookup_hits: int
    interval_lookup_0_hit_requests: int
    interval_vllm_hit_tokens: int
    interval_prompt_tokens: int
    interval_num_slow_retrieval_by_time: int
    interval_num_slow_retrieval_by_speed: int
    interval_dropped_samples: int
    retrieve_hit_rate: float
    lookup_hit_rate: float
    time_to_retrieve: list[float]
    time_to_store: list[float]
    time_to_lookup: list[float]
    retrieve_speed: list[float]
    store_speed: list[float]
    retrieve_process_tokens_time: list[float]
    retrieve_to_gpu_time: list[float]
    store_process_tokens_time: list[float]
    store_from_gpu_time: list[float]
    store_put_time: list[float]
    interval_lookup_hit_rates: list[float]


class Interval:
    """Sums and samples since the last reading. Threads: its owner's only."""

    def __init__(self) -> None:
        self.num_lookups = self.lookup_tokens = self.lookup_hits = self.num_0_hit_lookups = 0
        self.num_stores = self.stored_tokens = self.resident_tokens = 0
        self.num_retrieves = self.requested_tokens = self.hit_tokens = 0
        self.num_slow_by_time = self.num_slow_by_speed = 0
        self.vllm_hit_tokens = self.prompt_tokens = 0
        self.lookups: deque[LookupDone] = deque(maxlen=MAX_SAMPLES)
        self.stores: deque[StoreDone] = deque(maxlen=MAX_SAMPLES)
        self.retrieves: deque[RetrieveDone] = deque(maxlen=MAX_SAMPLES)

    def put_before(self, earlier: "Interval") -> None:
        """Make this interval begin where `earlier` did; of the samples the newest are kept."""
        own = vars(self)
        for name, old in vars(earlier).items():
            if isinstance(old, deque):
                own[name] = deque([*old, *own[name]], maxlen=MAX_SAMPLES)
            else:
                own[name] += old

    def stats(self) -> LMCacheStats:
        """Return the interval as its readers know it."""
        lookups, stores, retrieves = self.lookups, self.stores, self.retrieves
        num_operations = self.num_lookups + self.num_stores + self.num_retrieves
        return LMCacheStats(
            interval_retrieve_requests=self.num_retrieves,
            interval_store_requests=self.num_stores,
            interval_lookup_requests=self.num_lookups,
            interval_requested_tokens=self.requested_tokens,
            interval_hit_tokens=self.hit_tokens,
            interval_stored_tokens=self.stored_tokens,
            interval_resident_tokens=self.resident_tokens,
            interval_lookup_tokens=self.lookup_tokens,
            interval_lookup_hits=self.lookup_hits,
            interval_lookup_0_hit_requests=self.num_0_hit_lookups,
            interval_vllm_hit_tokens=self.vllm_hit_tokens,
            interval_prompt_tokens=self.prompt_tokens,
            interval_num_slow_retrieval_by_time=self.num_slow_by_time,
            interval_num_slow_retrieval_by_speed=self.num_slow_by_speed,
            interval_dropped_samples=num_operations - len(lookups) - len(stores) - len(retrieves),
            retrieve_hit_rate=_ratio(self.hit_tokens, self.requested_tokens),
            lookup_hit_rate=_ratio(self.lookup_hits, self.lookup_tokens),
            time_to_retrieve=[done.seconds for done in retrieves],
            time_to_store=[done.seconds for done in stores],
            time_to_lookup=[done.seconds for done in lookups],
            retrieve_speed=_known(_ratio(r.hit_tokens, r.seconds) for r in retrieves),
            store_speed=_known(_ratio(s.stored_tokens, s.seconds) for s in stores),
            retrieve_process_tokens_time=_known(r.process_tokens_seconds for r in retrieves),
            retrieve_to_gpu_time=_known(r.to_gpu_seconds for r in retrieves),
            store_process_tokens_time=_known(s.process_tokens_seconds for s in stores),
            store_from_gpu_time=_known(s.from_gpu_seconds for s in stores),
            store_put_time=_known(s.put_seconds for s in stores),
            interval_lookup_hit_rates=_known(
                _ratio(done.hit_tokens, done.requested_tokens) for done in lookups
            ),
        )


class StatsMonitor:
    """Adds up one engine's operations; an `EngineStats`.

    Args:
        clock: Limits how often a slow retrieve is logged.

    Attributes:
        retrieve_time_threshold: Seconds; a retrieve that takes longer is slow. Never, by default.
        retrieve_token_speed_threshold: Tokens per second; a retrieve that loads something at less
            is slow. Never, by default.

    Threads: safe from any thread; `_lock` guards the interval, and nothing else is taken under it.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.retrieve_time_threshold = 1e9
        self.retrieve_token_speed_threshold = -1.0
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._interval = Interval()
        self._next_warning_s = 0.0
        self._num_unlogged = 0

    def lookup_done(self, done: LookupDone) -> None:
        """Count a lookup."""
        with self._lock:
            interval = self._interval
            interval.num_lookups += 1
            interval.lookup_tokens += done.requested_tokens
            interval.lookup_hits += done.hit_tokens
            interval.num_0_hit_lookups += done.hit_tokens == 0
            interval.lookups.append(done)

    def store_done(self, done: StoreDone) -> None:
        """Count a store."""
        with self._lock:
            interval = self._interval
            interval.num_stores += 1
            interval.stored_tokens += done.stored_tokens
            interval.resident_tokens += done.resident_tokens
            interval.stores.append(done)

    def retrieve_done(self, done: RetrieveDone) -> None:
        """Count a retrieve; one that is slow is logged, at most every ten seconds."""
        speed = _ratio(done.hit_tokens, done.seconds)
        is_late = done.seconds > self.retrieve_time_threshold
        is_sluggish = 0 < speed < self.retrieve_token_speed_threshold
        with self._lock:
            interval = self._interval
            interval.num_retrieves += 1
            interval.requested_tokens += done.requested_tokens
            interval.hit_tokens += done.hit_tokens
            interval.num_slow_by_time += is_late
            interval.num_slow_by_speed += is_sluggish
            interval.retrieves.append(done)
            num_slow = self._slow_to_log_locked() if is_late or is_sluggish else 0
        if num_slow:
            logger.warning(
                "slow retrieve: %d of %d tokens in %.4f s, %.1f tokens/s (slow above %s s or below "
                "%s tokens/s); %d more since the last such line",
                done.hit_tokens,
                done.requested_tokens,
                done.seconds,
                speed,
                self.retrieve_time_threshold,
                self.retrieve_token_speed_threshold,
                num_slow - 1,
            )

    def _slow_to_log_locked(self) -> int:
        """Return how many slow retrieves a line would stand for; 0: it is too early for one."""
        self._num_unlogged += 1
        now_s = self._clock.monotonic()
        if now_s < self._next_warning_s:
            return 0
        number, self._num_unlogged = self._num_unlogged, 0
        self._next_warning_s = now_s + _WARNING_INTERVAL_SECONDS
        return number

    def update_interval_vllm_hit_tokens(self, delta: int) -> None:
        """Count tokens that the serving engine found in its own cache."""
        with self._lock:
            self._interval.vllm_hit_tokens += delta

    def update_interval_prompt_tokens(self, delta: int) -> None:
        """Count tokens of the prompts that the serving engine took on."""
        with self._lock:
            self._interval.prompt_tokens += delta

    def get_stats_and_clear(self) -> LMCacheStats:
        """Return what was counted since the last call, and begin anew."""
        return self.take_interval().stats()

    def take_interval(self) -> Interval:
        """Like `get_stats_and_clear`, but what it gives can be put back."""
        with self._lock:
            interval, self._interval = self._interval, Interval()
        return interval

    def put_back(self, interval: Interval) -> None:
        """Count a taken interval again, as what happened before the present one."""
        with self._lock:
            self._interval.put_before(interval)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _known(numbers: Iterable[float]) -> list[float]:
    return [number for number in numbers if number]
