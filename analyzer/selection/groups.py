"""Cache groups of the manifest, from the layers that the config (and the code) describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvskill.analyzer.config.facts import ConfigFacts, KvGroup
from kvskill.analyzer.memory import CacheGeometry
from kvskill.analyzer.memory.formulas import itemsize
from kvskill.analyzer.selection.calls import fa_calls, mla_prefill_form
from kvskill.analyzer.selection.code import CodeView
from kvskill.analyzer.selection.limits import Limits, mla_route, route
from kvskill.analyzer.selection.rules import because
from kvskill.diagnostics import Diagnostic, Severity, Span
from kvskill.manifest import CacheSpec, Group

__all__ = ["GroupChoices", "GroupResult", "build_groups", "geometries"]

Kind = Literal["MHA", "MQA", "GQA", "MLA"]
NUM_HEAD = "max(num_key_value_heads // attn_tp_size, 1)"


@dataclass(frozen=True)
class GroupChoices:
    """Decisions that shape every group."""

    fa_version: Literal[1, 2]
    window_rule: Literal["hf", "upstream"]
    limits: Limits
    mtp: bool
    run_dtype: str | None = None  # of the framework; a standalone runner follows the config
    mla_prefill: Literal["expanded", "absorbed"] | None = None


@dataclass(frozen=True)
class GroupResult:
    """Groups, and the geometry that no layout takes (each with its reason)."""

    groups: tuple[Group, ...]
    rejected: tuple[tuple[Group, str], ...]
    findings: tuple[Diagnostic, ...]


def build_groups(facts: ConfigFacts, code: CodeView | None, choices: GroupChoices) -> GroupResult:
    """One group per cache geometry that owns a cache, in layer order."""
    owning = [g for g in facts.groups if not g.shares_kv and g.attn_type is not None]
    keys = _manager_keys(owning)
    dtype = _dtype(facts, choices.run_dtype)
    groups, rejected, findings = [], [], []
    for raw, key in zip(owning, keys, strict=True):
        group, why, found = _group(raw, key, facts, code, choices, dtype)
        groups.append(group)
        findings.extend(found)
        if why is not None:
            rejected.append((group, why))
    return GroupResult(tuple(groups), tuple(rejected), tuple(findings))


def _group(
    raw: KvGroup,
    key: str | None,
    facts: ConfigFacts,
    code: CodeView | None,
    choices: GroupChoices,
    dtype: str,
) -> tuple[Group, str | None, list[Diagnostic]]:
    kind = _kind(raw)
    q_heads, kv_heads = raw.q_heads or 0, raw.kv_heads or 0
    k_dim, v_dim = raw.k_head_dim or 0, raw.v_head_dim or 0
    window = raw.window if raw.attn_type == "SlidingWindow" else None
    findings: list[Diagnostic] = []
    reasons = [because(_type_rule(kind, window))]
    prefill_form: Literal["expanded", "absorbed"] = "expanded"
    why: str | None = None
    caches: tuple[CacheSpec, ...]
    if kind == "MLA" and facts.mla is not None:
        mla = facts.mla
        path, note = mla_route(mla.kv_lora_rank, mla.qk_rope_head_dim, choices.limits)
        form, form_note = mla_prefill_form(
            mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim, choices.limits, choices.mla_prefill
        )
        reasons.extend((because("S11-mla-shared"), because("S12-absorb", note)))
        if path == "mla" and form is None:
            path, note = "none", form_note
        prefill_form = form or "expanded"
        caches = (
            CacheSpec(name="nope_cache", dim=mla.kv_lora_rank, num_head="1", dtype=dtype),
            CacheSpec(name="rope_cache", dim=mla.qk_rope_head_dim, num_head="1", dtype=dtype),
        )
    else:
        path, note = route(k_dim, v_dim, window=window is not None, limits=choices.limits)
        heads = code.kv_heads.value if code is not None and code.kv_heads is not None else NUM_HEAD
        names = (("k_cache", k_dim), ("v_cache", v_dim)) if v_dim else (("k_cache", k_dim),)
        caches = tuple(CacheSpec(name=n, dim=d, num_head=heads, dtype=dtype) for n, d in names)
        findings.extend(_ratio(q_heads, kv_heads, choices.limits, facts.shown))
    if path == "none":
        why = note
    prefill, decode, rules = fa_calls(
        path,
        version=choices.fa_version,
        window=window,
        window_rule=choices.window_rule,
        mtp=choices.mtp,
        mla_prefill=prefill_form,
    )
    scale = next((x.scale for x in facts.layers if x.index in raw.indices), None)
    understood = code is not None and code.layer_windows is not None  # then the code wins
    sinks = code is not None and code.sinks is not None
    sinks = sinks or (facts.sinks.value != "no" and not understood)
    return (
        Group(
            layers=raw.indices,
            attention=kind,
            attn_type=raw.attn_type or "FullAttention",
            manager_key=key,
            q_heads=q_heads,
            kv_heads=kv_heads,
            k_head_dim=k_dim,
            v_head_dim=v_dim,
            caches=caches,
            sliding_window=window,
            sinks=sinks,
            scale_value=scale if scale is not None else facts.scale.value,
            scale_expr=code.scale.value if code is not None and code.scale is not None else None,
            scale_kind=facts.scale.formula,
            prefill=prefill,
            decode=decode,
            reasons=(*reasons, *rules),
        ),
        why,
        findings,
    )


def geometries(
    groups: Sequence[Group], mtp_layers: int, extra: Sequence[CacheGeometry] = ()
) -> tuple[CacheGeometry, ...]:
    """Cache entries for the memory plan; MTP layers take the geometry of the last group."""
    out = []
    for group in groups:
        key = group.manager_key or group.attn_type
        for cache in group.caches:
            out.append(_geometry(cache, group, key, len(group.layers), mtp=False))
    if groups and mtp_layers:
        full = [g for g in groups if g.attn_type == "FullAttention"] or list(groups)
        last = full[-1]
        out.extend(_geometry(c, last, last.manager_key or last.attn_type, mtp_layers, mtp=True) for c in last.caches)
    return (*out, *extra)


def _geometry(cache: CacheSpec, group: Group, key: str, layers: int, *, mtp: bool) -> CacheGeometry:
    latent = group.attention == "MLA"
    return CacheGeometry(
        name=cache.name,
        group_key=key,
        attn_type=group.attn_type,
        layers=layers,
        kv_heads=1 if latent else group.kv_heads,
        dim=int(cache.dim),
        itemsize=itemsize(cache.dtype),
        window=group.sliding_window,
        split=not latent,
        mtp=mtp,
    )


def _manager_keys(groups: Sequence[KvGroup]) -> list[str | None]:
    """A key per group where one attn_type has two windows, which one manager cannot serve."""
    windows: dict[str, set[int | None]] = {}
    for group in groups:
        windows.setdefault(group.attn_type or "", set()).add(group.window)
    keys: list[str | None] = []
    for group in groups:
        several = group.attn_type == "SlidingWindow" and len(windows["SlidingWindow"]) > 1
        keys.append(f"SlidingWindow_{group.window}" if several else None)
    return keys


def _kind(group: KvGroup) -> Kind:
    if group.kind == "mla":
        return "MLA"
    if group.kv_heads == group.q_heads:
        return "MHA"
    return "MQA" if group.kv_heads == 1 else "GQA"


def _type_rule(kind: Kind, window: int | None) -> str:
    if kind == "MLA":
        return "S11-mla"
    return "S11-standard" if window is None else "S11-sliding"


def _dtype(facts: ConfigFacts, run_dtype: str | None) -> str:
    """The cache dtype as the code writes it; bf16 where nothing names one."""
    if run_dtype is not None:
        return f"torch.{run_dtype}"
    for key in ("torch_dtype", "dtype"):
        found = facts.get(key)
        if found is not None and isinstance(found.value, str) and found.value not in ("auto", ""):
            return f"torch.{found.value.removeprefix('torch.')}"
    return "torch.bfloat16"


def _ratio(q_heads: int, kv_heads: int, limits: Limits, shown: str) -> list[Diagnostic]:
    most = limits["max_group_ratio"]
    if kv_heads and q_heads // kv_heads > most:
        return [
            Diagnostic(
                "KV076",
                Severity.WARNING,
                f"{q_heads} query heads share {kv_heads} KV heads; at most {most} may share one.",
                "Split query heads over ranks (attn_tp_size), or set `overrides: {kv_mode: legacy}`.",
                Span(shown),
            )
        ]
    return []
