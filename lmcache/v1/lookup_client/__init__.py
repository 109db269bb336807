"""The lookup service: a client in the scheduler's process, a server in each worker's."""

from lmcache.v1.lookup_client.factory import LookupClientFactory

__all__ = ["LookupClientFactory"]
