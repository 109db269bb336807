"""Metrics: what engines count, and its way to Prometheus. The one importer of prometheus_client.

Metrics are registered with the client's default registry, which serving engines expose. Nothing is
sent anywhere, no server is started, and the environment is left alone; where the user has set
PROMETHEUS_MULTIPROC_DIR, the client writes its files there.
"""

import math
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, values

from lmcache.logging import init_logger
from lmcache.v1.errors import ConfigError
from lmcache.v1.gauges import GaugeSource, ManagerGauges
from lmcache.v1.stats_metrics import (
    HEALTH,
    HISTOGRAMS,
    INTERVAL_COUNTERS,
    INTERVAL_GAUGES,
    MANAGER_GAUGES,
    TOTAL_COUNTERS,
    Metric,
)
from lmcache.v1.stats_monitor import LMCacheStats, StatsMonitor

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig

logger = init_logger(__name__)

__all__ = ["LMCStatsMonitor", "LMCacheStats", "PrometheusLogger", "engine_labels"]

_ENGINE_LABELS = ("model_name", "worker_id", "role", "served_model_name")
_Labels = tuple[str, ...]
_Totals = dict[tuple[str, _Labels], int]
# What the module's earlier load registered, when it is loaded again: names can be taken once only.
_EARLIER_LOGGER: Any = globals().get("PrometheusLogger")
_Step = Callable[[], object]
_Source = TypeVar("_Source")
_Collector = TypeVar("_Collector", Counter, Gauge, Histogram)


class EngineNames(Protocol):
    """What the labels are read from: `LMCacheMetadata`, or a serving engine's proxy of it."""

    @property
    def model_name(self) -> str:
        """Name of the model."""
        ...

    @property
    def worker_id(self) -> int:
        """Rank over all hosts."""
        ...

    @property
    def role(self) -> str | None:
        """The role, "scheduler" or "worker"."""
        ...

    @property
    def served_model_name(self) -> str | None:
        """Name shown in metrics."""
        ...


def engine_labels(metadata: EngineNames) -> tuple[str, ...]:
    """Return the values of an engine's labels, in which engines of one process should differ."""
    return (
        str(metadata.model_name),
        str(metadata.worker_id),
        str(metadata.role),
        metadata.served_model_name or "",
    )


class LMCStatsMonitor(StatsMonitor):
    """The monitor of one engine; engines differ by their labels.

    Threads: safe from any thread; `_instances_lock` guards `_instances`.
    """

    # Labels to monitor, oldest first; None: made before any engine said who it is.
    _instances: "ClassVar[dict[_Labels | None, LMCStatsMonitor]]" = {}
    _instances_lock = threading.Lock()

    @staticmethod
    def GetOrCreate(metadata: EngineNames | None = None) -> "LMCStatsMonitor":  # noqa: N802
        """Return the engine's monitor, or without an argument the oldest one of the process.

        A monitor that was asked for before there was an engine becomes the first engine's.
        """
        labels = None if metadata is None else engine_labels(metadata)
        with LMCStatsMonitor._instances_lock:
            instances = LMCStatsMonitor._instances
            if labels is None and instances:
                return next(iter(instances.values()))
            if labels not in instances:
                is_waiting = None in instances
                instances[labels] = instances.pop(None) if is_waiting else LMCStatsMonitor()
            return instances[labels]

    @staticmethod
    def DestroyInstance(metadata: EngineNames | None = None) -> None:  # noqa: N802
        """Forget the engine's monitor, or without an argument all of them."""
        with LMCStatsMonitor._instances_lock:
            if metadata is None:
                LMCStatsMonitor._instances.clear()
            else:
                LMCStatsMonitor._instances.pop(engine_labels(metadata), None)

    @staticmethod
    def unregister_all_metrics() -> None:
        """Take this package's metrics out of the registry; the next logger makes them anew."""
        PrometheusLogger.unregister_all()


class _Collectors:
    """The metrics of this process, shared by all engines; they differ in label values.

    Args:
        buckets: Upper bounds of each histogram; the first engine's hold for all.

    Raises:
        ValueError: A name is taken; none of ours is left in the registry then.
    """

    def __init__(self, buckets: Mapping[str, tuple[float, ...]]) -> None:
        self.buckets = buckets
        self._made: list[Counter | Gauge | Histogram] = []
        try:
            self._register()
        except BaseException:
            self.unregister()
            raise

    def _register(self) -> None:
        counters: tuple[Metric[Any, Any], ...] = (*INTERVAL_COUNTERS, *TOTAL_COUNTERS)
        gauges: tuple[Metric[Any, float], ...] = (*INTERVAL_GAUGES, *MANAGER_GAUGES, HEALTH)
        self.counters = {
            metric.name: self._keep(Counter(metric.full_name, metric.text, _names_of(metric)))
            for metric in counters
        }
        self.gauges = {
            metric.name: self._keep(
                Gauge(
                    metric.full_name,
                    metric.text,
                    _names_of(metric),
                    multiprocess_mode=metric.multiprocess_mode,
                )
            )
            for metric in gauges
        }
        self.histograms = {
            metric.name: self._keep(
                Histogram(
                    metric.full_name,
                    metric.text,
                    _names_of(metric),
                    buckets=self.buckets[metric.name],
                )
            )
            for metric in HISTOGRAMS
        }

    def _keep(self, collector: _Collector) -> _Collector:
        self._made.append(collector)
        return collector

    def unregister(self) -> None:
        for collector in self._made:
            try:
                REGISTRY.unregister(collector)
            except KeyError:  # somebody emptied the registry
                continue


def _names_of(metric: Metric[Any, Any]) -> _Labels:
    return (*_ENGINE_LABELS, *metric.labels)


def _all_buckets(config: "LMCacheEngineConfig | None") -> dict[str, tuple[float, ...]]:
    return {metric.name: _buckets_of(metric, config) for metric in HISTOGRAMS}


def _buckets_of(
    metric: Metric[LMCacheStats, list[float]], config: "LMCacheEngineConfig | None"
) -> tuple[float, ...]:
    key = f"histogram_bucket_{metric.name}"
    wanted = None if config is None else config.get_extra_config_value(key)
    if wanted is None:
        return metric.buckets
    is_row = isinstance(wanted, (list, tuple)) and all(
        isinstance(bound, (int, float)) and not isinstance(bound, bool) for bound in wanted
    )
    bounds = _as_floats(wanted) if is_row else []
    finite = bounds[:-1] if bounds[-1:] == [math.inf] else bounds
    if not finite or not all(map(math.isfinite, finite)) or finite != sorted(set(finite)):
        raise ConfigError(
            f"extra_config {key}={wanted!r} must be a list of rising finite numbers; the last one "
            "may be inf"
        )
    return tuple(bounds)


def _as_floats(numbers: "list[float] | tuple[float, ...]") -> list[float]:
    try:
        return [float(number) for number in numbers]
    except OverflowError:  # an int beyond every float
        return []


def _shared_collectors(buckets: Mapping[str, tuple[float, ...]]) -> _Collectors | None:
    """Return the metrics of the process, made by the first who asks; None if a name is taken."""
    with PrometheusLogger._class_lock:
        if PrometheusLogger._collectors is None:
            try:
                PrometheusLogger._collectors = _Collectors(buckets)
            except ValueError as error:  # how the client tells of a name that is taken
                logger.error(
                    "this engine exports no metrics, because something else in this process has "
                    "registered one of their names: %s",
                    error,
                )
        return PrometheusLogger._collectors


class PrometheusLogger:
    """Adds one engine's numbers to the metrics of the process.

    Making a second one, for the same engine or another, shares what is registered. Where somebody
    else has registered one of our names, the logger exports nothing: one line says so, and none of
    ours is left in the registry.

    Args:
        metadata: Gives the labels.
        config: Its `histogram_bucket_<metric>` settings are read by the first logger of a process.

    Raises:
        ConfigError: Buckets that are no list of rising numbers.

    Attributes:
        is_exporting: Whether the metrics could be registered.

    Threads: safe from any thread. `_lock` guards `_totals`; `_class_lock` the shared members.
    """

    _class_lock = threading.Lock()
    _instances: "ClassVar[dict[_Labels, PrometheusLogger]]" = {}
    _collectors: "ClassVar[_Collectors | None]" = (
        None if _EARLIER_LOGGER is None else _EARLIER_LOGGER._collectors
    )

    def __init__(self, metadata: EngineNames, config: "LMCacheEngineConfig | None" = None) -> None:
        self.labels = dict(zip(_ENGINE_LABELS, engine_labels(metadata), strict=True))
        self._label_values = tuple(self.labels.values())
        self._lock = threading.Lock()
        # What was exported of each manager's totals, for as long as the manager lives.
        self._totals: weakref.WeakKeyDictionary[GaugeSource, _Totals] = weakref.WeakKeyDictionary()
        buckets = _all_buckets(config)
        self._shared = _shared_collectors(buckets)
        self.is_exporting = self._shared is not None
        if self._shared is not None and self._shared.buckets != buckets:
            logger.warning(
                "histogram_bucket_* settings differ from those of the first engine of this "
                "process, whose histograms are shared: the first ones hold"
            )

    @staticmethod
    def GetOrCreate(  # noqa: N802
        metadata: EngineNames, config: "LMCacheEngineConfig | None" = None
    ) -> "PrometheusLogger":
        """Return the logger of the engine with these labels.

        Raises:
            ConfigError: As the constructor.
        """
        _all_buckets(config)
        labels = engine_labels(metadata)
        known = PrometheusLogger._instances.get(labels)
        if known is not None:
            return known
        made = PrometheusLogger(metadata, config)
        if not made.is_exporting:  # not kept: for the next engine the name may be free
            return made
        return PrometheusLogger._instances.setdefault(labels, made)

    @staticmethod
    def GetInstance() -> "PrometheusLogger | None":  # noqa: N802
        """Return the oldest logger that `GetOrCreate` made, or None."""
        return next(iter(list(PrometheusLogger._instances.values())), None)

    @staticmethod
    def unregister_all() -> None:
        """Take the metrics out of the registry and forget every logger."""
        with PrometheusLogger._class_lock:
            collectors, PrometheusLogger._collectors = PrometheusLogger._collectors, None
            PrometheusLogger._instances.clear()
        if collectors is not None:
            collectors.unregister()

    def log_prometheus(
        self,
        stats: LMCacheStats,
        gauges: ManagerGauges | None = None,
        is_healthy: bool | None = None,
    ) -> None:
        """Add an interval's numbers: all of them, or none when it raises.

        Args:
            stats: The interval's; each is to be given once.
            gauges: The manager's, as often as liked: totals are exported by what they grew.
            is_healthy: The engine's own word; None leaves the metric as it is.

        Raises:
            OSError: The files of a process among several cannot be written.
        """
        if self._shared is None:
            return
        # Finding a series makes it, and may fail; adding to one that was found does not.
        steps = self._interval_steps(self._shared, stats)
        if gauges is not None:
            steps += self._total_steps(self._shared, gauges)
            steps += self._gauge_steps(self._shared, MANAGER_GAUGES, gauges)
        if is_healthy is not None:
            steps += self._gauge_steps(self._shared, (HEALTH,), is_healthy)
        for step in steps:
            step()

    def remove_gauges(self) -> None:
        """Take the series of this engine's gauges out of the registry; its counters stay.

        The files of a process among several keep a series for good: there they are set to 0.
        """
        if self._shared is None:
            return
        for gauge in self._shared.gauges.values():
            if values.ValueClass is values.MutexValue:
                gauge.remove(*self._label_values)
            else:
                gauge.labels(*self._label_values).set(0)

    def _interval_steps(self, shared: _Collectors, stats: LMCacheStats) -> list[_Step]:
        steps: list[_Step] = []
        for counter in INTERVAL_COUNTERS:
            number = counter.read(stats)
            if number or not counter.is_optional:
                series = shared.counters[counter.name].labels(*self._label_values)
                steps.append(partial(series.inc, number))
        for histogram in HISTOGRAMS:
            child = shared.histograms[histogram.name].labels(*self._label_values)
            steps.extend(partial(child.observe, value) for value in histogram.read(stats))
        return steps + self._gauge_steps(shared, INTERVAL_GAUGES, stats)

    def _gauge_steps(
        self, shared: _Collectors, metrics: tuple[Metric[_Source, float], ...], source: _Source
    ) -> list[_Step]:
        return [
            partial(shared.gauges[metric.name].labels(*self._label_values).set, metric.read(source))
            for metric in metrics
        ]

    def _total_steps(self, shared: _Collectors, gauges: ManagerGauges) -> list[_Step]:
        steps: list[_Step] = []
        for metric in TOTAL_COUNTERS:
            totals: Mapping[_Labels, int] = metric.read(gauges)
            for label_values, total in totals.items():
                child = shared.counters[metric.name].labels(*self._label_values, *label_values)
                key = metric.name, label_values
                steps.append(partial(self._add_growth, gauges.source, key, total, child))
        return steps

    def _add_growth(
        self, source: GaugeSource, key: tuple[str, _Labels], total: int, series: Counter
    ) -> None:
        with self._lock:
            exported = self._totals.setdefault(source, {})
            known = exported.get(key, 0)
            series.inc(max(0, total - known))
            exported[key] = max(known, total)
