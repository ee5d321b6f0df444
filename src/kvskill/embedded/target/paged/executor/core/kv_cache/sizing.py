"""Checks, block counts and block tables that every API version shares."""

import torch

from executor.utils.common_utils import ceil_div


def dtype_itemsize(dtype):
    """Bytes of one element."""
    return torch.empty((), dtype=dtype).element_size()


def dims_of(entry):
    """Trailing dims of an entry as a list."""
    return list(entry.dim) if isinstance(entry.dim, (list, tuple)) else [entry.dim]


def check_layers(cache_info, manager_map, block_size_of):
    """Raise ValueError for metadata that cannot be allocated."""
    if cache_info.num_layers != len(cache_info.layer_infos):
        raise ValueError(f"num_layers={cache_info.num_layers}, but {len(cache_info.layer_infos)} layers are listed")
    for layer in cache_info.layer_infos:
        if not layer.caches:
            raise ValueError(f"layer {layer.layer_idx} lists no cache")
        for entry in layer.caches:
            if not entry.needs_block:
                continue
            where = f"cache {entry.cache_name} of layer {layer.layer_idx}"
            size = block_size_of(entry, cache_info)
            if not isinstance(size, int) or size <= 0:
                raise ValueError(f"{where}: block_size must be positive, got {size}")
            if entry.attn_type not in manager_map:
                raise ValueError(f"{where}: attn_type {entry.attn_type!r} is not one of {sorted(manager_map)}")
            if entry.attn_type == "Mamba":
                continue
            if entry.num_head <= 0 or any(dim <= 0 for dim in dims_of(entry)):
                raise ValueError(f"{where}: num_head={entry.num_head}, dim={entry.dim} must be positive")


def sliding_block_num(infer_config, window, block_size):
    """Blocks of a sliding-window pool: fixed by the window, not by the sequence length."""
    per_request = ceil_div(2 * infer_config.model_config.next_n + window, block_size) + 1
    return infer_config.scheduler_config.batch_size_per_dp_rank * per_request + 1


def full_block_num(infer_config, max_len, block_size):
    """Blocks of a full-attention pool in offline mode."""
    return ceil_div(max_len, block_size) * infer_config.scheduler_config.batch_size_per_dp_rank + 1


def check_memory(needed):
    """Raise MemoryError when the device has less than `needed` bytes free."""
    free, _ = torch.npu.mem_get_info()
    if needed > free:
        raise MemoryError(f"the caches need {needed} bytes, {free} are free; lower the batch or the lengths")


def online_block_num(infer_config, token_bytes, fixed_bytes, block_size):
    """Blocks that the configured share of device memory holds after the fixed pools."""
    free, total = torch.npu.mem_get_info()
    budget = total * infer_config.scheduler_config.mem_fraction_static - (total - free) - fixed_bytes
    blocks = int(budget // token_bytes) // block_size if budget > 0 and token_bytes else 0
    if (blocks - 1) * block_size - 1 < infer_config.scheduler_config.max_prefill_tokens:
        raise MemoryError(f"{blocks} blocks do not hold the longest allowed prefill")
    return blocks


def block_table(requests, manager, width, device, rows):
    """int32 [rows, width]; the tail and the rows without a request are the null block."""
    table = torch.full((rows, width), manager.block_pool.get_null_block(), dtype=torch.int32)
    for row, request in enumerate(requests or ()):
        blocks = manager.get_blocks(request.request_id)
        if len(blocks) > width:
            raise ValueError(f"request {request.request_id} has {len(blocks)} blocks, the table is {width} wide")
        if blocks:
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return table.to(device)


def slots_of(position_ids, cu_q, table, block_size):
    """int64 slot of each packed token: table[row, position // block_size] * block_size + position % block_size."""
    starts = [0, *cu_q.tolist()]
    lengths = torch.tensor([end - start for start, end in zip(starts, starts[1:])], device=position_ids.device)
    rows = torch.repeat_interleave(torch.arange(len(starts) - 1, device=position_ids.device), lengths)
    index = position_ids[: starts[-1]] // block_size
    if index.numel() and int(index.max()) >= table.shape[1]:
        raise ValueError(f"position {int(position_ids.max())} is beyond a block table of width {table.shape[1]}")
    return table[rows, index].long() * block_size + position_ids[: starts[-1]] % block_size
