"""What the query-key product is multiplied with before the softmax, by the keys first and the class second."""

from __future__ import annotations

import math

from kvskill.analyzer.config.facts import Evidence, ScaleFacts
from kvskill.analyzer.config.heads import Geometry
from kvskill.analyzer.config.problems import invalid
from kvskill.analyzer.config.reader import Settings
from kvskill.analyzer.config.rope import rope_settings, yarn_mscale
from kvskill.analyzer.config.rules import rules

__all__ = ["scale_for", "scale_of"]


def scale_of(settings: Settings, base: Geometry | None) -> ScaleFacts:
    """The scale handed to the attention operator for the model-wide geometry.

    Raises InputError KV049/KV050 for values that cannot be a scale.
    """
    if base is None:
        return ScaleFacts(None, None, Evidence("absent"))
    named = settings.info.facts.get("scale")
    if named == "one":
        how = "the class does not divide by the root of the width"
        return ScaleFacts(1.0, f"1.0 ({how})", Evidence("class-fact", (), how))
    if base.mla:
        return _mla(settings, base)
    if found := _from_keys(settings, base):
        return found
    width = base.head_dim.value
    if named == "inverse_head_dim":
        return ScaleFacts(1.0 / width, f"1/head_dim = 1/{width}", Evidence("class-fact", base.head_dim.evidence.keys))
    if named == "half_head_dim":
        evidence = Evidence("class-fact", base.head_dim.evidence.keys)
        return ScaleFacts((width / 2) ** -0.5, f"(head_dim/2)^-0.5 = {width // 2}^-0.5", evidence)
    return ScaleFacts(
        width**-0.5, f"head_dim^-0.5 = {width}^-0.5", Evidence("derived", base.head_dim.evidence.keys, "head_dim^-0.5")
    )


def scale_for(base: ScaleFacts, geometry: Geometry, head_dim: int | None) -> float | None:
    """The scale of a layer whose width differs from the model-wide one; only a width-based scale changes."""
    if base.value is None or head_dim is None or head_dim == geometry.head_dim.value:
        return base.value
    if base.formula and base.formula.startswith("head_dim^-0.5"):
        return float(head_dim**-0.5)
    if base.formula and base.formula.startswith("1/head_dim"):
        return 1.0 / head_dim
    if base.formula and base.formula.startswith("(qk_nope"):
        return base.value * float((head_dim / geometry.head_dim.value) ** -0.5)
    return base.value


def _from_keys(settings: Settings, base: Geometry) -> ScaleFacts | None:
    width = base.head_dim.value
    if scalar := settings.number(settings.get("query_pre_attn_scalar")):
        if scalar.value <= 0:
            raise _not_a_scale(settings, scalar.evidence.keys[0], scalar.value)
        shown = int(scalar.value) if scalar.value.is_integer() else scalar.value
        return ScaleFacts(scalar.value**-0.5, f"query_pre_attn_scalar^-0.5 = {shown}^-0.5", scalar.evidence)
    multiplier = settings.number(settings.get("attention_multiplier", "attn_output_multiplier"))
    if multiplier:
        if multiplier.value <= 0:
            raise _not_a_scale(settings, multiplier.evidence.keys[0], multiplier.value)
        key = multiplier.evidence.keys[0].rpartition(".")[2]
        return ScaleFacts(multiplier.value, f"{key} (config value, used as is)", multiplier.evidence)
    fixed = settings.number(settings.get("attn_config.softmax_scale"))
    if fixed:
        return ScaleFacts(fixed.value, "attn_config.softmax_scale (config value, used as is)", fixed.evidence)
    for key in rules()["inverse_scale_flags"]:
        if settings.flag(key):
            return ScaleFacts(1.0 / width, f"1/head_dim = 1/{width}", Evidence("key", (settings.where(key),)))
    if settings.flag("mup_use_scaling") and (mup := settings.number(settings.get("mup_attn_multiplier"))):
        formula = f"mup_attn_multiplier/head_dim = {mup.value}/{width} (muP: 1/d, not 1/sqrt(d))"
        return ScaleFacts(mup.value / width, formula, mup.evidence)
    if settings.flag("scale_attn_weights") is False:
        evidence = Evidence("key", (settings.where("scale_attn_weights"),))
        return ScaleFacts(1.0, "1.0 (scale_attn_weights is false)", evidence)
    return None


def _mla(settings: Settings, base: Geometry) -> ScaleFacts:
    """(nope + rope)^-0.5, times the squared YaRN factor where the class applies it."""
    assert base.mla is not None
    width = base.mla.qk_head_dim
    if width == 0:
        fact = "The query width of the latent attention is 0."
        raise invalid("KV050", settings.shown, fact, "Give the model's own widths.")
    formula = f"(qk_nope_head_dim+qk_rope_head_dim)^-0.5 = {width}^-0.5"
    params, source = rope_settings(settings)
    inner = next((v for v in params.values() if isinstance(v, dict)), None)
    if inner is not None and not params.get("rope_type"):
        params = inner
    kind = params.get("rope_type") or params.get("type") or "default"
    all_dim, factor = params.get("mscale_all_dim"), params.get("factor")
    keys = base.mla.evidence.keys
    applies = settings.info.facts.get("mscale", True) and kind != "default"
    if applies and all_dim and factor:
        for name, value in (("mscale_all_dim", all_dim), ("factor", factor)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise invalid("KV049", settings.shown, f"rope {name} is {value!r}, not a number.", "Give a number.")
        m = yarn_mscale(float(factor), float(all_dim))
        if m != 1.0:
            formula += f" * m^2, m = 0.1*mscale_all_dim*ln(factor)+1 = {m:.10f}"
            evidence = Evidence("derived", (*keys, *source.keys), "YaRN factor squared")
            return ScaleFacts(width**-0.5 * m * m, formula, evidence)
    return ScaleFacts(width**-0.5, formula, Evidence("derived", keys, "full query width, not the latent width"))


def _not_a_scale(settings: Settings, key: str, value: float) -> Exception:
    shown = value if math.isfinite(value) else "not finite"
    return invalid(
        "KV050", settings.shown, f"{key} is {shown}; a scale must be positive.", "Give the model's own value."
    )
