"""The fused attention call of each phase, per group: layout, sparse mode, mask, window, lengths."""

from __future__ import annotations

from typing import Literal

from kvskill.analyzer.selection.limits import Limits, Route
from kvskill.analyzer.selection.rules import because
from kvskill.manifest import Evidence, FaCall

__all__ = ["fa_calls"]

Version = Literal[1, 2]
_Q, _CU_KV = "actual_seq_lengths_cu_q", "actual_seq_lengths_cu_kv"
_KV = "actual_seq_lengths_kv"


def fa_calls(
    path: Route,
    *,
    version: Version,
    window: int | None,
    window_rule: Literal["hf", "upstream"],
    mtp: bool,
    mla_prefill: Literal["expanded", "absorbed"] = "expanded",
) -> tuple[FaCall | None, FaCall | None, tuple[Evidence, ...]]:
    """(prefill, decode, rules applied). Both are None where no layout takes the group."""
    if path == "mla":
        return _mla(version, mtp, mla_prefill)
    if path == "tnd":
        return _tnd(version, window, window_rule)
    if path == "bnsd-bsh":
        return _bnsd_bsh(version, window, window_rule)
    return None, None, ()


def _tnd(
    version: Version, window: int | None, rule: Literal["hf", "upstream"]
) -> tuple[FaCall, FaCall, tuple[Evidence, ...]]:
    mode = 3 if window is None else 4
    pre = None if window is None else _pre_tokens(window, rule)
    after = None if window is None else 0

    def call(reads: Literal["fresh", "cache"], kv: str) -> FaCall:
        return FaCall(
            version=version,
            layout="TND",
            sparse_mode=mode,
            mask=True,
            pre_tokens=pre,
            next_tokens=after,
            q_lengths=_Q,
            kv_lengths=kv,
            reads=reads,
        )

    rules = [because("S27-layout-tnd"), because("S27-sparse-full" if window is None else "S27-sparse-window")]
    if window is not None:
        rules.append(because("S27-window", f"window {window}, rule {rule}: pre_tokens {pre}"))
    return call("fresh", _CU_KV), call("cache", _KV), (*rules, *_common())


def _bnsd_bsh(
    version: Version, window: int | None, rule: Literal["hf", "upstream"]
) -> tuple[FaCall, FaCall, tuple[Evidence, ...]]:
    """Prefill as on TND but padded per request; decode without a mask, where BSH counts exactly pre_tokens
    keys.
    """
    prefill = FaCall(
        version=version,
        layout="BNSD",
        sparse_mode=3 if window is None else 4,
        mask=True,
        pre_tokens=None if window is None else _pre_tokens(window, rule),
        next_tokens=None if window is None else 0,
        q_lengths="actual_seq_lengths_q",
        kv_lengths="actual_seq_lengths_q",
        reads="fresh",
    )
    decode = FaCall(
        version=version,
        layout="BSH",
        sparse_mode=0,
        mask=False,
        pre_tokens=window,
        next_tokens=None if window is None else 0,
        q_lengths="actual_seq_lengths_q",
        kv_lengths=_KV,
        reads="cache",
    )
    rules = [because("S27-layout-bnsd-bsh")]
    if window is not None:
        rules.append(because("S27-window", f"window {window}: BSH one-token decode shows pre_tokens keys"))
    return prefill, decode, (*rules, *_common())


def _mla(
    version: Version, mtp: bool, prefill_form: Literal["expanded", "absorbed"]
) -> tuple[FaCall, FaCall, tuple[Evidence, ...]]:
    expanded = prefill_form == "expanded"
    prefill = FaCall(
        version=version,
        layout="NTD_TND" if expanded else "TND_NTD",
        sparse_mode=3,
        mask=True,
        q_lengths=_Q,
        kv_lengths=_Q if expanded else _KV,
        reads="fresh" if expanded else "cache",
    )
    decode = FaCall(
        version=version,
        layout="TND_NTD",
        sparse_mode=3 if mtp else 0,
        mask=mtp,
        q_lengths=_Q,
        kv_lengths=_KV,
        reads="cache",
    )
    rules = (because("S27-layout-mla"), because("S27-sparse-mla"), because("S27-mla-heads"), *_common())
    return prefill, decode, rules


def _pre_tokens(window: int, rule: Literal["hf", "upstream"]) -> int:
    return window - 1 if rule == "hf" else window


def _common() -> tuple[Evidence, ...]:
    return (because("S27-lengths"), because("S27-order"), because("S27-cache-view"))


def mla_prefill_form(
    nope: int,
    rope: int,
    value: int,
    limits: Limits,
    wanted: Literal["expanded", "absorbed"] | None,
) -> tuple[Literal["expanded", "absorbed"] | None, str]:
    """How MLA prefill can run: expanded where the dims allow it, else absorbed where long queries are
    allowed.
    """
    ok = limits["mla_expanded"]
    fits = nope in ok["nope"] and rope in ok["rope"] and value in ok["v"]
    long_queries = limits["mla_tnd_max_query"] is None
    if wanted != "absorbed" and fits:
        return "expanded", f"nope {nope}, rope {rope}, v {value} fit NTD_TND"
    if long_queries:
        return "absorbed", f"{limits.profile} takes more than 16 query tokens on the absorbed path"
    if wanted == "absorbed":
        return None, f"{limits.profile} takes at most {limits['mla_tnd_max_query']} query tokens per sequence"
    return (
        None,
        f"nope {nope}, rope {rope}, v {value} do not fit NTD_TND, and {limits.profile} has no other way",
    )
