"""Metrics: what engines count, and its way to Prometheus. The one importer of prometheus_client.

Metrics are registered with the client's default registry, which serving engines expose. Nothing is
sent anywhere, no server is started, and the environment is left alone; where the user has set
PROMETHEUS_MULTIPROC_DIR, the client writes its files there.
"""

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

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

__all__ = ["LMCStatsMonitor", "LMCacheStats", "PrometheusLogger"]

_ENGINE_LABELS = ("model_name", "worker_id", "role", "served_model_name")
_Labels = tuple[str, ...]
_Totals = dict[tuple[str, _Labels], int]
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


def _labels_of(metadata: EngineNames) -> _Labels:
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
        labels = None if metadata is None else _labels_of(metadata)
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
                LMCStatsMonitor._instances.pop(_labels_of(metadata), None)

    @staticmethod
    def unregister_all_metrics() -> None:
        """Take this package's metrics out of the registry; the next logger makes them anew."""
        PrometheusLogger.unregister_all()


class _Collectors:
    """The metrics of this process, shared by all engines; they differ in label values.

    Args:
        buckets: Upper bounds of each histogram; the first engine's hold for all.
    """

    def __init__(self, buckets: Mapping[str, tuple[float, ...]]) -> None:
        self.buckets = buckets
        counters: tuple[Metric[Any, Any], ...] = (*INTERVAL_COUNTERS, *TOTAL_COUNTERS)
        gauges: tuple[Metric[Any, float], ...] = (*INTERVAL_GAUGES, *MANAGER_GAUGES, HEALTH)
        self._made: list[Counter | Gauge | Histogram] = []
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
                    metric.full_name, metric.text, _names_of(metric), buckets=buckets[metric.name]
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
    try:
        buckets = tuple(float(bound) for bound in wanted)
    except (TypeError, ValueError):
        buckets = ()
    if not buckets or list(buckets) != sorted(set(buckets)):
        raise ConfigError(f"extra_config {key}={wanted!r} must be a list of rising numbers")
    return buckets


class PrometheusLogger:
    """Adds one engine's numbers to the metrics of the process.

    Making a second one, for the same engine or another, shares what is registered.

    Args:
        metadata: Gives the labels.
        config: Its `histogram_bucket_<metric>` settings are read by the first logger of a process.

    Raises:
        ConfigError: Buckets that are no list of rising numbers.

    Threads: safe from any thread. `_lock` guards `_totals`; `_class_lock` the shared members.
    """

    _class_lock = threading.Lock()
    _instances: "ClassVar[dict[_Labels, PrometheusLogger]]" = {}
    _collectors: "ClassVar[_Collectors | None]" = None

    def __init__(self, metadata: EngineNames, config: "LMCacheEngineConfig | None" = None) -> None:
        self.labels = dict(zip(_ENGINE_LABELS, _labels_of(metadata), strict=True))
        self._label_values = tuple(self.labels.values())
        self._lock = threading.Lock()
        # What was exported of each manager's totals, for as long as the manager lives.
        self._totals: weakref.WeakKeyDictionary[GaugeSource, _Totals] = weakref.WeakKeyDictionary()
        buckets = _all_buckets(config)
        with PrometheusLogger._class_lock:
            if PrometheusLogger._collectors is None:
                PrometheusLogger._collectors = _Collectors(buckets)
            self._shared = PrometheusLogger._collectors
        if self._shared.buckets != buckets:
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
        labels = _labels_of(metadata)
        made = PrometheusLogger._instances.get(labels)
        if made is None:
            made = PrometheusLogger._instances.setdefault(
                labels, PrometheusLogger(metadata, config)
            )
        return made

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
        """Add an interval's numbers.

        Args:
            stats: The interval's; each is to be given once.
            gauges: The manager's, as often as liked: totals are exported by what they grew.
            is_healthy: The engine's own word; None leaves the metric as it is.
        """
        for counter in INTERVAL_COUNTERS:
            number = counter.read(stats)
            if number or not counter.is_optional:
                self._shared.counters[counter.name].labels(*self._label_values).inc(number)
        for histogram in HISTOGRAMS:
            child = self._shared.histograms[histogram.name].labels(*self._label_values)
            for value in histogram.read(stats):
                child.observe(value)
        self._set_gauges(INTERVAL_GAUGES, stats)
        if gauges is not None:
            self._add_totals(gauges)
            self._set_gauges(MANAGER_GAUGES, gauges)
        if is_healthy is not None:
            self._set_gauges((HEALTH,), is_healthy)

    def _set_gauges(self, metrics: tuple[Metric[_Source, float], ...], source: _Source) -> None:
        for metric in metrics:
            child = self._shared.gauges[metric.name].labels(*self._label_values)
            child.set(metric.read(source))

    def _add_totals(self, gauges: ManagerGauges) -> None:
        with self._lock:
            exported = self._totals.setdefault(gauges.source, {})
            for metric in TOTAL_COUNTERS:
                totals: Mapping[_Labels, int] = metric.read(gauges)
                for values, total in totals.items():
                    known = exported.get((metric.name, values), 0)
                    child = self._shared.counters[metric.name].labels(*self._label_values, *values)
                    child.inc(max(0, total - known))
                    exported[metric.name, values] = max(known, total)
