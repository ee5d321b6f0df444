"""ConfigFacts as one JSON object with the field names of the config corpus, and as a summary for people."""

from __future__ import annotations

from typing import Any

from kvskill.analyzer.config.facts import ConfigFacts, Evidence, KvGroup

__all__ = ["run_length", "summary", "to_json"]

_GROUP_NAME = {
    "full": "FullAttention",
    "mla": "FullAttention",
    "sliding": "SlidingWindow",
    "chunked": "Chunked (not in the framework)",
    "blocksparse": "BlockSparse (not in the framework)",
}


def run_length(pattern: str) -> str:
    """A compact form of the layer pattern: runs as F32, repeated parts as (S5F)x4."""
    size = len(pattern)
    for unit in range(2, min(size // 2, 24) + 1):
        times = size // unit
        part = pattern[:unit]
        if len(set(part)) > 1 and times > 1 and pattern[: unit * times] == part * times:
            rest = pattern[unit * times :]
            if part.startswith(rest) or len(set(rest)) <= 1 or not rest:
                return f"({_runs(part)})x{times}" + (f" {_runs(rest)}" if rest else "")
    return _runs(pattern)


def _runs(pattern: str) -> str:
    out: list[str] = []
    start = 0
    for index in range(1, len(pattern) + 1):
        if index == len(pattern) or pattern[index] != pattern[start]:
            count = index - start
            out.append(pattern[start] + (str(count) if count > 1 else ""))
            start = index
    return "".join(out)


def to_json(facts: ConfigFacts) -> dict[str, Any]:
    """The result under the labels' names, then `evidence` and `findings`."""
    pattern = facts.layer_pattern
    out: dict[str, Any] = {
        "model_type": facts.model_type,
        "architecture": facts.architecture,
        "nested_under": facts.text_path or None,
        "text_model_type": facts.text_model_type,
        "layers_key": _last(facts.layers_declared.evidence),
        "layers_declared": facts.layers_declared.value,
        "layers_effective": len(facts.layers),
        "layer_pattern": pattern,
        "layer_runs": run_length(pattern),
        "kv_layers_total": facts.kv_layers_total,
        "attention_kind": facts.attention_kind,
        "attn_types": _attn_types(pattern),
        "attn_type_rule": facts.layer_rule.how or None,
        "sliding_window": facts.sliding_window.value,
        "sliding_window_raw": facts.sliding_window_raw.value,
        "chunk_or_local_span": next((x.span for x in facts.layers if x.span), None),
        "num_attention_heads": facts.q_heads.value,
        "num_key_value_heads": facts.kv_heads.value,
        "kv_heads_source": _source(facts.kv_heads.evidence),
        "head_dim": facts.head_dim.value,
        "head_dim_source": _source(facts.head_dim.evidence),
        "naive_head_dim": facts.naive_head_dim,
        "kv_groups": [_group(g) for g in facts.groups],
        "mla": _mla(facts),
        "kv_elems_per_token": _elems(facts),
        "extra_caches": [
            {k: v for k in ("name", "head_dim", "layers", "note") if (v := getattr(e, k))} for e in facts.extra_caches
        ]
        or None,
        "rope": _rope(facts),
        "softmax_scale": {"formula": facts.scale.formula, "value": facts.scale.value},
        "sinks": facts.sinks.value,
        "softcap": {"attention": facts.softcap_attention.value, "final": facts.softcap_final.value},
        "alibi": facts.alibi.value,
        "kv_sharing": facts.kv_sharing.value,
        "k_eq_v": facts.k_eq_v.value,
        "mtp_layers": {"count": facts.mtp.count, "key": facts.mtp.key},
        "moe": {"is_moe": facts.moe.is_moe},
        "encoder_decoder": facts.encoder_decoder,
        "multimodal": facts.multimodal,
        "quantization": None,
        "kv_cache_quant": facts.quant.kv_cache_quant,
        "class_defaults_needed": list(facts.class_defaults_needed),
        "paging_verdict": {
            "verdict": facts.verdict.verdict,
            "scope": facts.verdict.scope,
            "acceptable": list(facts.verdict.acceptable),
            "reason": facts.verdict.reason,
            "grounds": list(facts.verdict.grounds),
        },
        "operator_watchpoints": list(facts.watchpoints),
    }
    if facts.mtp.other_keys:
        out["mtp_layers"]["other_keys"] = facts.mtp.other_keys
    if facts.moe.is_moe:
        out["moe"].update(experts=facts.moe.experts, key=facts.moe.key)
    if facts.quant.method:
        out["quantization"] = {"method": facts.quant.method, "kv_cache_scheme": facts.quant.kv_cache_scheme}
    if facts.acceptable_windows:
        out["acceptable_windows"] = list(facts.acceptable_windows)
    out["evidence"] = _evidence(facts)
    out["findings"] = [f.to_json() for f in facts.findings]
    return out


def _last(evidence: Evidence) -> str | None:
    return evidence.keys[0].rpartition(".")[2] if evidence.keys else None


def _source(evidence: Evidence) -> str:
    if evidence.source == "absent":
        return "none"
    text = str(evidence)
    return text if evidence.source == "key" else f"{evidence.source}: {text}" if text else evidence.source


def _attn_types(pattern: str) -> dict[str, int]:
    letters = pattern.upper()
    return {
        "FullAttention": letters.count("F") + letters.count("M"),
        "SlidingWindow": letters.count("S"),
        "chunked": letters.count("C"),
        "blocksparse": letters.count("B"),
        "state": letters.count("L"),
        "cross": letters.count("X"),
        "no_cache": letters.count("-"),
    }


def _group(group: KvGroup) -> dict[str, Any]:
    out: dict[str, Any] = {
        "layers": group.layers,
        "attn_type": _GROUP_NAME[group.kind],
        "q_heads": group.q_heads,
        "kv_heads": group.kv_heads,
    }
    if group.cache_width is not None:
        out["cache_width"] = group.cache_width
    else:
        out.update(k_head_dim=group.k_head_dim, v_head_dim=group.v_head_dim)
    if group.window or group.span:
        out["window"] = group.window or group.span
    if group.shares_kv:
        out["reuses_kv_of_earlier_layer"] = True
    return out


def _mla(facts: ConfigFacts) -> dict[str, Any] | None:
    mla = facts.mla
    if mla is None:
        return None
    return {
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "q_lora_rank": mla.q_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "cache_elems_per_token_per_layer": mla.cache_width,
    }


def _elems(facts: ConfigFacts) -> dict[str, int]:
    """Cached K+V elements per token over the owned slots; chunked and block-sparse slots count as full."""
    out = {"full": 0, "sliding": 0}
    for slot in facts.layers:
        if not slot.owns_cache:
            continue
        width = slot.cache_width
        if width is None:
            width = (slot.kv_heads or 0) * ((slot.k_head_dim or 0) + (slot.v_head_dim or 0))
        out["sliding" if slot.kind == "sliding" else "full"] += width
    return out


def _rope(facts: ConfigFacts) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": facts.rope.kind, **facts.rope.parameters}
    if facts.rope.by_layer_type and facts.rope.kind == "per-layer-type":
        out["by_layer_type"] = facts.rope.by_layer_type
    if facts.rope.cos_sin_multiplier is not None:
        out["cos_sin_multiplier"] = facts.rope.cos_sin_multiplier
        out["cos_sin_multiplier_rule"] = facts.rope.cos_sin_rule
    if facts.rope.rotary_dim is not None:
        out["rotary_dim"] = facts.rope.rotary_dim
    nope = [x.index for x in facts.layers if x.grows and not x.rope]
    if nope:
        out["layers_without"] = nope
    return out


def _evidence(facts: ConfigFacts) -> dict[str, Any]:
    rows = {
        "layers": facts.layers_declared.evidence,
        "layer_pattern": facts.layer_rule,
        "sliding_window": facts.sliding_window.evidence,
        "num_attention_heads": facts.q_heads.evidence,
        "num_key_value_heads": facts.kv_heads.evidence,
        "head_dim": facts.head_dim.evidence,
        "softmax_scale": facts.scale.evidence,
        "rope": facts.rope.evidence,
        "sinks": facts.sinks.evidence,
        "softcap": facts.softcap_attention.evidence,
        "alibi": facts.alibi.evidence,
        "kv_sharing": facts.kv_sharing.evidence,
        "quantization": facts.quant.evidence,
    }
    if facts.mla:
        rows["mla"] = facts.mla.evidence
    return {
        name: {"source": e.source, "keys": list(e.keys), "how": e.how}
        for name, e in rows.items()
        if e.source != "absent"
    }


def summary(facts: ConfigFacts) -> str:
    """A short text: verdict, layers as runs, groups, scale, and what to know."""
    lines = [f"{facts.shown}: {facts.verdict.verdict} ({facts.verdict.scope})", f"  why      {facts.verdict.reason}"]
    nested = f", under {facts.text_path}" if facts.text_path else ""
    lines.append(f"  model    {facts.model_type} {facts.architecture or ''}{nested}".rstrip())
    runs = run_length(facts.layer_pattern)
    lines.append(f"  layers   {runs}  ({facts.kv_layers_total} own K/V; {facts.layer_rule.how})")
    for group in facts.groups:
        lines.append(f"  group    {_group_text(group)}")
    if facts.mla:
        m = facts.mla
        widths = f"rank {m.kv_lora_rank}, rope {m.qk_rope_head_dim}, nope {m.qk_nope_head_dim}, v {m.v_head_dim}"
        lines.append(f"  latent   {widths}")
    elems = _elems(facts)
    lines.append(f"  cached   {elems['full']} full + {elems['sliding']} sliding elements per token")
    if facts.scale.value is not None:
        lines.append(f"  scale    {facts.scale.value:.12g} = {facts.scale.formula}")
    lines.append(f"  rope     {facts.rope.kind}")
    for extra in facts.extra_caches:
        lines.append(f"  beside   {extra.name}: {extra.layers} layers")
    if facts.quant.method or facts.quant.kv_cache_quant:
        lines.append(f"  quant    weights {facts.quant.method or 'no'}, K/V {facts.quant.kv_cache_quant or 'no'}")
    lines += [f"  watch    {w}" for w in facts.watchpoints]
    lines += [f"  {f.severity.value:<8} {f.code} {f.fact} {f.todo}" for f in facts.findings]
    return "\n".join(lines)


def _group_text(group: KvGroup) -> str:
    name = _GROUP_NAME[group.kind].split(" ")[0]
    if group.cache_width is not None:
        shape = f"latent width {group.cache_width}"
    else:
        other = f"/{group.v_head_dim}" if group.v_head_dim != group.k_head_dim else ""
        shape = f"{group.kv_heads} K/V heads x {group.k_head_dim}{other}"
    window = f", window {group.window}" if group.window else f", span {group.span}" if group.span else ""
    shared = ", reads another layer's K/V" if group.shares_kv else ""
    return f"{group.layers} layers {name}: {group.q_heads} query heads, {shape}{window}{shared}"
