"""Conditions on layout, heads, dims, dtypes and contiguity of a fused attention call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvskill.verifier.backend.context import OpContext
from kvskill.verifier.kernels.rules.view import FaView, deployed_dtype

__all__ = ["CHECKS"]

Facts = dict[str, Any] | None
Params = dict[str, Any]


def layout_known(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """`layouts`: the layout strings that exist."""
    return None if v.call.layout in params["layouts"] else {"layout": v.call.layout}


def heads_match(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """The head count equals the head axis of the query, and divides H in BSH."""
    heads, shown = v.call.heads, v.query_heads
    name = "num_heads" if v.call.version == 1 else "num_query_heads"
    if heads < 1 or (shown is not None and shown != heads):
        return {"name": name, "heads": heads, "shown": shown}
    if shown is None and v.call.query.shape[-1] % heads:
        return {"name": name, "heads": heads, "shown": f"H = {v.call.query.shape[-1]}"}
    return None


def heads_divide(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Nq % Nkv == 0, Nq / Nkv <= `ratio` (`ratio_mla` with D = 512 rope parts), Nq <= `most`."""
    q, kv = v.call.heads, v.call.kv_heads
    ratio = params["ratio_mla"] if v.path.startswith("mla") else params["ratio"]
    bad = kv < 1 or q % kv or q // kv > ratio or q > params["most"]
    return {"q": q, "kv": kv, "ratio": ratio, "most": params["most"]} if bad else None


def kv_heads_match(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """num_key_value_heads equals the head axis of the key; in BSH and 3-D caches its width is Nkv * D."""
    heads, width = v.kv_width(v.call.key)
    kv = v.call.kv_heads
    if heads is not None and heads != kv:
        return {"kv": kv, "shown": f"{heads} heads"}
    if width is not None and width != kv * v.d:
        return {"kv": kv, "shown": f"a width of {width}, not {kv} x {v.d}"}
    return None


def key_dim(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Key head dim equals query head dim; value head dim equals it too unless the path allows another."""
    k, dv = v.kv_dim(v.call.key), v.kv_dim(v.call.value)
    free = v.packed or (v.path == "ifa" and v.call.layout == "BSH" and v.call.paged)
    bad = k != v.d or (dv != v.d and not free)
    return {"q": v.d, "k": k, "v": dv, "layout": v.call.layout} if bad else None


def general_dim(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """D <= `most` and a multiple of `multiple`."""
    for name, d in (("query", v.d), ("value", v.kv_dim(v.call.value))):
        if d > params["most"] or d % params["multiple"]:
            return {"name": name, "d": d, **params}
    return None


def packed_dims(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """`dims`: the (q, k, v) head dims that a packed layout takes without rope parts or D = 512."""
    if v.path != "tnd" or v.rope:
        return None
    found = [v.d, v.kv_dim(v.call.key), v.kv_dim(v.call.value)]
    return None if found in params["dims"] else {"found": tuple(found), "layout": v.call.layout, **params}


def wide_value(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """A value dim of `dim` needs MHA, no NTD_TND, no paging."""
    if v.path != "tnd" or v.rope or v.kv_dim(v.call.value) != params["dim"]:
        return None
    why = [
        "grouped heads" if v.call.heads != v.call.kv_heads else "",
        "layout NTD_TND" if v.call.layout == "NTD_TND" else "",
        "paging" if v.call.paged else "",
    ]
    return {"why": ", ".join(w for w in why if w), **params} if any(why) else None


def rope_pair(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """query_rope and key_rope: both or neither."""
    q, k = v.call.query_rope is not None, v.call.key_rope is not None
    return None if q == k else {"given": "query_rope" if q else "key_rope"}


def rope_alike(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Rope parts have the dtype, rank and leading dims of their tensor, and head dim `dim`."""
    for name, rope, whole, heads in (
        ("query_rope", v.call.query_rope, v.call.query, v.call.heads),
        ("key_rope", v.call.key_rope, v.call.key, v.call.kv_heads),
    ):
        if rope is None:
            continue
        d = v.dim(rope, heads) if name == "query_rope" else v.kv_dim(rope)
        lead = 2 if rope.dim() == 5 or v.form == "BSH" or (name == "key_rope" and rope.dim() == 3) else -1
        if rope.dtype != whole.dtype or rope.dim() != whole.dim() or rope.shape[:lead] != whole.shape[:lead]:
            return {"name": name, "found": f"{rope.dtype} {tuple(rope.shape)}", "whole": tuple(whole.shape), **params}
        if d != params["dim"]:
            return {"name": name, "found": f"a head dim of {d}", "whole": tuple(whole.shape), **params}
    return None


def rope_dims(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """With rope parts D is one of `dims`; with the ones in `layouts` the layout must be in its list."""
    if not v.rope:
        return None
    allowed = "; ".join(f"{d}: {', '.join(names)}" for d, names in params["layouts"].items())
    layouts = params["layouts"].get(v.d)
    if layouts is None or v.call.layout not in layouts:
        return {"d": v.d, "layout": f"layout {v.call.layout}", "allowed": allowed}
    dv = v.kv_dim(v.call.value)
    return {"d": v.d, "layout": f"value dim {dv}", "allowed": allowed} if dv != v.d else None


def mla_heads(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """D = 512: one key head, query heads in `heads` (`sliding_heads` in band mode)."""
    if not v.path.startswith("mla"):
        return None
    allowed = params["sliding_heads" if v.path == "mla-sliding" else "heads"]
    bad = v.call.kv_heads != 1 or v.call.heads not in allowed
    return {"q": v.call.heads, "kv": v.call.kv_heads, "allowed": allowed} if bad else None


def mla_lse(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """D = 512: no LSE output."""
    return {} if v.path.startswith("mla") and v.call.lse else None


def inner_precise(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """inner_precise is one of `by_path[path]` (default: 0 to 3)."""
    allowed = params["by_path"].get(v.path, [0, 1, 2, 3])
    return None if v.call.inner_precise in allowed else {"value": v.call.inner_precise, "allowed": allowed}


def dtypes(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Deployment dtype of the query is one of `by_path[path]`; key and value have the query's dtype."""
    found = deployed_dtype(v.call.query, ctx)
    allowed = params["by_path"].get(v.path, params["by_path"]["default"])
    if found not in allowed:
        return {"found": found, "allowed": allowed, "path": v.path}
    for tensor in (v.call.key, v.call.value):
        if tensor.is_floating_point() and tensor.dtype != v.call.query.dtype:
            return {"found": f"{v.call.query.dtype} query with {tensor.dtype} key or value", "allowed": allowed,
                    "path": v.path}  # fmt: skip
    return None


def contiguous(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """query, key, value and rope parts are contiguous."""
    for name in ("query", "key", "value", "query_rope", "key_rope"):
        tensor = getattr(v.call, name)
        if tensor is not None and not tensor.is_contiguous():
            return {"name": name, "rank": tensor.dim(), "stride": tuple(tensor.stride())}
    return None


def scale_left_out(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """The softmax scale is exactly its default, 1.0."""
    return {"name": "scale" if v.call.version == 1 else "softmax_scale"} if v.call.scale == 1.0 else None


def sink(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """learnable_sink: [Nq] of `dtypes`, layouts `layouts`, q and v dims in `dims`, no pse."""
    s = v.call.sink
    if s is None:
        return None
    found = [
        f"shape {tuple(s.shape)} for {v.call.heads} heads" if tuple(s.shape) != (v.call.heads,) else "",
        f"dtype {deployed_dtype(s, ctx)}" if deployed_dtype(s, ctx) not in params["dtypes"] else "",
        f"layout {v.call.layout}" if v.call.layout not in params["layouts"] else "",
        f"query dim {v.d}" if v.d not in params["dims"] else "",
        f"value dim {v.kv_dim(v.call.value)}" if v.kv_dim(v.call.value) not in params["value_dims"] else "",
        "pse_shift" if v.call.pse_shift is not None else "",
    ]
    return {"found": ", ".join(f for f in found if f)} if any(found) else None


CHECKS: dict[str, Callable[..., Facts]] = {
    f.__name__: f
    for f in (
        layout_known, heads_match, heads_divide, kv_heads_match, key_dim, general_dim, packed_dims, wide_value,
        rope_pair, rope_alike, rope_dims, mla_heads, mla_lse, inner_precise, dtypes, contiguous, scale_left_out, sink,
    )
}  # fmt: skip
