"""All managers of one worker."""

from executor.core.kv_cache.coordinator import CacheCoordinator


class KVCacheManager(CacheCoordinator):
    """Allocates in every attention type or in none."""
