"""All managers of one worker."""

from executor.core.kv_cache.coordinator import CacheCoordinator
from executor.utils.common_utils import ceil_div


class KVCacheManager(CacheCoordinator):
    """Allocates in every group or in none, and knows what it manages."""

    def __init__(self, max_model_len, single_type_managers, cache_info):
        super().__init__(max_model_len, single_type_managers)
        self.num_managers = len(self.single_type_managers)
        self.cache_info = cache_info
        self.is_mla_backend = cache_info.is_mla_backend

    def get_block_sizes(self):
        """Tokens per block by group key."""
        return {manager.manager_key: manager.block_size for manager in self.single_type_managers}

    def get_block_table_max_lens(self, max_model_len):
        """Width of the block table by group key."""
        return {key: ceil_div(max_model_len, size) for key, size in self.get_block_sizes().items()}

    def format_usage(self):
        """`key:used/total` of every pool, the null block counted as used."""
        parts = []
        for manager in self.single_type_managers:
            total = manager.block_pool.num_blocks
            parts.append(f"{manager.manager_key}:{total - manager.get_num_free_blocks()}/{total}")
        return ",".join(parts) or "0/0"
