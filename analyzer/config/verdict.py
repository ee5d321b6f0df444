"""Paged, legacy-keep or out-of-scope, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvskill.analyzer.config.facts import Evidence, LayerFacts, MlaFacts, Verdict
from kvskill.analyzer.config.grounds import Grounds
from kvskill.analyzer.config.nested import Located
from kvskill.analyzer.config.reader import Settings
from kvskill.analyzer.config.rules import rules

__all__ = ["decide", "out_of_scope"]


def out_of_scope(config: Mapping[str, Any], located: Located, settings: Settings) -> tuple[str, Evidence] | None:
    """Why there is no causal, growing K/V to page, by role, mask keys and architecture names."""
    info, top = settings.info, located.top
    names = [str(x) for x in config.get("architectures") or [] if isinstance(x, str)]
    if config.get("is_encoder_decoder") is True or (
        config.get("is_encoder_decoder") is None and "encoder-decoder" in (info.role, top.role)
    ):
        keys = ("is_encoder_decoder",) if config.get("is_encoder_decoder") else ()
        return (
            "encoder-decoder: a static cross-attention cache beside a short decoder, not a decoder LLM",
            Evidence("key" if keys else "class-fact", keys),
        )
    for rule in rules()["bidirectional"]:
        found = settings.get(rule["key"])
        if found is None and settings.path and rule["key"] in config:
            value = config[rule["key"]]
        else:
            value = found.value if found else None
        if value in rule["is"] and (found is None or found.evidence.source == "key" or rule["key"] != "causal"):
            reason = f"{rule['key']} is {str(value).lower()}: a bidirectional model, one forward pass, nothing to cache"
            return reason, found.evidence if found else Evidence("key", (rule["key"],))
    if hit := next((n for n in names for p in rules()["bidirectional_architectures"] if p in n), None):
        return f"architecture {hit}: a bidirectional model, nothing to cache", Evidence("key", ("architectures",))
    decoder = settings.value("is_decoder") is True or settings.value("causal") is True
    if info.role == "encoder" and not decoder:
        return "encoder-only: no causal K/V cache", Evidence("class-fact", (), f"{info.class_name or info.model_type}")
    generates = any(n.endswith(p) for n in names for p in rules()["lm_architectures"])
    if info.role == "other" and not generates:
        reason = "no text generation: the model has no causal language model head"
        return reason, Evidence("class-fact", (), str(info.model_type))
    masked = names and all(any(n.endswith(p) for p in rules()["encoder_architectures"]) for n in names)
    if masked and not info.has_class and not decoder:
        return f"architecture {names[0]}: encoder-only, no causal K/V cache", Evidence("key", ("architectures",))
    return None


def decide(
    slots: tuple[LayerFacts, ...],
    mla: MlaFacts | None,
    grounds: Grounds,
    scope_reason: tuple[str, Evidence] | None,
    indexed: bool,
) -> Verdict:
    """The verdict that follows from the findings so far."""
    if scope_reason is not None:
        return Verdict("out-of-scope", "none", scope_reason[0], ("out-of-scope",), ())
    grows = [s for s in slots if s.grows]
    if not grows:
        return Verdict(
            "out-of-scope",
            "none",
            "no attention layer, so no growing K/V cache; only fixed-size recurrent state",
            ("out-of-scope",),
        )
    if grounds.blocking:
        reasons = " ".join(f.fact for f in grounds.blocking)
        codes = tuple(dict.fromkeys(f.code for f in grounds.blocking))
        return Verdict("legacy-keep", "none", reasons, ("legacy-keep",), codes)
    acceptable: tuple[str, ...] = ("paged",)
    if any(s.kind in ("chunked", "cross") for s in slots):
        acceptable = ("paged", "legacy-keep")
    return Verdict("paged", _scope(slots), _reason(slots, mla, indexed), acceptable)


def _scope(slots: tuple[LayerFacts, ...]) -> str:
    if any(s.kind == "cross" for s in slots):
        return "self-attention layers only"
    return "attention layers only" if any(s.kind == "state" or s.has_state for s in slots) else "all KV layers"


def _reason(slots: tuple[LayerFacts, ...], mla: MlaFacts | None, indexed: bool) -> str:
    grows = [s for s in slots if s.grows]
    kinds = {s.attn_type for s in grows}
    parts: list[str] = []
    if mla:
        parts.append("two cache entries (latent, rope) of FullAttention type per MLA block")
    elif kinds == {"FullAttention", "SlidingWindow"}:
        parts.append("mixed: SlidingWindow and FullAttention managers side by side")
    elif kinds == {"SlidingWindow"}:
        parts.append("every attention layer SlidingWindow")
    elif not any(s.kind == "chunked" for s in grows):
        parts.append("standard decoder, FullAttention in every attention layer")
    if any(s.kind == "chunked" for s in grows):
        parts.append(
            "chunked layers can be cached as FullAttention but need a block-diagonal mask beyond the chunk; "
            "never SlidingWindow"
        )
    if indexed:
        parts.append("plus one entry for the indexer keys")
    if any(s.shares_kv_with is not None for s in slots):
        parts.append("layers that reuse K/V get the block table of their owner and no cache")
    if any(s.kind == "state" or s.has_state for s in slots):
        parts.append("recurrent, convolution and linear-attention state is fixed-size per request and kept apart")
    if any(s.kind == "cross" for s in slots):
        parts.append("cross-attention layers hold K/V of fixed length and stay static")
    return "; ".join(parts)
