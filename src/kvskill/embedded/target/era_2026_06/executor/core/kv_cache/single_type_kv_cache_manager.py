"""Which manager serves which attention type."""

from executor.core.kv_cache.cache_info import block_size_of, group_key
from executor.core.kv_cache.managers import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
    build_managers,
)

__all__ = [
    "ATTN_TYPE_MANAGER_MAP",
    "FullAttentionManager",
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "create_single_type_managers",
]

ATTN_TYPE_MANAGER_MAP = {"FullAttention": FullAttentionManager, "SlidingWindow": SlidingWindowManager}


def create_single_type_managers(cache_info, block_num_by_type, max_model_len):
    """One manager per group key of the model."""
    return build_managers(
        cache_info, block_num_by_type, max_model_len, ATTN_TYPE_MANAGER_MAP, group_key, block_size_of
    )
