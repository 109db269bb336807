"""Every setting as data: name, type, default, unit, environment variable, older names, rules.

Names, types, defaults and aliases are those of upstream 0.5.6, but for two decisions of this
package: `pre_caching_hash_algorithm` defaults to `sha256` (it names the algorithm really used),
and the time-outs may be fractions of a second.
"""

from dataclasses import dataclass
from typing import Any

from lmcache.v1.config_fields_unsupported import UnsupportedSettings
from lmcache.v1.config_knob import FieldSpec, describe_fields, knob

CACHE_POLICY_NAMES = ("LRU", "LFU", "FIFO", "MRU")
HASH_ALGORITHM_NAMES = ("sha256", "builtin", "sha256_cbor", "sha256_cbor_64bit")

UNSUPPORTED_SERDES = ("kivi", "cachegen")
UNSUPPORTED_REMOTE_SCHEMES = (
    "lm",
    "resp",
    "audit",
    "azure",
    "eic",
    "hf3fs",
    "infinistore",
    "mooncakestore",
    "s3",
    "sagemaker-hyperpod",
)
# `extra_config` keys that switch on a feature this package lacks, with that feature.
UNSUPPORTED_EXTRA_KEYS = {
    "enable_nixl_storage": "NIXL storage",
    "audit_backend_enabled": "the audit backend",
    "shm_name": "a pool in shared memory",
    "save_only_first_rank": "MLA first-rank mode",
    "first_rank_max_local_cpu_size": "MLA first-rank mode",
    "remote_enable_mla_worker_id_as0": "MLA first-rank mode",
}


@dataclass(eq=False, kw_only=True)
class SupportedSettings:
    """The settings that do something here."""

    chunk_size: int = knob(256, unit="tokens", minimum=1)
    local_cpu: bool = knob(True)
    max_local_cpu_size: float = knob(5.0, unit="GiB", minimum=0)
    reserve_local_cpu_size: float = knob(0.0, unit="GiB", minimum=0)
    local_disk: str | None = knob(None, is_directory_list=True)
    local_disk_path_sharding: str = knob("by_gpu", choices=("by_gpu",))
    max_local_disk_size: float = knob(0.0, unit="GiB", minimum=0)
    remote_url: str | None = knob(None)
    remote_storage_plugins: list[str] | None = knob(None)
    remote_serde: str | None = knob("naive", choices=("naive", *UNSUPPORTED_SERDES))
    storage_plugins: list[str] | None = knob(None, aliases=("external_backends",))
    save_decode_cache: bool = knob(False)
    save_unfull_chunk: bool = knob(False)
    pre_caching_hash_algorithm: str = knob("sha256", choices=HASH_ALGORITHM_NAMES)
    retrieve_locations: list[str] | None = knob(None)
    store_location: str | None = knob(None)
    cache_policy: str = knob("LRU", choices=CACHE_POLICY_NAMES, ignores_case=True)
    blocking_timeout_secs: int | float = knob(10, unit="seconds", minimum=0)
    lookup_timeout_ms: int = knob(3000, unit="milliseconds", is_above_zero=True)
    min_retrieve_tokens: int = knob(0, unit="tokens", minimum=0)
    lookup_server_worker_ids: list[int] | None = knob(None, minimum=0)
    lmcache_instance_id: str | None = knob(None)
    enable_kv_events: bool = knob(False)
    pin_timeout_sec: int | float = knob(300, unit="seconds", is_above_zero=True)
    pin_check_interval_sec: int | float = knob(30, unit="seconds", is_above_zero=True)
    py_enable_gc: bool = knob(True)
    extra_config: dict[str, Any] | None = knob(None)


@dataclass(eq=False, kw_only=True)
class Settings(SupportedSettings, UnsupportedSettings):
    """All 108 settings of 0.5.6, without behaviour."""


FIELDS: dict[str, FieldSpec] = describe_fields(Settings)
ALIASES: dict[str, str] = {
    alias: spec.name for spec in FIELDS.values() for alias in spec.rules.aliases
}
