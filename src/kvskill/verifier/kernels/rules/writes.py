"""Conditions on cache writes: scatter operators and the fused norm + rope + cache operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvskill.verifier.backend.context import OpContext

__all__ = ["CHECKS"]

Args = dict[str, Any]
Facts = dict[str, Any] | None
Params = dict[str, Any]


def nd_shapes(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_scatter_nd_update: index dtype and rank, and updates.shape == indices.shape[:-1] + input.shape[a:]."""
    target, indices, updates = a["input"], a["indices"], a["updates"]
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() < 2:
        return {"what": f"indices are {indices.dtype} of rank {indices.dim()}, not int32 or int64 of rank 2 or more"}
    depth = indices.shape[-1]
    if depth > target.dim():
        return {"what": f"indices address {depth} axes of a tensor with {target.dim()}"}
    wanted = (*indices.shape[:-1], *target.shape[depth:])
    if tuple(updates.shape) != wanted:
        return {"what": f"updates have shape {tuple(updates.shape)}, not {wanted}"}
    if updates.dtype != target.dtype:
        return {"what": f"updates are {updates.dtype}, the cache is {target.dtype}"}
    return None


def nd_slots(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_scatter_nd_update: every index row in range and not negative, none twice."""
    rows = a["indices"].reshape(-1, a["indices"].shape[-1]).tolist()
    sizes = a["input"].shape
    for n, row in enumerate(rows):
        if any(not 0 <= i < size for i, size in zip(row, sizes, strict=False)):
            return {"what": f"row {n} is {_plain(row)}, the tensor has {tuple(sizes[: len(row)])}"}
    return _repeats([tuple(r) for r in rows], ctx)


def update_shapes(a: Args, params: Params, ctx: OpContext) -> Facts:
    """scatter_update: rank, dtype, axis and shapes."""
    target, indices, updates, axis = a["input"], a["indices"], a["updates"], a["axis"]
    rank = target.dim()
    if updates.dim() != rank or updates.dtype != target.dtype:
        return {"what": f"updates are {updates.dtype} of rank {updates.dim()}, input {target.dtype} of rank {rank}"}
    if not -rank <= axis < rank or axis % rank == 0:
        return {"what": f"axis {axis} of a tensor of rank {rank}; it must not be the batch axis"}
    axis %= rank
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() not in (1, 2):
        return {"what": f"indices are {indices.dtype} of rank {indices.dim()}"}
    if indices.dim() == 2 and indices.shape[1] != 2:
        return {"what": f"2-D indices have {indices.shape[1]} columns, not 2"}
    if updates.shape[0] != indices.shape[0] or updates.shape[0] > target.shape[0]:
        return {"what": f"{updates.shape[0]} updates, {indices.shape[0]} indices, {target.shape[0]} rows"}
    for i in range(1, rank):
        if i != axis and updates.shape[i] != target.shape[i]:
            return {"what": f"axis {i} has {updates.shape[i]} in updates and {target.shape[i]} in input"}
    return None


def update_range(a: Args, params: Params, ctx: OpContext) -> Facts:
    """scatter_update: every start in range."""
    axis = a["axis"] % a["input"].dim()
    room, length = a["input"].shape[axis], a["updates"].shape[axis]
    indices = a["indices"].tolist()
    for n, start in enumerate(indices):
        at = start[1] if isinstance(start, list) else start
        if not 0 <= at <= room - length:
            return {"what": f"row {n} starts at {at}, axis {axis} has {room} places for {length}"}
    return None


def pa_shapes(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_scatter_pa_kv_cache: contiguous, one dtype, cache shape of its mode, slots int32 or int64 [T]."""
    slots = a["slot_mapping"]
    for name in ("key", "value", "key_cache", "value_cache"):
        if not a[name].is_contiguous():
            return {"what": f"{name} is not contiguous"}
    for token, cache in (("key", "key_cache"), ("value", "value_cache")):
        t, c = a[token], a[cache]
        if t.dtype != c.dtype:
            return {"what": f"{token} is {t.dtype}, {cache} is {c.dtype}"}
        width = t.shape[1:].numel()
        nz = a.get("cache_mode", "PA_NZ") == "PA_NZ"
        good = c.dim() == 4 and (c.shape[1] * c.shape[3] == width if nz else tuple(c.shape[2:]) == tuple(t.shape[1:]))
        if not good:
            return {"what": f"{cache} {tuple(c.shape)} does not hold tokens {tuple(t.shape[1:])}, "
                            f"cache_mode {a.get('cache_mode')!r}"}  # fmt: skip
    if slots.dtype not in (torch.int32, torch.int64) or slots.dim() != 1 or len(slots) != len(a["key"]):
        return {"what": f"slot_mapping is {slots.dtype} {tuple(slots.shape)} for {len(a['key'])} tokens"}
    return None


def pa_slots(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_scatter_pa_kv_cache: slots below the cache's end, none twice; negative ones skip their token."""
    cache = a["key_cache"]
    size = cache.shape[2 if a.get("cache_mode", "PA_NZ") == "PA_NZ" else 1]
    return _flat_slots(a["slot_mapping"].tolist(), int(cache.shape[0] * size), ctx)


def rope_shapes(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_kv_rmsnorm_rope_cache: kv [B, 1, S, rms + rope], cos and sin [B, 1, S, rope], gamma, index int64."""
    kv, index = a["kv"], a["index"]
    rope, total = params["rope"], params["with_v" if a.get("v") is not None else "plain"]
    if kv.dim() != 4 or kv.shape[1] != 1 or kv.shape[3] != total:
        return {"what": f"kv is {tuple(kv.shape)}, not [B, 1, S, {total}]"}
    wanted = (kv.shape[0], 1, kv.shape[2], rope)
    for name in ("cos", "sin"):
        if tuple(a[name].shape) != wanted:
            return {"what": f"{name} is {tuple(a[name].shape)}, not {wanted} (same B and S as kv)"}
    gamma = total if a.get("v") is not None else total - rope
    if tuple(a["gamma"].shape) != (gamma,):
        return {"what": f"gamma is {tuple(a['gamma'].shape)}, not [{gamma}]"}
    if index.dtype != torch.int64:
        return {"what": f"index is {index.dtype}, not int64"}
    return None


def rope_caches(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_kv_rmsnorm_rope_cache: k_cache holds the rope part, ckv_cache the latent; index count of the mode."""
    kv, k, ckv, mode = a["kv"], a["k_cache"], a["ckv_cache"], a["cache_mode"]
    rope = params["rope"]
    first, second = (rope, kv.shape[3] - rope) if a.get("v") is None else (kv.shape[3], a["v"].shape[3])
    if k.dim() != 4 or ckv.dim() != 4 or k.shape[3] != first or ckv.shape[3] != second:
        return {"what": f"k_cache {tuple(k.shape)} and ckv_cache {tuple(ckv.shape)} do not end in {first} and {second}"
                        " (rope cache first, latent cache second)"}  # fmt: skip
    if mode == "Norm":
        return None
    if k.shape[2] != 1 or ckv.shape[2] != 1:
        return {"what": f"caches {tuple(k.shape)}, {tuple(ckv.shape)} are not [num_blocks, block_size, 1, D]"}
    batch, length = int(kv.shape[0]), int(kv.shape[2])
    pages = -(-length // int(k.shape[1]))
    need = batch * (pages if "BLK" in mode else length)
    if a["index"].numel() != need:
        return {"what": f"index has {a['index'].numel()} entries, cache_mode {mode} needs {need}"}
    return None


def rope_slots(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_kv_rmsnorm_rope_cache: slots below the cache's end, none twice; negative ones skip their token."""
    if a["cache_mode"] == "Norm":
        return None
    cache = a["k_cache"]
    return _flat_slots(a["index"].flatten().tolist(), int(cache.shape[0] * cache.shape[1]), ctx)


def epsilon_left_out(a: Args, params: Params, ctx: OpContext) -> Facts:
    """epsilon is exactly the operator's own default."""
    return {"value": a["epsilon"]} if a["epsilon"] == params["default"] else None


def prolog_shapes(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_mla_prolog_v3: head count, latent, rope and head dims, index dtype, block size."""
    heads, dim, latent = a["weight_uk"].shape
    rope = a["rope_cos"].shape[-1]
    index, cache = a["cache_index"], a["kv_cache"]
    size = ctx.block_size or int(cache.shape[1])
    found = [
        f"{heads} heads" if heads not in params["heads"] else "",
        f"latent dim {latent}" if latent != params["latent"] else "",
        f"rope dim {rope}" if rope != params["rope"] else "",
        f"head dim {dim}" if dim not in params["dims"] else "",
        f"index of {index.dtype}" if index is not None and index.dtype != torch.int64 else "",
        f"block size {size}" if size % 16 or not 16 <= size <= params["block_most"] else "",
    ]
    return {"what": ", ".join(f for f in found if f)} if any(found) else None


def prolog_slots(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_mla_prolog_v3: slots (block ids for PA_BLK_*) in range, none twice."""
    if a["cache_index"] is None:
        return None
    cache, flat = a["kv_cache"], a["cache_index"].flatten().tolist()
    if "BLK" in a["cache_mode"]:
        bad = [b for b in flat if b >= cache.shape[0]]
        return {"what": f"block {bad[0]} of {cache.shape[0]}"} if bad else None
    return _flat_slots(flat, int(cache.shape[0] * cache.shape[1]), ctx)


def _flat_slots(slots: list[int], end: int, ctx: OpContext) -> Facts:
    for n, slot in enumerate(slots):
        if slot >= end:
            return {"what": f"entry {n} is {slot}, the cache ends at {end}"}
    return _repeats([(s,) for s in slots if s >= 0], ctx)


def _repeats(rows: list[tuple[int, ...]], ctx: OpContext) -> Facts:
    """A row written twice; slots of the null block may be."""
    seen: dict[tuple[int, ...], int] = {}
    for n, row in enumerate(rows):
        if row in seen and not (len(row) == 1 and row[0] < ctx.null_slots):
            return {"what": f"entries {seen[row]} and {n} both write {_plain(list(row))}"}
        seen[row] = n
    return None


def _plain(row: list[int]) -> Any:
    return row[0] if len(row) == 1 else row


CHECKS: dict[str, Callable[..., Facts]] = {
    f.__name__: f
    for f in (
        nd_shapes, nd_slots, update_shapes, update_range, pa_shapes, pa_slots, rope_shapes, rope_caches, rope_slots,
        epsilon_left_out, prolog_shapes, prolog_slots,
    )
}  # fmt: skip
