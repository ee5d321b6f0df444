"""Block counts, allocation, block tables and slots, keyed by attention type."""

import torch

from executor.core.kv_cache.cache_info import block_size_of
from executor.core.kv_cache.single_type_kv_cache_manager import ATTN_TYPE_MANAGER_MAP
from executor.core.kv_cache.sizing import (
    block_table,
    check_layers,
    check_memory,
    dims_of,
    dtype_itemsize,
    full_block_num,
    online_block_num,
    sliding_block_num,
    slots_of,
)

FIXED_BLOCK_ATTN_TYPES = {"SlidingWindow"}


def validate_cache_info(cache_info):
    """Raise ValueError for metadata that cannot be allocated."""
    check_layers(cache_info, ATTN_TYPE_MANAGER_MAP, block_size_of)


def _entries(cache_info):
    return [entry for layer in cache_info.layer_infos for entry in layer.caches if entry.needs_block]


def _block_bytes(entry, cache_info):
    numel = entry.num_head * cache_info.block_size
    for dim in dims_of(entry):
        numel *= dim
    return numel * dtype_itemsize(entry.dtype)


def calculate_block_num(infer_config, cache_info, offline_max_len=None, tp_group=None):
    """Blocks of each attention type's pool, the null block included."""
    size, counts, fixed_bytes = cache_info.block_size, {}, 0
    entries = _entries(cache_info)
    for entry in entries:
        if entry.attn_type in FIXED_BLOCK_ATTN_TYPES:
            counts[entry.attn_type] = sliding_block_num(infer_config, entry.sliding_window, size)
            fixed_bytes += counts[entry.attn_type] * _block_bytes(entry, cache_info)
    growing = [entry for entry in entries if entry.attn_type not in FIXED_BLOCK_ATTN_TYPES]
    if not growing:
        return counts
    per_block = sum(_block_bytes(entry, cache_info) for entry in growing)
    if offline_max_len:
        blocks = full_block_num(infer_config, offline_max_len, size)
        check_memory(blocks * per_block + fixed_bytes)
    else:
        blocks = online_block_num(infer_config, per_block // size, fixed_bytes, size)
        blocks = _min_over_ranks(blocks, tp_group)
    counts.update({entry.attn_type: blocks for entry in growing})
    return counts


def _min_over_ranks(blocks, group):
    if group is None:
        return blocks
    value = torch.tensor([blocks], dtype=torch.int64, device=torch.device("npu", torch.npu.current_device()))
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(value.item())


def allocate_cache_tensors(device, cache_info, block_num_by_type):
    """Allocate [blocks, block_size, num_head, dim] per entry and hand it to the entry's setter."""
    for layer in cache_info.layer_infos:
        for entry in layer.caches:
            if not entry.needs_block:
                continue
            if entry.tensor_setter is None:
                raise ValueError(f"cache {entry.cache_name} of layer {layer.layer_idx} has no tensor_setter")
            if entry.attn_type not in block_num_by_type:
                raise KeyError(f"no block count for {entry.attn_type}")
            shape = (block_num_by_type[entry.attn_type], cache_info.block_size, entry.num_head, entry.dim)
            entry.tensor_setter(torch.empty(shape, dtype=entry.dtype, device=device))


def prepare_block_tables(requests, kv_cache_manager, max_block_num, device, batch_size=0):
    """int32 [batch_size, max_block_num] per attention type; all null blocks without requests."""
    return {
        manager.attn_type: block_table(requests, manager, max_block_num, device, batch_size)
        for manager in kv_cache_manager.single_type_managers
    }


def prepare_slot_mapping(position_ids, actual_seq_lengths_cu_q, block_tables, block_size):
    """int64 slot of every packed token per attention type."""
    return {
        key: slots_of(position_ids, actual_seq_lengths_cu_q, table, block_size)
        for key, table in block_tables.items()
    }
