"""Paged KV cache: what models declare, who owns which block, and the tensors."""

from executor.core.kv_cache.block_pool import BlockPool
from executor.core.kv_cache.cache_info import CacheEntry, LayerCacheInfo, ModelCacheInfo
from executor.core.kv_cache.cache_utils import (
    allocate_cache_tensors,
    calculate_block_num,
    dtype_itemsize,
    prepare_block_tables,
    prepare_slot_mapping,
    validate_cache_info,
)
from executor.core.kv_cache.kv_cache_manager import KVCacheManager
from executor.core.kv_cache.single_type_kv_cache_manager import (
    ATTN_TYPE_MANAGER_MAP,
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
    create_single_type_managers,
)

__all__ = [
    "ATTN_TYPE_MANAGER_MAP",
    "BlockPool",
    "CacheEntry",
    "FullAttentionManager",
    "KVCacheManager",
    "LayerCacheInfo",
    "ModelCacheInfo",
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "allocate_cache_tensors",
    "calculate_block_num",
    "create_single_type_managers",
    "dtype_itemsize",
    "prepare_block_tables",
    "prepare_slot_mapping",
    "validate_cache_info",
]
