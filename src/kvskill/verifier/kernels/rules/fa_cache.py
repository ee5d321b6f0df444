"""Conditions on block table and paged cache of a fused attention call (operator sheet, section 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvskill.verifier.backend.context import OpContext
from kvskill.verifier.kernels.rules.view import FaView

__all__ = ["CHECKS"]

Facts = dict[str, Any] | None
Params = dict[str, Any]


def table_form(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """int32, two axes, one row a sequence."""
    t = v.call.block_table
    if t is None:
        return None
    bad = t.dtype != torch.int32 or t.dim() != 2 or (v.batch is not None and t.shape[0] != v.batch)
    return {"found": f"{t.dtype} {tuple(t.shape)}", "batch": v.batch} if bad else None


def block_size_given(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """block_size is positive and equals the cache's own, which is where the layouts put it."""
    if not v.call.paged:
        return None
    shape = tuple(v.call.key.shape)
    if v.call.block_size <= 0 or v.page_rows != v.call.block_size:
        hint = ""
        if v.call.key.dim() == 4 and shape[1] == v.call.block_size:
            hint = "; this looks token-major: view it to [num_blocks, block_size, heads * dim]"
        return {"size": v.call.block_size, "shape": shape, "shown": v.page_rows, "hint": hint}
    return None


def cache_rank(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Rank 3, or 4 / 5 where `rank4` / `rank5` list the path's query form."""
    if not v.call.paged:
        return None
    rank = v.call.key.dim()
    allowed = {3, *(r for r in (4, 5) if v.form in params[f"rank{r}"].get(v.path, []))}
    return None if rank in allowed else {"rank": rank, "path": v.path, "form": v.form, "allowed": sorted(allowed)}


def caches_alike(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Key and value caches have the same rank and, but for the dim, the same shape."""
    k, x = v.call.key, v.call.value
    if not v.call.paged:
        return None
    same = k.dim() == x.dim() and k.shape[:2] == x.shape[:2] and (k.dim() < 4 or k.shape[-2] == x.shape[-2])
    return None if same else {"key": tuple(k.shape), "value": tuple(x.shape)}


def cache_width(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """A 3-D cache is at most `most` wide."""
    if not v.call.paged or v.call.key.dim() != 3 or v.call.key.shape[-1] <= params["most"]:
        return None
    return {"width": int(v.call.key.shape[-1]), **params}


def block_size_limit(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """The deployed block size fits `by_path`: `values`, or `multiple` and `most`."""
    if not v.call.paged:
        return None
    key = "mla-nz" if v.path == "mla" and v.nz else v.path
    limit = params["by_path"][key]
    size = ctx.block_size or v.call.block_size
    if "values" in limit:
        bad, text = size not in limit["values"], f"one of {limit['values']}"
    else:
        bad = size % limit["multiple"] != 0 or size > limit["most"]
        text = f"a multiple of {limit['multiple']} up to {limit['most']}"
    return {"size": size, "path": key, "limit": text} if bad else None


def table_width(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Every sequence has a table entry for each block that its key length needs."""
    t = v.call.block_table
    if t is None or t.dim() != 2 or not v.kv_len or v.call.block_size <= 0:
        return None
    width = int(t.shape[1])
    for b, kv in enumerate(v.kv_len):
        need = -(-kv // v.call.block_size)
        if need > width:
            return {"b": b, "kv": kv, "need": need, "width": width}
    return None


def table_ids(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Every needed entry is a block of the cache; entries left of a window count too."""
    t = v.call.block_table
    if t is None or t.dim() != 2 or not v.kv_len or v.call.block_size <= 0:
        return None
    blocks = int(v.call.key.shape[0])
    for b, (row, kv) in enumerate(zip(t.tolist(), v.kv_len, strict=False)):
        for entry, block in enumerate(row[: -(-kv // v.call.block_size)]):
            if not 0 <= block < blocks:
                return {"b": b, "entry": entry, "block": block, "blocks": blocks}
    return None


def blocks_suffice(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """num_blocks is not below the sum of the blocks that all key lengths need (`paths`)."""
    if not v.call.paged or v.path not in params["paths"] or not v.kv_len or v.call.block_size <= 0:
        return None
    need = sum(-(-kv // v.call.block_size) for kv in v.kv_len)
    blocks = int(v.call.key.shape[0])
    return {"need": need, "blocks": blocks} if need > blocks else None


def mla_paged(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """D = 512 needs pages, except in band mode."""
    return {} if v.path == "mla" and not v.call.paged else None


CHECKS: dict[str, Callable[..., Facts]] = {
    f.__name__: f
    for f in (
        table_form, block_size_given, cache_rank, caches_alike, cache_width, block_size_limit, table_width, table_ids,
        blocks_suffice, mla_paged,
    )
}  # fmt: skip
