"""The layers as they really are: where code and config differ about a window, the code wins and a finding says so."""

from __future__ import annotations

from dataclasses import replace

from kvskill.analyzer.config.facts import ConfigFacts, KvGroup, LayerFacts
from kvskill.analyzer.selection.code import CodeView
from kvskill.diagnostics import Diagnostic, Severity, Span

__all__ = ["effective"]


def effective(facts: ConfigFacts, code: CodeView | None) -> tuple[ConfigFacts, tuple[Diagnostic, ...]]:
    """Config facts with the windows of the code, and the differences.

    A window seen in the code counts. That none was seen counts only where the code speaks of no window at all; else it
    is a doubt, and a blocking finding.
    """
    seen = code.layer_windows if code is not None else None
    if seen is None or code is None:
        return facts, ()
    layers: list[LayerFacts] = []
    changed: list[tuple[LayerFacts, int | None, Span]] = []
    doubted: list[LayerFacts] = []
    for layer in facts.layers:
        layers.append(layer)
        if layer.index not in seen or layer.kind not in ("full", "sliding"):
            continue
        found = seen[layer.index]
        window = int(found.value) if found is not None and found.value.isdigit() else None
        if window == (layer.window if layer.kind == "sliding" else None):
            continue
        if window is None and code.mentions_window is not None:
            doubted.append(layer)
            continue
        kind = "full" if window is None else "sliding"
        attn_type = "FullAttention" if window is None else "SlidingWindow"
        layers[-1] = replace(layer, kind=kind, attn_type=attn_type, window=window)  # type: ignore[arg-type]
        changed.append((layer, window, found.span if found is not None else Span(facts.shown)))
    findings = []
    if doubted and code.mentions_window is not None:
        findings.append(_doubt(doubted, code.mentions_window.span))
    if not changed:
        return facts, tuple(findings)
    findings.append(_difference(changed, code, facts))
    return replace(facts, layers=tuple(layers), groups=_regroup(layers)), tuple(findings)


def _doubt(layers: list[LayerFacts], span: Span) -> Diagnostic:
    return Diagnostic(
        "KV036",
        Severity.BLOCKING,
        f"The config says a window of {layers[0].window} in {len(layers)} layers (first: {layers[0].index}); the code "
        "speaks of a window, but its use in those layers was not understood.",
        "Apply the window through an attribute of the attention class, or give the model's real config with --config.",
        span,
    )


def _difference(changed: list[tuple[LayerFacts, int | None, Span]], code: CodeView, facts: ConfigFacts) -> Diagnostic:
    first, window, span = changed[0]
    said = "full attention" if first.kind == "full" else f"a window of {first.window}"
    does = "full attention" if window is None else f"a window of {window}"
    where = span if window is not None or not code.model.modeling else Span(code.model.modeling[0])
    return Diagnostic(
        "KV035",
        Severity.WARNING,
        f"In {len(changed)} layers (first: {first.index}) the code applies {does}, the config says {said}.",
        "The code wins; give the model's real config with --config if it is another one.",
        where,
    )


def _regroup(layers: list[LayerFacts]) -> tuple[KvGroup, ...]:
    """Layers by cache geometry, in the order of their first layer."""
    by: dict[tuple[object, ...], list[LayerFacts]] = {}
    for layer in layers:
        if layer.grows:
            key = (
                layer.kind,
                layer.attn_type,
                layer.q_heads,
                layer.kv_heads,
                layer.k_head_dim,
                layer.v_head_dim,
                layer.window,
                layer.span,
                layer.cache_width,
                layer.shares_kv_with is not None,
            )
            by.setdefault(key, []).append(layer)
    return tuple(
        KvGroup(
            layers=len(group),
            indices=tuple(x.index for x in group),
            kind=group[0].kind,
            attn_type=group[0].attn_type,
            q_heads=group[0].q_heads,
            kv_heads=group[0].kv_heads,
            k_head_dim=group[0].k_head_dim,
            v_head_dim=group[0].v_head_dim,
            window=group[0].window,
            span=group[0].span,
            cache_width=group[0].cache_width,
            shares_kv=group[0].shares_kv_with is not None,
        )
        for group in by.values()
    )
