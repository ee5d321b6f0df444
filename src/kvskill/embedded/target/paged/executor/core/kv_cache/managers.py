"""Who owns which block, for one group of cache entries.

A request's list is logical: entry i serves tokens i*block_size .. (i+1)*block_size-1. Where a sliding window has
moved past a block, the entry becomes the null block and the block goes back to the pool.
"""

from executor.core.kv_cache.block_pool import BlockPool
from executor.utils.common_utils import ceil_div


class SingleTypeKVCacheManager:
    """Blocks of one group. Subclasses say which computed tokens no later query can see."""

    def __init__(self, attn_type, block_num, block_size, manager_key=None, max_model_len=None, **_):
        self.attn_type = attn_type
        self.manager_key = manager_key or attn_type
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.block_pool = BlockPool(block_num, block_size)
        self._null_block = self.block_pool.get_null_block()
        self.req_to_blocks = {}

    def get_num_skipped_tokens(self, num_computed_tokens):
        """How many tokens at the start no later query can see."""
        raise NotImplementedError

    @staticmethod
    def validate_and_build_kwargs(group_entries):
        """Check the entries of a group and return the extra constructor arguments."""
        raise NotImplementedError

    def get_num_free_blocks(self):
        return self.block_pool.get_num_free_blocks()

    def get_blocks(self, request_id):
        return self.req_to_blocks.get(request_id, [])

    def get_num_blocks_to_allocate(self, request_id, num_tokens):
        """Blocks that are missing for `num_tokens` tokens of a request."""
        if num_tokens < 0:
            raise ValueError(f"cannot hold {num_tokens} tokens")
        return max(0, ceil_div(num_tokens, self.block_size) - len(self.get_blocks(request_id)))

    def pre_allocate_blocks(self, request_id, num_tokens, reserved_tokens=0):
        """(missing blocks, whether the pool has them beside what running requests reserved)."""
        missing = self.get_num_blocks_to_allocate(request_id, num_tokens)
        kept_back = ceil_div(reserved_tokens, self.block_size) * len(self.req_to_blocks)
        return missing, missing <= self.get_num_free_blocks() - kept_back

    def allocate_new_blocks(self, request_id, block_num_to_allocate, num_tokens=None):
        fresh = self.block_pool.get_new_blocks(block_num_to_allocate)
        self.req_to_blocks.setdefault(request_id, []).extend(fresh)

    def remove_skipped_blocks(self, request_id, total_computed_tokens):
        """Give back blocks whose every token is skipped."""
        blocks = self.get_blocks(request_id)
        whole = min(max(0, self.get_num_skipped_tokens(total_computed_tokens)) // self.block_size, len(blocks))
        gone = [block for block in blocks[:whole] if block != self._null_block]
        blocks[:whole] = [self._null_block] * whole
        self.block_pool.free_blocks(gone)

    def free(self, request_id):
        """Give back everything a request owns."""
        self.block_pool.free_blocks(self.req_to_blocks.pop(request_id, []))


class FullAttentionManager(SingleTypeKVCacheManager):
    """Every token stays visible."""

    def get_num_skipped_tokens(self, num_computed_tokens):
        return 0

    @staticmethod
    def validate_and_build_kwargs(group_entries):
        ratios = {getattr(entry, "compress_ratio", 1) for entry in group_entries}
        if len(ratios) != 1:
            raise ValueError(f"one group has one compress_ratio, got {sorted(ratios)}")
        return {"compress_ratio": ratios.pop()}


class SlidingWindowManager(SingleTypeKVCacheManager):
    """A query sees `sliding_window` keys, itself included."""

    # How many tokens before the last one a prompt keeps: W-1 here, W in the newest API.
    prefill_extra_token = 0

    def __init__(self, attn_type, block_num, block_size, sliding_window, **kwargs):
        super().__init__(attn_type, block_num, block_size, **kwargs)
        self.sliding_window = sliding_window

    def _first_kept_block(self, num_tokens):
        first_token = max(0, num_tokens - self.sliding_window - self.prefill_extra_token)
        return first_token // self.block_size

    def get_num_blocks_to_allocate(self, request_id, num_tokens):
        if self.get_blocks(request_id):
            return super().get_num_blocks_to_allocate(request_id, num_tokens)
        return ceil_div(num_tokens, self.block_size) - self._first_kept_block(num_tokens)  # a prompt: its tail

    def pre_allocate_blocks(self, request_id, num_tokens, reserved_tokens=0):
        return super().pre_allocate_blocks(request_id, num_tokens)  # the pool's size is fixed by the window

    def allocate_new_blocks(self, request_id, block_num_to_allocate, num_tokens=None):
        if request_id not in self.req_to_blocks:
            self.req_to_blocks[request_id] = [self._null_block] * self._first_kept_block(num_tokens)
        super().allocate_new_blocks(request_id, block_num_to_allocate, num_tokens)

    def get_num_skipped_tokens(self, num_computed_tokens):
        return max(0, num_computed_tokens - self.sliding_window + 1)

    @staticmethod
    def validate_and_build_kwargs(group_entries):
        windows = {entry.sliding_window for entry in group_entries}
        if None in windows or len(windows) != 1:
            raise ValueError(f"a SlidingWindow group needs one sliding_window, got {windows}")
        return {"sliding_window": windows.pop()}


def build_managers(cache_info, block_num_by_key, max_model_len, manager_map, group_key, block_size_of):
    """One manager per group, in order of first appearance.

    `group_key(entry)` and `block_size_of(entry, cache_info)` hide where an API keeps those two.
    """
    groups = {}
    for layer in cache_info.layer_infos:
        for entry in layer.caches:
            if entry.needs_block:
                groups.setdefault(group_key(entry), []).append(entry)
    managers = []
    for key, entries in groups.items():
        if key not in block_num_by_key:
            raise ValueError(f"no block count for cache group {key}")
        types = {entry.attn_type for entry in entries}
        sizes = {block_size_of(entry, cache_info) for entry in entries}
        if len(types) != 1 or len(sizes) != 1:
            raise ValueError(f"cache group {key} mixes attn_type {sorted(types)} or block_size {sorted(sizes)}")
        manager_cls = manager_map[types.pop()]
        managers.append(
            manager_cls(
                attn_type=entries[0].attn_type,
                block_num=block_num_by_key[key],
                block_size=sizes.pop(),
                manager_key=key,
                max_model_len=max_model_len,
                **manager_cls.validate_and_build_kwargs(entries),
            )
        )
    return managers
