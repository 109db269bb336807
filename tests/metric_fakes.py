"""What tests of metrics need: operations, gauges with defaults, and a way to the samples."""

from builders import make_metadata
from prometheus_client import REGISTRY

from lmcache.observability import LMCStatsMonitor
from lmcache.v1.gauges import CpuTierGauges, ManagerGauges
from lmcache.v1.stats import LookupDone, RetrieveDone, StoreDone

LOOKUP = LookupDone(requested_tokens=64, hit_tokens=32, seconds=0.001)
STORE = StoreDone(64, 48, 16, 0.5, 0.125, 0.25, 0.0625)
RETRIEVE = RetrieveDone(64, 32, 0.25, 0.125, 0.0625)


def forget_everything():
    """Take our metrics out of the registry and forget every monitor of the process."""
    LMCStatsMonitor.unregister_all_metrics()
    LMCStatsMonitor.DestroyInstance()


def value(name, metadata=None, **labels):
    """The exported sample, or None."""
    m = metadata or make_metadata()
    names = {
        "model_name": m.model_name,
        "worker_id": str(m.worker_id),
        "role": str(m.role),
        "served_model_name": m.served_model_name or "",
    }
    return REGISTRY.get_sample_value(f"lmcache:{name}", {**names, **labels})


def gauges_of(source, **changes):
    fields = {
        "source": source,
        "touches": {"refreshed": 0, "present": 0, "gone": 0},
        "touch_errors": 0,
        "stored": {},
        "removed": {},
        "events_lost": 0,
        "events_pending": 0,
        "event_lag_seconds": 0.0,
        "tier_errors": 0,
        "cpu": CpuTierGauges(),
    }
    return ManagerGauges(**{**fields, **changes})
