"""Conditions on the sequence lengths of a fused attention call (operator sheet, section 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvskill.verifier.backend.context import OpContext
from kvskill.verifier.kernels.rules.view import FaView

__all__ = ["CHECKS"]

Facts = dict[str, Any] | None
Params = dict[str, Any]


def lengths_present(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Packed layouts need both lengths, paged dense ones the key lengths."""
    if v.packed and v.call.q_lengths is None:
        return {"name": "query", "layout": v.call.layout}
    if (v.packed or v.call.paged) and v.call.kv_lengths is None:
        return {"name": "key", "layout": v.call.layout}
    return None


def lengths_count(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Packed: as many key as query lengths, at most `most`. Dense: one, or at least B."""
    q, kv = v.call.q_lengths, v.call.kv_lengths
    if v.packed:
        if q is not None and kv is not None and (len(q) != len(kv) or len(q) > params["most"] or not q):
            return {"found": f"{len(q)} query and {len(kv)} key lengths", **params}
        return None
    batch = v.batch or 0
    for name, lengths in (("query", q), ("key", kv)):
        if lengths is not None and len(lengths) != 1 and len(lengths) < batch:
            return {"found": f"{len(lengths)} {name} lengths for {batch} sequences", **params}
    return None


def lengths_order(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Cumulative lengths never fall; no length is negative."""
    if v.packed:
        for name, lengths in (("query", v.q_len), ("key", v.kv_len)):
            if lengths is not None and min(lengths, default=0) < 0:
                return {"name": name, "found": v.call.q_lengths if name == "query" else v.call.kv_lengths}
    for name, given in (("query", v.call.q_lengths), ("key", v.call.kv_lengths)):
        if given is not None and min(given, default=0) < 0:
            return {"name": name, "found": given}
    return None


def query_total(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Packed: the last query length is T."""
    if not v.packed or not v.call.q_lengths or v.call.q_lengths[-1] == v.tokens:
        return None
    return {"last": v.call.q_lengths[-1], "tokens": v.tokens}


def key_total(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Packed without pages: the last key length is Tkv."""
    if not v.packed or v.call.paged or not v.call.kv_lengths:
        return None
    total = int(v.call.key.shape[0 if v.form == "TND" else 1])
    return None if v.call.kv_lengths[-1] == total else {"last": v.call.kv_lengths[-1], "tokens": total}


def dense_range(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Dense: lengths are not above S (keys: only when unpaged)."""
    if v.packed:
        return None
    if v.call.q_lengths is not None and v.q_len is not None and max(v.q_len, default=0) > v.tokens:
        return {"name": "query", "found": max(v.q_len), "most": v.tokens}
    if not v.call.paged and v.kv_len is not None and v.call.kv_lengths is not None:
        axis = 2 if v.form == "BNSD" else 1
        most = int(v.call.key.shape[axis])
        if max(v.kv_len, default=0) > most:
            return {"name": "key", "found": max(v.kv_len), "most": most}
    return None


def queries_fit_keys(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Bottom-right modes (`modes`) on packed layouts: no sequence has more queries than keys."""
    if not v.packed or v.call.sparse_mode not in params["modes"] or not v.q_len or not v.kv_len:
        return None
    for b, (q, kv) in enumerate(zip(v.q_len, v.kv_len, strict=False)):
        if q > kv:
            return {"b": b, "q": q, "kv": kv, "mode": v.call.sparse_mode}
    return None


def mla_query_tokens(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """D = 512 packed: at most `most` query tokens a sequence."""
    if v.path != "mla" or not v.packed or not v.q_len or max(v.q_len) <= params["most"]:
        return None
    return {"found": max(v.q_len), **params}


def mla_dense_lengths(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """D = 512 dense, not band mode: no query lengths."""
    return {} if v.path == "mla" and not v.packed and v.call.q_lengths is not None else None


CHECKS: dict[str, Callable[..., Facts]] = {
    f.__name__: f
    for f in (
        lengths_present, lengths_count, lengths_order, query_total, key_total, dense_range, queries_fit_keys,
        mla_query_tokens, mla_dense_lengths,
    )
}  # fmt: skip
