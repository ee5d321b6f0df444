"""Position encoding: kind, parameters, and what multiplies cos and sin (never the softmax scale)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvskill.analyzer.config.facts import Evidence, RopeFacts
from kvskill.analyzer.config.heads import Geometry
from kvskill.analyzer.config.problems import invalid
from kvskill.analyzer.config.reader import Settings

__all__ = ["rope_of", "rope_settings", "yarn_mscale"]

_KEEP = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mrope_section",
    "short_mscale",
    "long_mscale",
    "alpha",
)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1 for factors above 1, else 1 (the YaRN temperature)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_settings(settings: Settings) -> tuple[dict[str, Any], Evidence]:
    """The flat rope settings in force, from rope_parameters or rope_scaling, else the class's own.

    Raises InputError KV049/KV050 for values of a wrong type.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if not settings.has(key):
            continue
        value = settings.raw(key)
        if not isinstance(value, Mapping):
            raise settings.wrong_type(settings.where(key), value, "an object")
        if key == "rope_parameters" and settings.has("rope_scaling") and not value.get("rope_type"):
            continue
        return dict(value), Evidence("key", (settings.where(key),))
    default = settings.info.defaults.get("rope_parameters")
    if isinstance(default, Mapping):
        how = f"default of {settings.info.class_name or settings.info.model_type}"
        return dict(default), Evidence("class-default", ("rope_parameters",), how)
    return {}, Evidence("absent")


def rope_of(settings: Settings, base: Geometry | None, alibi: bool) -> RopeFacts:
    """What the positions do; kind `none (...)` when nothing rotates."""
    params, evidence = rope_settings(settings)
    fixed = _fixed_kind(settings, params, alibi)
    if fixed:
        return RopeFacts(fixed, {}, Evidence("class-fact" if settings.info.facts else "derived", (), fixed))
    nested = {k: v for k, v in params.items() if isinstance(v, Mapping)}
    if nested and not params.get("rope_type", params.get("type")):
        kinds = {k: _kind(v) for k, v in sorted(nested.items())}
        distinct = set(kinds.values())
        if len(distinct) > 1:
            return RopeFacts("per-layer-type", {}, evidence, by_layer_type=kinds)
        params = dict(next(iter(nested.values())))
        return _flat(settings, params, evidence, base, kinds)
    return _flat(settings, params, evidence, base, {})


def _flat(
    settings: Settings, params: dict[str, Any], evidence: Evidence, base: Geometry | None, by_type: dict[str, str]
) -> RopeFacts:
    kind = _kind(params)
    shown = {k: params[k] for k in _KEEP if params.get(k) is not None}
    if kind == "default" and settings.value("use_dynamic_ntk"):
        shown["use_dynamic_ntk"] = True
    multiplier, rule = _multiplier(kind, params, settings)
    return RopeFacts(
        kind, shown, evidence, multiplier, rule, rotary_dim=_rotary_dim(settings, params, base), by_layer_type=by_type
    )


def _kind(params: Mapping[str, Any]) -> str:
    kind = params.get("rope_type") or params.get("type") or "default"
    return {"su": "longrope", "mrope": "mrope"}.get(kind, kind) if isinstance(kind, str) else "default"


def _fixed_kind(settings: Settings, params: Mapping[str, Any], alibi: bool) -> str:
    info = settings.info
    position = info.facts.get("position")
    if alibi:
        return "none (ALiBi)"
    if key := info.facts.get("position_key"):
        chosen = settings.value(key)
        if settings.has(key) or key in info.defaults:
            return "" if chosen == "rope" else "none (NoPE)"
    if gate := info.facts.get("position_gate"):
        return "" if settings.value(gate) else "none"
    if position == "learned":
        return "none (learned absolute positions)"
    if position == "none":
        return "none (NoPE)" if settings.value("num_attention_heads") else "none"
    if position == "relative":
        return "none (relative position bias)"
    if position == "rope" or params or info.reads("rope_parameters"):
        return ""
    rotary = any(settings.has(k) for k in ("rope_theta", "rotary_dim", "rotary_pct", "rotary_emb_base", "rope_base"))
    if info.has_class and not rotary:
        return "none (learned absolute positions)"
    return ""


def _multiplier(kind: str, params: Mapping[str, Any], settings: Settings) -> tuple[float | None, str | None]:
    given = params.get("attention_factor")
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given), "attention_factor (applied to cos/sin, not to the softmax scale)"
    if kind == "yarn":
        factor = _float(settings, params, "factor") or 1.0
        mscale, all_dim = _float(settings, params, "mscale"), _float(settings, params, "mscale_all_dim")
        if mscale and all_dim:
            value = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
            rule = "get_mscale(factor,mscale)/get_mscale(factor,mscale_all_dim)"
        else:
            value, rule = yarn_mscale(factor), "0.1*ln(factor)+1"
        return round(value, 10), f"{rule} (applied to cos/sin, not to the softmax scale)"
    if kind == "longrope":
        longest = settings.integer(settings.find("max_positions"))
        original = params.get("original_max_position_embeddings") or settings.value("original_max_position_embeddings")
        if "short_mscale" in params:
            return None, None
        if longest and isinstance(original, int) and not isinstance(original, bool) and original > 1:
            ratio = longest.value / original
            value = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
            return round(value, 10), "sqrt(1+ln(max/orig)/ln(orig)) (applied to cos/sin)"
    return None, None


def _float(settings: Settings, params: Mapping[str, Any], key: str) -> float | None:
    value = params.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid("KV049", settings.shown, f"rope {key} is {value!r}, not a number.", "Give a number.")
    return float(value)


def _rotary_dim(settings: Settings, params: Mapping[str, Any], base: Geometry | None) -> int | None:
    """Rotated width where it is less than the head, by the first key that says so."""
    if base is None or base.mla:
        return base.mla.qk_rope_head_dim if base and base.mla else None
    width = base.head_dim.value
    fixed = settings.integer(settings.get("rotary_dim"))
    if fixed:
        return fixed.value if fixed.value < width else None
    factor = params.get("partial_rotary_factor")
    if factor is None:
        factor = settings.value("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction", "rope_pct")
    if factor is None:
        factor = settings.info.facts.get("rotary")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1:
        return None
    return int(width * factor)
