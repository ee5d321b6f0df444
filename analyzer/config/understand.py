"""From a config to ConfigFacts: the order in which the parts are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvskill.analyzer.config import assemble
from kvskill.analyzer.config.extras import alibi_of, extra_caches, moe_of, mtp_of, quant_of, sinks_of, softcap_of
from kvskill.analyzer.config.facts import ConfigFacts, Evidence, LayerFacts, ScaleFacts, Value
from kvskill.analyzer.config.grounds import Grounds, operator_grounds, score_grounds
from kvskill.analyzer.config.heads import Geometry, base_geometry
from kvskill.analyzer.config.layers import layer_kinds
from kvskill.analyzer.config.nested import Located, locate
from kvskill.analyzer.config.notes import blocking_notes, facts_notes
from kvskill.analyzer.config.problems import refused
from kvskill.analyzer.config.reader import Settings
from kvskill.analyzer.config.rope import rope_of
from kvskill.analyzer.config.rules import rules
from kvskill.analyzer.config.scale import scale_for, scale_of
from kvskill.analyzer.config.sidefiles import SideFile
from kvskill.analyzer.config.slots import build_slots
from kvskill.analyzer.config.verdict import decide, out_of_scope
from kvskill.analyzer.config.window import Window, effective_window
from kvskill.diagnostics import Diagnostic

__all__ = ["understand"]


def understand(
    config: Mapping[str, Any],
    *,
    shown: str,
    side: tuple[SideFile, ...] = (),
    notes: tuple[Diagnostic, ...] = (),
) -> ConfigFacts:
    """Everything that follows from one config, with evidence.

    `config` is the parsed config.json, `shown` the name findings print, `side` what files beside it say, `notes`
    findings made before. Raises InputError (exit 2) for wrong types and ranges, Refusal (exit 3) when keys
    contradict each other or an answer would be a guess.
    """
    located = locate(config, shown)
    settings = located.settings
    scope = out_of_scope(config, located, settings)
    if scope is None:
        _must_be_language_model(config, located)
    grounds = Grounds(shown, list(notes))
    encoder = scope is not None and ("encoder-only" in scope[0] or scope[0].startswith("no text generation"))
    mtp = mtp_of(settings, located, config)
    declared = _declared(settings)
    base = base_geometry(settings)
    made = layer_kinds(settings, declared, mtp.count)
    window = _settle(effective_window(settings, made), settings, encoder)
    if base is None and any(k not in ("state", "none") for k in window.kinds):
        raise refused("KV056", shown, "No key gives the number of attention heads.", "Add the model's own count.")
    chunk = settings.integer(settings.get("attention_chunk_size"))
    span = chunk.value if chunk and "chunked" in window.kinds else assemble.sparse_span(settings)
    slots = build_slots(settings, window, base, span, assemble.nope_flags(settings, window.kinds))
    caches = any(s.grows for s in slots)
    scale = scale_of(settings, base if caches or encoder else None)
    slots = _with_scale(slots, base, scale, settings)
    mla = base.mla if base and any(s.cache_width for s in slots) else None
    softcap, alibi = softcap_of(settings, rules()["softcap_keys"]), alibi_of(settings)
    watch: list[str] = []
    if scope is None:
        blocking_notes(located, base, grounds)
        score_grounds(settings, slots, window.kinds, grounds, softcap, alibi)
        watch = operator_grounds(slots, mla, grounds)
    extras = extra_caches(settings, slots, window.kinds, caches and _crosses(config, located))
    verdict = decide(slots, mla, grounds, scope, any("indexer" in e.name for e in extras))
    heads = base if base and (caches or encoder) else None
    rule = assemble.rule_text(slots, made.evidence.how, window.rule, window.raw.value)
    facts = ConfigFacts(
        shown=shown,
        model_type=located.model_type,
        architecture=assemble.architecture(config, settings),
        text_path=settings.path,
        text_model_type=located.text_model_type,
        known_class=settings.info.known,
        layers=slots,
        layers_declared=declared or Value(len(made.kinds), made.evidence),
        attention_kind="none" if encoder else assemble.attention_kind(slots, base, mla),
        layer_rule=Evidence(made.evidence.source, made.evidence.keys, rule),
        sliding_window=window.value if any(s.window for s in slots) else Value(None, window.value.evidence),
        sliding_window_raw=window.raw,
        q_heads=_model_wide(heads, slots, mla is not None, 0),
        kv_heads=_model_wide(heads, slots, mla is not None, 1),
        head_dim=_head_dim(heads, bool(mla)),
        naive_head_dim=heads.naive if heads else None,
        groups=assemble.groups_of(slots),
        mla=mla,
        rope=rope_of(settings, base, alibi.value),
        scale=scale,
        sinks=sinks_of(settings, slots),
        softcap_attention=softcap,
        softcap_final=softcap_of(settings, rules()["final_softcap_keys"]),
        alibi=alibi,
        kv_sharing=assemble.sharing_of(settings, slots),
        k_eq_v=assemble.k_eq_v_of(settings, slots),
        mtp=mtp,
        moe=moe_of(settings),
        quant=quant_of(config, settings, side),
        encoder_decoder=scope is not None and scope[0].startswith("encoder-decoder"),
        multimodal=located.multimodal,
        extra_caches=extras,
        class_defaults_needed=tuple(settings.defaulted),
        verdict=verdict,
        watchpoints=(),
        findings=(),
        acceptable_windows=window.acceptable,
        lookup=settings.get,
    )
    if scope is None:
        watch += facts_notes(config, located, base, window, grounds, facts)
    return replace(facts, watchpoints=tuple(watch), findings=tuple(grounds.findings))


def _must_be_language_model(config: Mapping[str, Any], located: Located) -> None:
    """An unknown class needs a sign that it generates text: a vocabulary or an architecture name."""
    if located.settings.info.known or located.top.known:
        return
    names = [str(x) for t in (config, located.settings.tree) for x in t.get("architectures") or []]
    if any(n.endswith(p) for n in names for p in rules()["lm_architectures"]):
        return
    if located.settings.find("vocab") is None and not any(k in config for k in rules()["concepts"]["vocab"]):
        fact = "No known model_type, vocabulary or architecture name says that this is a language model."
        raise refused("KV051", located.settings.shown, fact, "Give the config.json of a language model.")


def _declared(settings: Settings) -> Value[int] | None:
    found = settings.find("layers")
    if found is not None and isinstance(found.value, list):
        raise settings.wrong_type(found.evidence.keys[0], found.value, "a whole number")
    return settings.integer(found, low=1, high=rules()["limits"]["max_layers"])


def _settle(window: Window, settings: Settings, encoder: bool) -> Window:
    """Kinds that depend on more than their own list: chunks without a size, encoders."""
    kinds, sizes = list(window.kinds), list(window.per_layer)
    chunk = settings.integer(settings.get("attention_chunk_size"))
    if chunk is None:
        kinds = ["full" if k == "chunked" else k for k in kinds]
    if encoder:
        kinds, sizes = ["none"] * len(kinds), [None] * len(kinds)
    return replace(window, kinds=kinds, per_layer=sizes)


def _with_scale(
    slots: tuple[LayerFacts, ...], base: Geometry | None, scale: ScaleFacts, settings: Settings
) -> tuple[LayerFacts, ...]:
    if base is None or scale.value is None:
        return slots
    by_layer = settings.value("scale_attn_by_inverse_layer_idx") is True
    out = []
    for slot in slots:
        value = scale_for(scale, base, slot.k_head_dim) if slot.grows else None
        if value is not None and by_layer:
            value /= slot.index + 1
        out.append(replace(slot, scale=value))
    return tuple(out)


def _crosses(config: Mapping[str, Any], located: Located) -> bool:
    """True when the decoder also attends to another sequence in the same layers."""
    info = located.settings.info
    if config.get("is_encoder_decoder") is True or "encoder-decoder" in (info.role, located.top.role):
        return True
    return bool(located.settings.value("add_cross_attention"))


def _model_wide(heads: Geometry | None, slots: tuple[LayerFacts, ...], latent: bool, which: int) -> Value[int | None]:
    """Query (0) or K/V (1) heads of the model; by the layers where they are given layer by layer."""
    if heads is None:
        return Value(None, Evidence("absent"))
    given = (heads.q_heads, heads.kv_heads)[which]
    if latent:
        return given
    real = assemble.model_heads(slots, heads)[which]
    return given if real == given.value else Value(real, Evidence("derived", (), "most frequent of the layers"))


def _head_dim(heads: Geometry | None, latent: bool) -> Value[int | None]:
    if heads is None:
        return Value(None, Evidence("absent"))
    if latent:
        return Value(None, Evidence("derived", (), "latent attention: a head_dim key, if any, is not the cache width"))
    return Value(heads.head_dim.value, heads.head_dim.evidence)
