"""Writes into caches: scatter_update_, npu_scatter_nd_update_, npu_scatter_pa_kv_cache (sections 11 and 12.2).

Where an operator's behaviour on bad indices is undefined on the device, the reference raises.
"""

from __future__ import annotations

import torch

from kvskill.verifier.kernels.errors import UnmodelledCall
from kvskill.verifier.kernels.registry import kernel

__all__ = ["write_slots"]


@kernel("npu_scatter_nd_update_")
def scatter_nd_update_(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """input[indices[r]] = updates[r] for every index row r; `indices` [..., a] addresses the first a axes."""
    depth = indices.shape[-1]
    rows = indices.reshape(-1, depth).tolist()
    tail = input.shape[depth:]
    values = updates.reshape(len(rows), *tail)
    for row, value in zip(rows, values, strict=True):
        if any(not 0 <= i < n for i, n in zip(row, input.shape, strict=False)):
            raise IndexError(f"npu_scatter_nd_update_: index {row} is outside {tuple(input.shape[:depth])}")
        input[tuple(row)] = value
    return input


@kernel("npu_scatter_nd_update")
def scatter_nd_update(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor
) -> torch.Tensor:
    """The same on a copy."""
    return scatter_nd_update_(input.clone(), indices, updates)


@kernel("scatter_update_")
def scatter_update_(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int
) -> torch.Tensor:
    """Row i of `input` gets updates[i] from indices[i] on along `axis`; 2-D indices are (row, offset) pairs."""
    axis %= input.dim()
    length = updates.shape[axis]
    pairs = list(enumerate(indices.tolist())) if indices.dim() == 1 else indices.tolist()
    for i, (row, start) in enumerate(pairs):
        if not 0 <= start <= input.shape[axis] - length:
            raise IndexError(
                f"scatter_update_: rows {start}..{start + length - 1} are outside axis {axis} "
                f"of {tuple(input.shape)}"
            )
        input[row].narrow(axis - 1, start, length).copy_(updates[i])
    return input


@kernel("scatter_update")
def scatter_update(
    input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor, axis: int
) -> torch.Tensor:
    """The same on a copy."""
    return scatter_update_(input.clone(), indices, updates, axis)


def write_slots(cache: torch.Tensor, tokens: torch.Tensor, slots: list[int], *, nz: bool, op: str) -> None:
    """Put token t [N, D] into slot slots[t] of a paged cache; a negative slot skips its token.

    Plain: cache [num_blocks, block_size, N, D]. NZ: cache [num_blocks, N*D/x, block_size, x], chunk k of the
    flattened token at [block, k, row].
    """
    size = cache.shape[2] if nz else cache.shape[1]
    for token, slot in zip(tokens, slots, strict=True):
        if slot < 0:
            continue
        block, row = divmod(slot, size)
        if block >= cache.shape[0]:
            raise IndexError(f"{op}: slot {slot} is outside {cache.shape[0]} blocks of {size}")
        if nz:
            cache[block, :, row] = token.reshape(cache.shape[1], cache.shape[3])
        else:
            cache[block, row] = token.reshape(cache.shape[2:])


@kernel("npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """key, value [T, N, D] into paged caches, "PA_NZ" (default) or "Norm" (also None)."""
    nz = cache_mode == "PA_NZ"
    for cache, tokens in ((key_cache, key), (value_cache, value)):
        write_slots(cache, tokens, slot_mapping.tolist(), nz=nz, op="npu_scatter_pa_kv_cache")


@kernel("npu_scatter_pa_kv_cache_functional")
def scatter_pa_kv_cache_functional(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_mode: str | None = "PA_NZ",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on copies of the caches."""
    new_key, new_value = key_cache.clone(), value_cache.clone()
    scatter_pa_kv_cache(key, value, new_key, new_value, slot_mapping, cache_mode)
    return new_key, new_value


@kernel("npu_gather_pa_kv_cache")
def gather_pa_kv_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Caches [num_blocks, block_size, N, D] gathered into key, value [T, N, D], sequence after sequence."""
    size = key_cache.shape[1]
    for cache, out in ((key_cache, key), (value_cache, value)):
        if tuple(cache.shape[2:]) != tuple(out.shape[1:]):
            raise UnmodelledCall("npu_gather_pa_kv_cache", f"a cache of shape {tuple(cache.shape)}")
        row = 0
        for b, length in enumerate(seq_lens.tolist()):
            for p in range(length):
                out[row] = cache[int(block_tables[b, p // size]), p % size]
                row += 1


@kernel("npu_gather_pa_kv_cache_functional")
def gather_pa_kv_cache_functional(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into copies."""
    new_key, new_value = key.clone(), value.clone()
    gather_pa_kv_cache(key_cache, value_cache, block_tables, seq_lens, new_key, new_value)
    return new_key, new_value
