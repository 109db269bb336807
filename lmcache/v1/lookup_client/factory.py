"""Lookup client and server for a configuration."""

from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.lookup_client.abstract_client import LookupClientInterface
from lmcache.v1.lookup_client.lmcache_lookup_client import LMCacheLookupClient
from lmcache.v1.lookup_client.lookup_server import LMCacheLookupServer, LookupEngine
from lmcache.v1.metadata import LMCacheMetadata


class LookupClientFactory:
    """Makes both ends of the lookup service."""

    @staticmethod
    def create_lookup_client(
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        lmcache_engine: LookupEngine | None = None,
    ) -> LookupClientInterface:
        """Return a client for the scheduler's process.

        Args:
            config, metadata: As the workers' (chunk size, hash algorithm, engine id, world size).
            lmcache_engine: Accepted for callers of 0.5.6; the workers' engines are asked.

        Raises:
            ConfigError: See `LMCacheLookupClient`.
        """
        return LMCacheLookupClient(config, metadata)

    @staticmethod
    def create_lookup_server(
        lmcache_engine: LookupEngine, metadata: LMCacheMetadata
    ) -> LMCacheLookupServer | None:
        """Return the server of this worker, or None where `lookup_server_worker_ids` leaves it out.

        Raises:
            ConfigError: See `LMCacheLookupServer`.
        """
        ranks = lmcache_engine.config.get_lookup_server_worker_ids(
            metadata.use_mla, metadata.world_size
        )
        if metadata.worker_id not in ranks:
            return None
        return LMCacheLookupServer(lmcache_engine, metadata)
