"""Conditions on norms, rotary, matrix products and MoE operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvskill.verifier.backend.context import OpContext

__all__ = ["CHECKS"]

Args = dict[str, Any]
Facts = dict[str, Any] | None
Params = dict[str, Any]


def norm_gamma(a: Args, params: Params, ctx: OpContext) -> Facts:
    """gamma has the trailing shape of the input, and its dtype or float32; x1 and x2 are alike."""
    x, gamma = a["input"] if "input" in a else a["x1"], a["gamma"]
    if gamma.dim() == 0 or tuple(x.shape[-gamma.dim() :]) != tuple(gamma.shape):
        return {"what": f"gamma is {tuple(gamma.shape)}, the input {tuple(x.shape)}"}
    if gamma.dtype not in (x.dtype, torch.float32):
        return {"what": f"gamma is {gamma.dtype}, the input {x.dtype}"}
    other = a.get("x2")
    if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
        return {"what": f"x1 is {x.dtype} {tuple(x.shape)}, x2 {other.dtype} {tuple(other.shape)}"}
    return None


def rotary_mul(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_rotary_mul: even D below `below`; r1, r2 of the input's rank, each axis equal to it or 1, D equal."""
    x = a["input"]
    d = x.shape[-1]
    if d % 2 or d >= params["below"]:
        return {"what": f"head dim {d} is odd or not below {params['below']}"}
    for name in ("r1", "r2"):
        r = a[name]
        spreads = all(n in (1, m) for n, m in zip(r.shape, x.shape, strict=False))
        if r.dim() != x.dim() or r.shape[-1] != d or not spreads:
            return {"what": f"{name} is {tuple(r.shape)}, the input {tuple(x.shape)}"}
    return None


def rotary_pair(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_apply_rotary_pos_emb: layout, rank, D in `dims`, cos and sin [.., 1, D] with the leading dims of q."""
    q, k, layout = a["query"], a["key"], a["layout"]
    if a.get("rotary_mode", "half") != "half":
        return {"what": f"rotary_mode {a['rotary_mode']!r}"}
    if layout not in params["layouts"]:
        return {"what": f"layout {layout!r}, not one of {params['layouts']}"}
    rank = 3 if layout == "TND" else 4
    tensors = {"query": q, "key": k, "cos": a["cos"], "sin": a["sin"]}
    for name, t in tensors.items():
        if t.dim() != rank:
            return {"what": f"{name} has rank {t.dim()}, layout {layout} wants {rank}"}
        if t.shape[-1] not in params["dims"] or t.shape[-1] != q.shape[-1]:
            return {"what": f"{name} has head dim {t.shape[-1]}, not {q.shape[-1]} out of {params['dims']}"}
        if t.shape[: rank - 2] != q.shape[: rank - 2]:
            return {"what": f"{name} is {tuple(t.shape)}, query {tuple(q.shape)}"}
        if t.dtype != q.dtype:
            return {"what": f"{name} is {t.dtype}, query {q.dtype}"}
    if a["cos"].shape[-2] != 1 or a["sin"].shape[-2] != 1:
        return {"what": f"cos is {tuple(a['cos'].shape)}; its head axis must be 1"}
    return None


def interleave_rope(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_interleave_rope: x [B, N, S, dim], cos and sin [B, 1, S or 1, dim]."""
    x = a["x"]
    if x.dim() != 4 or x.shape[-1] != params["dim"]:
        return {"what": f"x is {tuple(x.shape)}, not [B, N, S, {params['dim']}]"}
    for name in ("cos", "sin"):
        t = a[name]
        if t.dim() != 4 or t.shape[0] != x.shape[0] or t.shape[1] != 1 or t.shape[3] != x.shape[3]:
            return {"what": f"{name} is {tuple(t.shape)} for x {tuple(x.shape)}"}
        if t.shape[2] not in (1, x.shape[2]):
            return {"what": f"{name} has {t.shape[2]} positions, x {x.shape[2]}"}
    return None


def transpose_product(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_transpose_batchmatmul: 3-D operands, K and M multiples of `multiple`, no bias."""
    x, w = a["input"], a["weight"]
    if x.dim() != 3 or w.dim() != 3:
        return {"what": f"operands of rank {x.dim()} and {w.dim()}"}
    if a.get("bias") is not None:
        return {"what": "a bias"}
    right = [w.shape[i] for i in (a.get("perm_x2") or (0, 1, 2))]
    left = [x.shape[i] for i in (a.get("perm_x1") or (0, 1, 2))]
    if left[0] != right[0] or left[2] != right[1]:
        return {"what": f"operands {left} and {right} after the permutation"}
    if right[1] % params["multiple"] or right[2] % params["multiple"]:
        return {"what": f"K = {right[1]}, M = {right[2]}, not multiples of {params['multiple']}"}
    return None


def group_list(a: Args, params: Params, ctx: OpContext) -> Facts:
    """npu_grouped_matmul: a group list of type 0 never falls; counts are not negative; both fit the rows."""
    groups, kind = a.get("group_list"), a.get("group_list_type") or 0
    if groups is None or len(a["x"]) != 1:
        return None
    if isinstance(groups, torch.Tensor) and groups.dtype != torch.int64:
        return {"what": f"group_list is {groups.dtype}, not int64"}
    values = groups.tolist() if isinstance(groups, torch.Tensor) else list(groups)
    rows = int(a["x"][0].shape[0])
    if kind == 0:
        if any(b < c for c, b in zip([0, *values], values, strict=False)) or (values and values[-1] > rows):
            return {"what": f"running sums {values} for {rows} rows (counts need group_list_type=1)"}
    elif kind == 1 and (any(v < 0 for v in values) or sum(values) > rows):
        return {"what": f"counts {values} for {rows} rows (running sums need group_list_type=0)"}
    return None


def expert_ids(a: Args, params: Params, ctx: OpContext) -> Facts:
    """Expert and row indices are int32."""
    for name in ("expert_idx", "expert_ids", "row_idx", "expanded_src_to_dst_row", "sorted_expert_for_source_row"):
        t = a.get(name)
        if t is not None and t.dtype != torch.int32:
            return {"what": f"{name} is {t.dtype}, not int32"}
    return None


CHECKS: dict[str, Callable[..., Facts]] = {
    f.__name__: f
    for f in (
        norm_gamma, rotary_mul, rotary_pair, interleave_rope, transpose_product, group_list, expert_ids,
    )
}  # fmt: skip
