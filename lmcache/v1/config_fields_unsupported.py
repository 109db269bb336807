"""Settings of upstream features that this package lacks, as data.

They exist so that a configuration written for upstream loads. A setting that switches such a
feature on (`feature=`) is refused; one that only tunes it (`part_of=`) has nothing to tune and is
accepted; one whose promise is only about speed or memory (`ignored_because=`) is accepted with a
warning.
"""

from dataclasses import dataclass

from lmcache.v1.config_knob import knob

_BLENDING = "KV blending"
_P2P = "peer-to-peer KV transfer"
_PD = "prefill/decode disaggregation"
_CONTROLLER = "the cache controller"
_NIXL = "NIXL transfer and storage"
_GDS = "GPU direct storage"
_MARU = "the Maru CXL backend"
_API_SERVER = "the internal API server"
_STATISTICS = "chunk statistics"
_HIDDEN_STATES = "the hidden state cache"
_SERVER = "the multi-process server"
_REMOTE_CONFIG = "the remote configuration service"
_LAZY = "the whole pool is taken at start"


@dataclass(eq=False, kw_only=True)
class BlendingSettings:
    """Blending, layerwise mode and asynchronous loading."""

    use_layerwise: bool = knob(False, feature="layerwise mode", inert=(False,))
    enable_async_loading: bool = knob(False, feature="asynchronous loading", inert=(False,))
    enable_blending: bool = knob(False, feature=_BLENDING, inert=(False,))
    blend_recompute_ratios: list[float] | None = knob(None, part_of=_BLENDING)
    blend_thresholds: list[float] | None = knob(None, part_of=_BLENDING)
    blend_check_layers: list[int] | None = knob(None, part_of=_BLENDING)
    blend_min_tokens: int = knob(256, unit="tokens", part_of=_BLENDING)
    blend_special_str: str = knob(" # # ", part_of=_BLENDING)


@dataclass(eq=False, kw_only=True)
class TransferSettings:
    """Peer-to-peer transfer, NIXL, GPU direct storage and Maru."""

    enable_p2p: bool = knob(False, feature=_P2P, inert=(False,))
    p2p_host: str | None = knob(None, part_of=_P2P)
    p2p_init_ports: list[int] | None = knob(None, part_of=_P2P)
    p2p_lookup_ports: list[int] | None = knob(None, part_of=_P2P)
    transfer_channel: str | None = knob(None, part_of=_P2P)
    nixl_backends: list[str] | None = knob(None, part_of=_NIXL)
    nixl_buffer_size: int | None = knob(None, unit="bytes", part_of=_NIXL)
    nixl_buffer_device: str | None = knob(None, part_of=_NIXL)
    gds_path: str | None = knob(None, feature=_GDS, inert=(None,))
    gds_path_sharding: str = knob("by_gpu", part_of=_GDS)
    gds_buffer_size: int | None = knob(None, unit="MiB", part_of=_GDS)
    use_gds: bool = knob(True, part_of=_GDS)
    gds_backend: str = knob("cufile", part_of=_GDS)
    maru_path: str | None = knob(None, feature=_MARU, inert=(None,))
    maru_pool_size: float = knob(4.0, unit="GiB", part_of=_MARU)


@dataclass(eq=False, kw_only=True)
class DisaggregationSettings:
    """Prefill and decode on different instances."""

    enable_pd: bool = knob(False, aliases=("enable_xpyd",), feature=_PD, inert=(False,))
    pd_role: str | None = knob(None, aliases=("nixl_role",), part_of=_PD)
    pd_buffer_size: int | None = knob(None, unit="bytes", part_of=_PD)
    pd_buffer_device: str | None = knob(None, part_of=_PD)
    pd_peer_host: str | None = knob(None, aliases=("nixl_peer_host",), part_of=_PD)
    pd_peer_init_port: list[int] | None = knob(None, aliases=("nixl_peer_init_port",), part_of=_PD)
    pd_peer_alloc_port: list[int] | None = knob(
        None, aliases=("nixl_peer_alloc_port",), part_of=_PD
    )
    pd_peer_query_port: list[int] | None = knob(None, part_of=_PD)
    pd_proxy_host: str | None = knob(None, aliases=("nixl_proxy_host",), part_of=_PD)
    pd_proxy_port: int | None = knob(None, aliases=("nixl_proxy_port",), part_of=_PD)
    pd_allocation_timeout_sec: float = knob(
        float("inf"), unit="seconds", is_unbounded=True, part_of=_PD
    )
    pd_shutdown_timeout_sec: float = knob(5.0, unit="seconds", part_of=_PD)
    pd_condition_poll_interval_sec: float = knob(0.005, unit="seconds", part_of=_PD)
    pd_max_prefill_len: int = knob(0, unit="tokens", part_of=_PD)
    pd_backend_mode: str | None = knob("async", part_of=_PD)
    pd_skip_proxy_notification: bool = knob(False, part_of=_PD)
    pd_bidirectional: bool = knob(False, part_of=_PD)


@dataclass(eq=False, kw_only=True)
class ControlSettings:
    """Controller, servers and services beside the engine."""

    enable_controller: bool = knob(False, feature=_CONTROLLER, inert=(False,))
    controller_pull_url: str | None = knob(None, aliases=("controller_url",), part_of=_CONTROLLER)
    controller_reply_url: str | None = knob(None, part_of=_CONTROLLER)
    lmcache_worker_ports: list[int] | None = knob(
        None, aliases=("lmcache_worker_port",), part_of=_CONTROLLER
    )
    lmcache_worker_ids: list[int] | None = knob(None, part_of=_CONTROLLER)
    lmcache_worker_heartbeat_delay_time: int = knob(10, unit="seconds", part_of=_CONTROLLER)
    lmcache_worker_heartbeat_time: int | None = knob(None, unit="seconds", part_of=_CONTROLLER)
    mp_host: str | None = knob(None, feature=_SERVER, inert=(None,))
    mp_port: int = knob(5555, part_of=_SERVER)
    internal_api_server_enabled: bool = knob(False, feature=_API_SERVER, inert=(False,))
    internal_api_server_host: str = knob("127.0.0.1", part_of=_API_SERVER)
    internal_api_server_port_start: int = knob(6999, part_of=_API_SERVER)
    internal_api_server_include_index_list: list[int] | None = knob(None, part_of=_API_SERVER)
    internal_api_server_socket_path_prefix: str | None = knob(None, part_of=_API_SERVER)
    script_allowed_imports: list[str] | None = knob(None, part_of=_API_SERVER)
    run_script_api_enabled: bool = knob(False, part_of=_API_SERVER)
    runtime_plugin_locations: list[str] | None = knob(
        None,
        aliases=("plugin_locations",),
        feature="runtime plug-in processes",
        inert=(None, []),
    )
    remote_config_url: str | None = knob(None, feature=_REMOTE_CONFIG, inert=(None,))
    app_id: str | None = knob(None, part_of=_REMOTE_CONFIG)


@dataclass(eq=False, kw_only=True)
class OtherUnsupportedSettings:
    """Lookup variants, statistics, hidden states and memory details."""

    enable_scheduler_bypass_lookup: bool = knob(
        False, feature="lookup inside the scheduler process", inert=(False,)
    )
    external_lookup_client: str | None = knob(
        None, feature="an external lookup client", inert=(None,)
    )
    hit_miss_ratio: float | None = knob(None, feature="a capped lookup hit ratio", inert=(None,))
    priority_limit: int | None = knob(None, feature="skipping requests by priority", inert=(None,))
    audit_actual_remote_url: str | None = knob(None, part_of="the audit backend")
    enable_chunk_statistics: bool = knob(False, feature=_STATISTICS, inert=(False,))
    chunk_statistics_auto_start_statistics: bool = knob(False, part_of=_STATISTICS)
    chunk_statistics_auto_exit_timeout_hours: float = knob(0.0, unit="hours", part_of=_STATISTICS)
    chunk_statistics_auto_exit_target_unique_chunks: int = knob(0, part_of=_STATISTICS)
    chunk_statistics_strategy: str = knob("memory_bloom_filter", part_of=_STATISTICS)
    enable_hidden_state_cache: bool = knob(False, feature=_HIDDEN_STATES, inert=(False,))
    max_hidden_state_cpu_size: float = knob(2.0, unit="GiB", part_of=_HIDDEN_STATES)
    hidden_state_layers: list[int] | None = knob(None, part_of=_HIDDEN_STATES)
    hidden_states_retrieve_mode: str = knob("prefix_strict", part_of=_HIDDEN_STATES)
    local_cpu_use_hugepages: bool = knob(False, feature="a pool of huge pages", inert=(False,))
    enable_lazy_memory_allocator: bool = knob(False, inert=(False,), ignored_because=_LAZY)
    lazy_memory_initial_ratio: float = knob(0.2, part_of="lazy allocation")
    lazy_memory_expand_trigger_ratio: float = knob(0.5, part_of="lazy allocation")
    lazy_memory_step_ratio: float = knob(0.1, part_of="lazy allocation")
    lazy_memory_safe_size: float = knob(0.0, unit="GiB", part_of="lazy allocation")
    use_gpu_connector_v3: bool = knob(
        False, inert=(False,), ignored_because="there is one GPU connector, with the same results"
    )
    numa_mode: str | None = knob(
        None,
        choices=("auto", "manual"),
        inert=(None,),
        ignored_because="the pool is pinned without choosing a NUMA node",
    )


@dataclass(eq=False, kw_only=True)
class UnsupportedSettings(
    BlendingSettings,
    TransferSettings,
    DisaggregationSettings,
    ControlSettings,
    OtherUnsupportedSettings,
):
    """All settings of features this package lacks."""
