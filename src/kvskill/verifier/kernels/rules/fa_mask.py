"""Conditions on sparse mode, mask and band of a fused attention call (operator sheet, sections 3, 4, 7)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from kvskill.verifier.backend.context import OpContext
from kvskill.verifier.kernels.fa.call import INT_MAX
from kvskill.verifier.kernels.rules.view import FaView

__all__ = ["CHECKS"]

Facts = dict[str, Any] | None
Params = dict[str, Any]
_SIDE = 2048


def mode_allowed(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """sparse_mode is in `by_path[key]`; the key is the path, `mla-one` for D = 512 dense with one token."""
    key = v.path
    if key == "mla":
        key = "mla-packed" if v.packed else ("mla-one" if v.tokens == 1 else "mla-many")
    allowed = params["by_path"][key]
    return None if v.call.sparse_mode in allowed else {"mode": v.call.sparse_mode, "path": key, "allowed": allowed}


def mask_needed(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Modes 1 to 4 need a mask, except on the one-token path without rope, where modes do not count."""
    ignored = v.one_token and not v.rope
    if v.call.sparse_mode in params["modes"] and v.call.mask is None and not ignored:
        return {"mode": v.call.sparse_mode}
    return None


def mask_unwanted(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Mode 0 on packed layouts and on D = 512 takes no mask."""
    if v.call.sparse_mode == 0 and v.call.mask is not None and (v.packed or v.path.startswith("mla")):
        return {"layout": v.call.layout}
    return None


def mask_dtype(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """bool, int8 or uint8 (`dtypes`)."""
    m = v.call.mask
    if m is None or str(m.dtype).removeprefix("torch.") in params["dtypes"]:
        return None
    return {"found": str(m.dtype), **params}


def triangle_shape(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Modes 2 to 4: [2048, 2048] with leading ones; D = 512 and one-token paths take two axes only."""
    m = v.call.mask
    if m is None or v.call.sparse_mode not in (2, 3, 4):
        return None
    shape = tuple(m.shape)
    plain = v.path.startswith("mla") or v.path == "ifa"
    good = shape == (_SIDE, _SIDE) or (not plain and shape in ((1, _SIDE, _SIDE), (1, 1, _SIDE, _SIDE)))
    return None if good else {"shape": shape, "mode": v.call.sparse_mode}


_seen: list[tuple[Any, int]] = []  # masks found right: (weak reference, version)


def triangle_contents(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Modes 2 to 4: ones strictly above the diagonal, zeros elsewhere."""
    m = v.call.mask
    if m is None or v.call.sparse_mode not in (2, 3, 4) or m.shape[-2:] != (_SIDE, _SIDE):
        return None
    version = None if m.is_inference() else m._version
    if version is not None and any(ref() is m and seen == version for ref, seen in _seen):
        return None
    square = m.reshape(_SIDE, _SIDE) != 0
    wanted = torch.ones(_SIDE, _SIDE, dtype=torch.bool).triu(1)
    if bool((square == wanted).all()):
        if version is not None:
            alive = [(ref, s) for ref, s in _seen if ref() is not None]
            _seen[:] = [*alive[-8:], (weakref.ref(m), version)]
        return None
    if bool((square == ~wanted).all()):
        what = "its complement (True where a key is visible)"
    elif bool((square == wanted.T).all()):
        what = "the lower triangle (the past is masked)"
    elif not bool(square.any()):
        what = "nothing masked"
    else:
        i, j = (square != wanted).nonzero()[0].tolist()
        what = f"a wrong value at [{i}, {j}]"
    return {"what": what}


def full_shape(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Modes 0 and 1: the mask covers every query and key of its sequence."""
    m = v.call.mask
    if m is None or v.call.sparse_mode not in (0, 1) or v.packed or not v.q_len or not v.kv_len:
        return None
    shape, batch = tuple(m.shape), v.batch or 1
    keys = max(v.kv_len)
    if v.one_token and not v.rope:
        if v.call.block_table is not None:
            keys = max(keys, int(v.call.block_table.shape[1]) * v.call.block_size)
        flat = m.dim() in (2, 3, 4) and all(n == 1 for n in shape[1:-1])
        good = flat and shape[0] in (1, batch) and shape[-1] >= keys
        return None if good else {"shape": shape, "need": f"[{batch}, >= {keys}]"}
    queries = v.tokens
    lead_ok = m.dim() == 2 or (shape[0] in (1, batch) and m.dim() in (3, 4) and all(n == 1 for n in shape[1:-2]))
    good = m.dim() >= 2 and lead_ok and shape[-2] >= queries and shape[-1] >= keys
    return None if good else {"shape": shape, "need": f"[1 or {batch}, >= {queries}, >= {keys}]"}


def one_token_mask(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Dense layout, one query token, no rope: a compressed mask (modes 2 to 4) masks all keys but the first."""
    if v.one_token and not v.rope and v.call.sparse_mode in (2, 3, 4) and v.call.mask is not None:
        return {"mode": v.call.sparse_mode, "layout": v.call.layout}
    return None


def one_token_window(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """BSH, paged 3-D, one query token: pre_tokens is a hard window in every mode."""
    call = v.call
    if call.layout != "BSH" or not v.one_token or not call.paged or call.key.dim() != 3 or v.rope:
        return None
    return {"pre": call.pre_tokens} if 0 < call.pre_tokens < INT_MAX else None


def window_ignored(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """pre_tokens is given where nothing reads it: modes 1 to 3, mode 0 without a mask, other one-token calls."""
    call = v.call
    if not 0 <= call.pre_tokens < min(INT_MAX, params["at_least"]):
        return None
    if call.layout == "BSH" and v.one_token and call.paged and call.key.dim() == 3 and not v.rope:
        return None
    ignored = v.one_token and not v.rope
    if not ignored and (call.sparse_mode == 4 or (call.sparse_mode == 0 and call.mask is not None)):
        return None
    if not v.kv_len or max(v.kv_len) <= call.pre_tokens:
        return None  # nothing to cut off yet
    return {"pre": call.pre_tokens, "mode": call.sparse_mode, "layout": call.layout}


def band(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Mode 4 limits of the path (section 3)."""
    call = v.call
    if call.sparse_mode != 4 or (v.one_token and not v.rope):
        return None
    pre, nxt = call.pre_tokens, call.next_tokens
    facts = {"pre": pre, "next": nxt}
    if v.path == "mla-sliding":
        ok = 1 <= pre <= params["mla_most"] and nxt == 0
        return None if ok else {**facts, "why": f"D = 512 wants 1 <= pre_tokens <= {params['mla_most']}, next_tokens 0"}
    if pre + nxt < 0 or (pre < 0 and nxt < 0):
        return {**facts, "why": "the band is empty"}
    for q, kv in zip(v.q_len or [], v.kv_len or [], strict=False):
        if q and kv and (pre + q < 0 or nxt + kv < 0):
            return {**facts, "why": f"the band misses a sequence of {q} queries and {kv} keys"}
    return None


def band_value_dim(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Packed mode 4: value dim in `dims`."""
    dv = v.kv_dim(v.call.value)
    if v.path == "tnd" and v.call.sparse_mode == 4 and dv not in params["dims"]:
        return {"dv": dv, **params}
    return None


def mask_outside_band(v: FaView, params: Params, ctx: OpContext) -> Facts:
    """Mode 0 with a mask: pre/next_tokens skip whole tiles, so they must not exclude what the mask allows."""
    call = v.call
    if call.sparse_mode != 0 or call.mask is None or v.one_token or v.packed:
        return None
    if call.pre_tokens == INT_MAX and call.next_tokens == INT_MAX:
        return None
    queries, keys = v.tokens, max(v.kv_len or [0])
    seen = call.mask.reshape(-1, *call.mask.shape[-2:])[:, :queries, :keys] == 0
    i = torch.arange(seen.shape[1])[:, None]
    j = torch.arange(seen.shape[2])[None]
    outside = (j < i - call.pre_tokens) | (j > i + call.next_tokens)
    found = (seen & outside).nonzero()
    if not len(found):
        return None
    return {"i": int(found[0][1]), "j": int(found[0][2]), "pre": call.pre_tokens, "next": call.next_tokens}


CHECKS: dict[str, Callable[..., Facts]] = {
    f.__name__: f
    for f in (
        mode_allowed, mask_needed, mask_unwanted, mask_dtype, triangle_shape, triangle_contents, full_shape,
        one_token_mask, one_token_window, window_ignored, band, band_value_dim, mask_outside_band,
    )
}  # fmt: skip
