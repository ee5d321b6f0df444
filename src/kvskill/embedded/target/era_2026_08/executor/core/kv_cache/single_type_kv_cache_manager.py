"""Which manager serves which attention type."""

from executor.core.kv_cache import managers
from executor.core.kv_cache.cache_info import block_size_of, group_key
from executor.core.kv_cache.managers import FullAttentionManager, SingleTypeKVCacheManager, build_managers

__all__ = [
    "ATTN_TYPE_MANAGER_MAP",
    "FullAttentionManager",
    "MambaManager",
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "create_single_type_managers",
]


class SlidingWindowManager(managers.SlidingWindowManager):
    """A prompt keeps one token more than the window; decode still frees by the window itself."""

    prefill_extra_token = 1


class MambaManager(SingleTypeKVCacheManager):
    """One block per recurrent state: 1 for a prompt, 1 + next_n while decoding."""

    def __init__(self, attn_type, block_num, block_size, next_n=0, **kwargs):
        super().__init__(attn_type, block_num, block_size, **kwargs)
        self.next_n = next_n

    def get_num_blocks_to_allocate(self, request_id, num_tokens):
        owned = len(self.get_blocks(request_id))
        return max(0, (1 + self.next_n if owned else 1) - owned)

    def pre_allocate_blocks(self, request_id, num_tokens, reserved_tokens=0):
        return super().pre_allocate_blocks(request_id, num_tokens)

    def get_num_skipped_tokens(self, num_computed_tokens):
        return 0

    @staticmethod
    def validate_and_build_kwargs(group_entries):
        depths = {entry.next_n for entry in group_entries}
        if len(depths) != 1:
            raise ValueError(f"one group has one next_n, got {sorted(depths)}")
        return {"next_n": depths.pop()}


ATTN_TYPE_MANAGER_MAP = {
    "FullAttention": FullAttentionManager,
    "SlidingWindow": SlidingWindowManager,
    "Mamba": MambaManager,
}


def create_single_type_managers(cache_info, block_num_by_type, max_model_len):
    """One manager per group key of the model."""
    return build_managers(
        cache_info, block_num_by_type, max_model_len, ATTN_TYPE_MANAGER_MAP, group_key, block_size_of
    )
