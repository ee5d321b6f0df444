"""Block counts, allocation, block tables and slots, keyed by group key."""

import torch

from executor.core.kv_cache.cache_info import CacheAllocator, MambaCacheEntry, block_size_of
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

FIXED_BLOCK_ATTN_TYPES = {"SlidingWindow", "Mamba"}
SUPPORTED_CACHE_LAYOUTS = {"BnBsND", "BnNBsD"}


def validate_cache_info(cache_info):
    """Raise ValueError for metadata that cannot be allocated."""
    check_layers(cache_info, ATTN_TYPE_MANAGER_MAP, block_size_of)
    for entry in _entries(cache_info):
        if entry.cache_layout not in SUPPORTED_CACHE_LAYOUTS:
            raise ValueError(f"cache {entry.cache_name}: cache_layout {entry.cache_layout!r} is not supported")
        if entry.attn_type == "Mamba" and not isinstance(entry, MambaCacheEntry):
            raise ValueError(f"cache {entry.cache_name}: attn_type 'Mamba' needs a MambaCacheEntry")
        if CacheAllocator(entry.allocator) is not CacheAllocator.HBM:
            raise ValueError(f"cache {entry.cache_name}: this example framework allocates in HBM only")


def _entries(cache_info):
    return [entry for layer in cache_info.layer_infos for entry in layer.caches if entry.needs_block]


def _block_bytes(entry):
    if entry.attn_type == "Mamba":
        return entry.cache_dim_numel() * dtype_itemsize(entry.dtype)
    return entry.storage_block_size * entry.num_head * entry.cache_dim_numel() * dtype_itemsize(entry.dtype)


def calculate_block_num(infer_config, cache_info, offline_max_len=None, tp_group=None):
    """Blocks of each group's pool, the null block included."""
    counts, fixed_bytes, growing = {}, 0, {}
    for entry in _entries(cache_info):
        key = entry.group_key
        if entry.attn_type in FIXED_BLOCK_ATTN_TYPES:
            if entry.attn_type == "Mamba":
                blocks = infer_config.scheduler_config.batch_size_per_dp_rank * (1 + entry.next_n) + 1
            else:
                blocks = sliding_block_num(infer_config, entry.sliding_window, entry.block_size)
            if counts.setdefault(key, blocks) != blocks:
                raise ValueError(f"entries of group {key} need {counts[key]} and {blocks} blocks")
            fixed_bytes += blocks * _block_bytes(entry)
        else:
            growing.setdefault(key, []).append(entry)
    for key, entries in growing.items():
        if len({entry.block_size for entry in entries}) != 1:
            raise ValueError(f"entries of group {key} differ in block_size")
    needed = fixed_bytes
    for key, entries in growing.items():
        size = entries[0].block_size
        if offline_max_len:
            counts[key] = full_block_num(infer_config, offline_max_len, size)
            needed += counts[key] * sum(map(_block_bytes, entries))
        else:
            per_token = sum(_block_bytes(entry) // entry.block_size for group in growing.values() for entry in group)
            counts[key] = _min_over_ranks(online_block_num(infer_config, per_token, fixed_bytes, size), tp_group)
    if offline_max_len:
        check_memory(needed)
    return counts


def _min_over_ranks(blocks, group):
    if group is None:
        return blocks
    value = torch.tensor([blocks], dtype=torch.int64, device=torch.device("npu", torch.npu.current_device()))
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN, group=group)
    return int(value.item())


def _shape(entry, blocks):
    if entry.attn_type == "Mamba":
        return (blocks, *entry.shape)
    if entry.cache_layout == "BnNBsD":
        return (blocks, entry.num_head, entry.storage_block_size, *dims_of(entry))
    return (blocks, entry.storage_block_size, entry.num_head, *dims_of(entry))


def allocate_cache_tensors(device, cache_info, block_num_by_type):
    """Allocate one tensor per entry, [blocks, block_size, num_head, *dim] by default, and hand it to the entry's setter.

    The tensor is a slice of a larger buffer, as on the device, where it starts at an aligned address: contiguous,
    but not the whole storage.
    """
    for layer in cache_info.layer_infos:
        for entry in layer.caches:
            if not entry.needs_block:
                continue
            if entry.tensor_setter is None:
                raise ValueError(f"cache {entry.cache_name} of layer {layer.layer_idx} has no tensor_setter")
            if entry.group_key not in block_num_by_type:
                raise KeyError(f"no block count for {entry.group_key}")
            shape = _shape(entry, block_num_by_type[entry.group_key])
            numel = torch.Size(shape).numel()
            buffer = torch.empty(numel + 64, dtype=entry.dtype, device=device)
            entry.tensor = buffer.narrow(0, 32, numel).view(shape)
            entry.tensor_setter(entry.tensor)


def prepare_block_tables(requests, kv_cache_manager, max_block_nums, device, batch_size=0, is_prefill=False):
    """int32 [batch_size, max_block_nums[key]] per group; all null blocks without requests.

    The table of a recurrent state is 1 wide in prefill and 1 + next_n in decode.
    """
    tables = {}
    for manager in kv_cache_manager.single_type_managers:
        width = max_block_nums[manager.manager_key]
        if manager.attn_type == "Mamba":
            width = 1 if is_prefill else 1 + manager.next_n
        tables[manager.manager_key] = block_table(requests, manager, width, device, batch_size)
    return tables


def prepare_slot_mapping(position_ids, actual_seq_lengths_cu_q, kv_cache_manager, block_tables):
    """int64 slot of every packed token per group. Recurrent states and compressed caches have none."""
    return {
        manager.manager_key: slots_of(
            position_ids, actual_seq_lengths_cu_q, block_tables[manager.manager_key], manager.block_size
        )
        for manager in kv_cache_manager.single_type_managers
        if manager.attn_type != "Mamba" and getattr(manager, "compress_ratio", 1) == 1
    }
